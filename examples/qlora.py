"""QLoRA: adapters on a frozen base in 4 bits, of which each rank quantizes its own layers.

    pip install "lightning-pipeoffload[hf]" peft bitsandbytes
    python examples/qlora.py
    python examples/qlora.py --devices 4 --pretrained FOLDER --context 2048 --recompute full

It needs no network: it first makes a small Llama and saves it in bfloat16, as a hub would have it,
in ``qlora/pretrained``; with ``--pretrained`` it starts from a folder of yours. Bytes are tokens.
The adapters are written to ``qlora/adapters``, which ``peft.PeftModel.from_pretrained`` reads. What
fits is planned from the folder's ``config.json`` alone:

    cd examples
    pipeoffload-plan +model._target_=qlora.QLoRA +model.folder=FOLDER data.context=2048
        num_microbatches=16 schedule=zb_v strategy.recompute=full device_memory=22GiB
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations import replace_with_bnb_linear

from lightning_pipeoffload import PipeOffloadStrategy, load_weights, save_pretrained
from lightning_pipeoffload.demos import PythonSource

FOLDER = Path("qlora")


class QLoRA(L.LightningModule):
    """Predicts the next byte of a text by a frozen model with adapters.

    Args:
        folder: As ``save_pretrained`` writes it; its weights may lack where memory is planned.
        rank: The rank of the adapters.
    """

    def __init__(self, folder: str, rank: int = 16) -> None:
        super().__init__()
        self.folder, self.rank = folder, rank
        self.model: Any = None

    def configure_model(self) -> None:
        """Make the layers; each rank reads and quantizes those of its stages only."""
        if self.model is not None:
            return
        config = AutoConfig.from_pretrained(self.folder)
        base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        in_4_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        replace_with_bnb_linear(base, ["lm_head"], in_4_bits)
        if any(Path(self.folder).glob("*.safetensors")):
            load_weights(base, self.folder)
        base.is_loaded_in_4bit = True  # which peft looks for
        adapters = LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        self.model = get_peft_model(base, adapters)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        text, _ = batch
        loss: Tensor = self.model(input_ids=text, labels=text).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW of the adapters."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=2e-4)

    def on_train_end(self) -> None:
        """Write the adapters of all ranks."""
        save_pretrained(self, FOLDER / "adapters")


def make_pretrained(folder: Path, arguments: Namespace) -> None:
    """Write a model with random weights where none is."""
    if folder.exists():
        return
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main(arguments: Namespace) -> None:
    """Train adapters."""
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(
            schedule=arguments.schedule,
            num_microbatches=arguments.num_microbatches or "auto",
            recompute=arguments.recompute,
            memory_limit=arguments.memory_limit,
        ),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=arguments.steps,
    )
    folder = Path(arguments.pretrained or FOLDER / "pretrained")
    if trainer.is_global_zero:
        make_pretrained(folder, arguments)
    text = PythonSource(arguments.context, arguments.batch_size)
    trainer.fit(QLoRA(str(folder), arguments.rank), text)


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--schedule", default="zb_v")
    parser.add_argument("--num-microbatches", type=int, help="the strategy's choice by default")
    parser.add_argument("--recompute", default="none", help="none, cheap or full")
    parser.add_argument("--memory-limit", help="of a device, 20GiB say")
    parser.add_argument("--pretrained", help="a folder of your own")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
