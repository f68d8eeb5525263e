"""What the programs of README and docs/ take as given: imports, a module, data, a model in files.

``tests.test_fenced_blocks`` writes ``from tests.support.given_names import *`` above each program.
"""
# ruff: noqa: F401 - imports that pages take as given

import os
from itertools import islice
from pathlib import Path

import lightning as L
import torch
import transformers
from IPython.display import SVG
from lightning.pytorch.demos.boring_classes import RandomDataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations import replace_with_bnb_linear

import lightning_pipeoffload
from lightning_pipeoffload import (
    PackedRows,
    PackedRowsSampler,
    PipelineMonitor,
    PipeOffloadStrategy,
    chunked_loss,
    load_weights,
    save_pretrained,
)

FOLDER = "pretrained"
WIDTH = 32
config = LlamaConfig(
    vocab_size=256,
    hidden_size=WIDTH,
    intermediate_size=2 * WIDTH,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=16384,
    architectures=["LlamaForCausalLM"],
)
lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
dataset = [{"input_ids": torch.arange(5 + index % 7) % 256} for index in range(64)]
lengths = [len(item["input_ids"]) for item in dataset]


def pack(texts):
    """Return texts as a batch of one row."""
    row = torch.cat([text["input_ids"] for text in texts])[None]
    return {"input_ids": row, "labels": row}


class MyModule(L.LightningModule):
    """Regression by a chain of blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).relu()
        return x

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class MyDataModule(L.LightningDataModule):
    """Random rows."""

    def train_dataloader(self):
        return DataLoader(RandomDataset(WIDTH, 640), batch_size=8)


class Texts(L.LightningModule):
    """A causal model of texts, whose layers are made in ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)


class Adapted(Texts):
    """Adapters on a frozen model."""

    def configure_model(self):
        if self.model is None:
            self.model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)


class Graphs(MyModule):
    """A number for each graph, from its nodes."""

    def training_step(self, batch, batch_idx):
        nodes = self(batch["nodes"])
        sums = torch.zeros(len(batch["y"]), WIDTH).index_add(0, batch["graph"], nodes)
        return (sums.sum(1) - batch["y"]).square().mean()


def pick(batch, some):
    """Return the graphs with these numbers."""
    chosen = (batch["graph"][:, None] == some).any(1)
    graph = (batch["graph"][chosen][:, None] == some).int().argmax(1)
    return {"nodes": batch["nodes"][chosen], "graph": graph, "y": batch["y"][some]}


def graphs():
    """Return a loader of batches of 8 graphs with 3 nodes each."""
    numbers = torch.arange(8).repeat_interleave(3)
    batch = {"nodes": torch.randn(24, WIDTH), "graph": numbers, "y": torch.randn(8)}
    return DataLoader([batch] * 4, batch_size=None)


def rows():
    """Return 32 texts of one length."""
    tokens = torch.arange(17) % 256
    return [{"input_ids": tokens, "labels": tokens}] * 32


loader = DataLoader(rows(), batch_size=8)


def train(module, loader=loader, **arguments):
    """Train over two processes on the CPU, two steps."""
    strategy = arguments.pop("strategy", None) or PipeOffloadStrategy(
        schedule="zb_h1", microbatch_weight=arguments.pop("microbatch_weight", "samples")
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=2, **quiet, **arguments
    )
    trainer.fit(module, loader)
    return trainer


def save_alone(module):
    """Train on one device, and save a checkpoint as ``last.ckpt``."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, **quiet)
    trainer.fit(module, loader)
    trainer.save_checkpoint("last.ckpt")


# Lightning starts the other ranks with the same program, which finds the folder there.
if "LOCAL_RANK" not in os.environ and not Path(FOLDER).exists():
    LlamaForCausalLM(config).save_pretrained(FOLDER)
    LlamaForCausalLM(config).save_pretrained("base")
    Path("lines.txt").write_text("one\ntwo\nthree\n")

L.seed_everything(1, verbose=False)  # all ranks have the same data
