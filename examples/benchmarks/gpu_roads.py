"""Fits on one GPU of what a cut has to know of a model, for ``gpu_check.py``.

A Llama in slices of its sequences, one shared by tensor ranks, and an encoder that is called twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from examples.benchmarks import gpu_llama
from examples.benchmarks.gpu_fits import backend, compared, losses_of_two
from examples.benchmarks.gpu_llama import Size
from examples.benchmarks.gpu_process import is_accelerated, needing
from examples.tensor_parallel import Llama
from lightning_pipeoffload import PipeOffloadStrategy


def _trainer(device: torch.device, **options: Any) -> Trainer:
    return Trainer(
        accelerator="auto" if is_accelerated(device) else "cpu", devices=1, logger=False,
        max_epochs=1, enable_model_summary=False, enable_progress_bar=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip


@needing("transformers")
def sliced_llama(device: torch.device) -> Iterator[str]:
    """The layers of ``gpu_llama`` in whole sequences and in four slices: rate, memory and loss."""
    count, losses = Size.on(device).num_microbatches, []
    for number, schedule in ((1, "zb_h1"), (4, "seq_1f1b"), (4, "seq_zb")):
        strategy = PipeOffloadStrategy(
            num_microbatches=count, schedule=schedule, num_sequence_slices=number
        )
        started = time.perf_counter()
        steps, trainer = gpu_llama.fit(device, strategy, num_warm=2)
        first = steps.starts[1] - started
        losses.append(gpu_llama.loss_of(trainer))
        yield (
            f"{schedule}, {number} slices, first batch over after {first:.1f} s: "
            f"{gpu_llama.figures(device, steps, trainer)}"
        )
        assert abs(losses[-1] - losses[0]) < gpu_llama.TOLERANCE
        del trainer


def _train_llama(device: torch.device, **options: Any) -> str:
    from transformers import LlamaConfig  # noqa: PLC0415 - slow to import

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    text: Any = [*torch.randint(256, (48, 128), generator=torch.Generator().manual_seed(0))]
    trainer = _trainer(device, max_steps=6, **options)
    trainer.fit(Llama(config), DataLoader(text, 8))
    return f"{float(trainer.callback_metrics['loss']):.6f}"


def be_one_of_two_tensor_ranks(device: torch.device) -> Iterator[str]:
    """Train with half of each layer."""
    strategy = PipeOffloadStrategy(
        tensor_parallel_size=2, schedule="zb_h1", process_group_backend=backend()
    )
    yield _train_llama(device, strategy=strategy, num_nodes=2)


def be_one_of_two_compiled_tensor_ranks(device: torch.device) -> Iterator[str]:
    """The same, compiled."""
    compile_with = True if is_accelerated(device) else {"backend": "aot_eager"}
    strategy = PipeOffloadStrategy(
        tensor_parallel_size=2, schedule="zb_h1", process_group_backend=backend(),
        compile=compile_with,
    )  # fmt: skip
    yield _train_llama(device, strategy=strategy, num_nodes=2)


def llama_alone(device: torch.device) -> Iterator[str]:
    """The loss of one rank."""
    yield _train_llama(device, strategy="auto")


@needing("transformers")
def tensor_ranks(device: torch.device) -> Iterator[str]:
    """Two tensor ranks on one device, over gloo and the host, come to the loss of one rank."""
    losses = losses_of_two(be_one_of_two_tensor_ranks, device)
    yield compared("two tensor ranks", losses, _train_llama(device, strategy="auto"), _ROUNDING)


_ROUNDING = 1e-3  # of float32, with sums over two shards


class Contrast(LightningModule):
    """SimCLR: an encoder that each step calls for two views of its images."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 32)

    def training_step(self, views: list[Tensor], batch_idx: int) -> Tensor:
        """Return the contrast of two views, each ``[images, patches, width]``."""
        one, other = (
            functional.normalize(self.head(self.encoder(view).mean(1)), dim=-1) for view in views
        )
        loss = functional.cross_entropy(
            one @ other.T / 0.5, torch.arange(len(one), device=one.device)
        )
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def called_twice(device: torch.device) -> Iterator[str]:
    """SimCLR in bf16-mixed over two stages of one rank, and in plain Lightning's microbatches."""
    generator = torch.Generator().manual_seed(0)
    views: Any = [*zip(*torch.randn(2, 64, 64, 256, generator=generator), strict=True)]
    losses = []
    plain: dict[str, Any] = {"strategy": "auto", "accumulate_grad_batches": 4}
    cut: dict[str, Any] = {"strategy": PipeOffloadStrategy(schedule="zb_v", num_microbatches=4)}
    for batch, options in ((4, plain), (16, cut)):
        torch.manual_seed(0)
        trainer = _trainer(device, precision="bf16-mixed", **options)
        trainer.fit(Contrast(), DataLoader(views, batch))
        losses.append(gpu_llama.loss_of(trainer))
    yield f"mean losses of four steps, plain and cut: {losses}"
    assert abs(losses[0] - losses[1]) < _OF_BFLOAT16


_OF_BFLOAT16 = 1e-2
