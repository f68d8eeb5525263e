"""One rank of a longer pipeline with a GPT, for what ``offload_gpu.py`` compares.

It has its own stages of a GPT in bfloat16 (attention through SDPA, so flash attention where the
device has it). Blocks of the other ranks have shapes and no memory. ``pipeoffload-rehearse`` does
the same for any model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

from lightning_pipeoffload.demos.gpt import GPT
from lightning_pipeoffload.runtime.cut.partition import CutSettings
from lightning_pipeoffload.runtime.memory.host_memory import HostBudget, HostMemory
from lightning_pipeoffload.runtime.memory.stage_store import OffloadSettings
from lightning_pipeoffload.runtime.memory.streams import make_lanes
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.rank_memory import ActivationMemory
from lightning_pipeoffload.runtime.rehearsal import Rehearsal
from lightning_pipeoffload.runtime.step.batch_slice import BatchSlice
from lightning_pipeoffload.schedule import Schedule, build

VOCABULARY = 256
CALIBRATION_MICROBATCHES = 4


@dataclass(frozen=True)
class Size:
    """A model, and a pipeline of which one rank runs here."""

    hidden: int
    sequence: int
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    rank: int
    head_size: int
    device: torch.device
    least_host_bytes: int = 0

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, of one layer each."""
        return self.num_ranks * self.num_chunks


@dataclass(frozen=True)
class Variant:
    """How to run: a line of the table."""

    schedule: str
    recompute: str = "none"
    save_on_cpu: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        return "uniform, save_on_cpu" if self.save_on_cpu else self.schedule


class Model(nn.Module):
    """A GPT with a step; ``around_blocks`` makes what each block runs in."""

    def __init__(
        self, size: Size, around_blocks: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        heads = size.hidden // size.head_size
        depth, options = size.num_stages, {"heads": heads, "dropout": 0.0}
        with torch.device("meta"):
            self.gpt = GPT(VOCABULARY, size.sequence, size.hidden, depth, **options)
        self.bfloat16()
        self.around_blocks = around_blocks

    def allocate(self, blocks: Sequence[int], device: torch.device) -> None:
        """Give memory to some blocks, and to what is around the blocks."""
        gpt = self.gpt
        around = [gpt.token_embedding, gpt.position_embedding, gpt.final_norm, gpt.head]
        for module in (*around, *(gpt.blocks[index] for index in blocks)):
            module.to_empty(device=device)
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                nn.init.constant_(parameter, float("norm.weight" in name))
            if not parameter.is_meta and parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from itself and those before it."""
        gpt = self.gpt
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = gpt.token_embedding(tokens) + gpt.position_embedding(positions)
        for block in gpt.blocks:
            with self.around_blocks():
                x = block(x)
        logits = gpt.head(gpt.final_norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens.flatten())


def rehearse(size: Size, variant: Variant) -> Rehearsal:
    """Make the rank, its model and its memory."""
    pin = size.device.type != "cpu"
    around = partial(save_on_cpu, pin_memory=pin) if variant.save_on_cpu else nullcontext
    model = Model(size, around)
    stage_ranks = tuple(stage % size.num_ranks for stage in range(size.num_stages))
    cut = CutSettings(stage_ranks, "gpt.blocks", "even", variant.recompute)
    own = [stage for stage, rank in enumerate(stage_ranks) if rank == size.rank]
    model.allocate(own, size.device)
    pipeline = Pipeline(model, size.rank, cut, size.device)

    def cut_batch(count: int) -> list[BatchSlice]:
        tokens = torch.randint(VOCABULARY, (count, size.sequence), device=size.device)
        return pipeline.cut_batch(tokens, 1, lambda part, _: model.step(part), "train", 0)

    budget = HostBudget.share_of_machine(1)
    if budget is not None and budget.num_bytes < size.least_host_bytes:
        budget = HostBudget.given(size.least_host_bytes)
    host = HostMemory(pin, budget)
    settings = OffloadSettings(size.device, make_lanes(size.device), host)
    return Rehearsal(pipeline, ActivationMemory(settings), cut_batch)


def few_microbatches(size: Size) -> Schedule:
    """Return what stages are measured by."""
    return build("uniform", size.num_ranks, CALIBRATION_MICROBATCHES, size.num_chunks)
