"""Fine-tune a Hugging Face model whose weights are in files, of which each rank reads its own part.

    pip install "lightning-pipeoffload[hf]"
    python examples/finetune_hf.py
    python examples/finetune_hf.py --devices 4 --schedule zb_h1 --lora 4

It needs no network: it first makes a small model and saves it, as a hub would have it, in
``finetune_hf/pretrained``; with ``--pretrained FOLDER`` it starts from one of yours. What was
trained is written back to ``finetune_hf/finetuned``, which ``from_pretrained`` reads. With
``--lora RANK`` (``pip install peft``) only adapters of that rank are trained; the checkpoint has
them.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_pipeoffload import PipeOffloadStrategy, load_weights, save_pretrained

FOLDER = Path("finetune_hf")


class Finetuned(L.LightningModule):
    """Predicts the next byte of a text, starting from weights in files.

    Args:
        folder: As ``save_pretrained`` writes it.
        lora: The rank of the adapters; 0: all weights are trained.
    """

    def __init__(self, folder: str, lora: int = 0) -> None:
        super().__init__()
        self.folder = folder
        self.lora = lora
        self.model: Any = None

    def configure_model(self) -> None:
        """Make the layers; each rank makes, and loads, those of its stages only."""
        if self.model is not None:
            return
        config = AutoConfig.from_pretrained(self.folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        load_weights(self.model, self.folder)
        if self.lora:
            self.model = with_adapters(self.model, self.lora)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        loss = self.model(input_ids=text, labels=text).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW of what is trained."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4)


def with_adapters(model: Any, rank: int) -> Any:
    """Freeze a model and give its attention adapters."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only where it is used

    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=rank, target_modules=names, lora_dropout=0.1))


def make_pretrained(folder: Path, arguments: Namespace) -> None:
    """Write a model with random weights where none is: several shards, tied, in bfloat16."""
    if folder.exists():
        return
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")


def read_manual(context: int) -> Tensor:
    """Return the reference manual that every Python carries, as bytes ``[pieces, context]``."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    return text[: len(text) // context * context].view(-1, context)


def main(arguments: Namespace) -> None:
    """Fine-tune, and write the model back."""
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(schedule=arguments.schedule),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=arguments.steps,
    )
    folder = Path(arguments.pretrained or FOLDER / "pretrained")
    if trainer.is_global_zero:
        make_pretrained(folder, arguments)
    data = DataLoader(read_manual(arguments.context), arguments.batch_size, shuffle=True)
    trainer.fit(Finetuned(str(folder), arguments.lora), data)
    if trainer.is_global_zero and not arguments.lora:
        config = AutoConfig.from_pretrained(folder)
        save_pretrained(trainer.checkpoint_callback.best_model_path, FOLDER / "finetuned", config)


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--schedule", default="zb_v")
    parser.add_argument("--pretrained", help="a folder of your own")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: none")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
