"""A Llama from Hugging Face whose stages' layers are shared by ranks, each with some of the heads.

    pip install transformers
    python examples/tensor_parallel.py --accelerator cpu
    python examples/tensor_parallel.py --devices 8 --tensor-parallel-size 4 --layers 16

The ranks of a stage share its layers by the plan that the model itself has; stages follow each
other over as many ranks as are left. Checkpoints are those of the whole model.
"""

from argparse import ArgumentParser, Namespace
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pipeoffload import PipeOffloadStrategy, tensor_parallel_plan


class Llama(L.LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.model = config, None

    def configure_model(self) -> None:
        """Make the model, and share its layers where there are ranks for it."""
        if self.model is not None:
            return
        self.model = LlamaForCausalLM(self.config)
        if self.device_mesh is not None:
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.model, mesh, tensor_parallel_plan(self.model))

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
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(
            tensor_parallel_size=arguments.tensor_parallel_size, schedule=arguments.schedule
        ),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        max_steps=arguments.steps,
    )
    data = DataLoader(read_manual(arguments.context), arguments.batch_size, shuffle=True)
    trainer.fit(Llama(config), data)


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
