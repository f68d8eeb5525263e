"""A Llama from Hugging Face, made from a configuration, over the ranks of a pipeline.

    pip install transformers
    python examples/hf_llama.py
    python examples/hf_llama.py --devices 4 --layers 8 --schedule v_half --recompute cheap

The model is Hugging Face's own class, untouched: its layers (``model.model.layers``) are found by
themselves, and checkpoints have its names. Half of each rank's activations wait in host memory.
"""

from argparse import ArgumentParser, Namespace
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pipeoffload import PipeOffloadStrategy


class Llama(L.LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        loss = self.model(input_ids=text, labels=text).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def read_manual(context: int) -> Tensor:
    """Return the reference manual that every Python carries, as bytes ``[pieces, context]``."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    return text[: len(text) // context * context].view(-1, context)


def main(arguments: Namespace) -> None:
    """Train on the manual."""
    L.seed_everything(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(
            schedule=arguments.schedule, offload=arguments.offload, recompute=arguments.recompute
        ),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=arguments.steps,
    )
    data = DataLoader(read_manual(arguments.context), arguments.batch_size, shuffle=True)
    trainer.fit(Llama(config), data)


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--schedule", default="zb_v")
    parser.add_argument("--offload", default="half")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
