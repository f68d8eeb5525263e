"""The same blocks in ``torch.distributed.pipelining``, which benchmarks compare with.

Weight gradients are deferred by a ``dw_builder``, as an expert would write it, without the walk
through the autograd graph.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    _PipelineScheduleRuntime,  # private: the one that reads schedules from a file
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from examples.benchmarks.harness import FEATURES, EmulatedBlock
from lightning_pipeoffload.schedule import build

LEARNING_RATE = 0.1


class Peer(NamedTuple):
    """A schedule of torch's: how it is made, stages of a rank, and whether these are in a V."""

    make: Callable[..., Any]
    num_chunks: int
    is_v: bool = False


PEERS = {
    "GPipe": Peer(ScheduleGPipe, 1),
    "1F1B": Peer(Schedule1F1B, 1),
    "Interleaved1F1B": Peer(ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": Peer(ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": Peer(ScheduleZBVZeroBubble, 2, is_v=True),
    "DualPipeV": Peer(ScheduleDualPipeV, 2, is_v=True),
}


def csv_peer(name: str, num_ranks: int, num_microbatches: int) -> Peer | None:
    """Return our schedule in torch's runtime; None: it has no such placement but for its own."""
    schedule = build(name, num_ranks, num_microbatches)
    if any(rank != stage % num_ranks for stage, rank in enumerate(schedule.placement)):
        return None
    return Peer(partial(_from_csv, name), schedule.num_stages // num_ranks)


def _from_csv(name: str, stages: Any, num_microbatches: int, **options: Any) -> Any:
    several = stages if isinstance(stages, list) else [stages]
    schedule = _PipelineScheduleRuntime(several, num_microbatches, **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        build(name, dist.get_world_size(), num_microbatches).to_csv(path)
        schedule._load_csv(str(path))
    return schedule


class WeightGradStore:
    """What torch's ``dw_builder`` asks for: the weight gradients that a backward has left."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def put(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        """Leave one."""
        self._left.append((weight, compute))

    def take(self) -> Callable[[], None]:
        """Return a function that computes all that were left since the last call."""
        left, self._left = self._left, []

        def run() -> None:
            for weight, compute in left:
                weight.grad = compute() if weight.grad is None else weight.grad + compute()

        return run


class TorchPipeline:
    """One rank of a pipeline.

    Args:
        peer: The schedule.
        num_microbatches: Microbatches of a step.
        seconds: Of a block's F or B.
        weight_share: Seconds of W, as a share of F's.
        clip: The norm that gradients are clipped to; None: they are not.
        num_blocks: Blocks of a stage.

    Attributes:
        stages: This rank's.
    """

    def __init__(
        self,
        peer: Peer,
        num_microbatches: int,
        seconds: float,
        weight_share: float = 1.0,
        clip: float | None = None,
        num_blocks: int = 1,
    ) -> None:
        rank, p = dist.get_rank(), dist.get_world_size()
        indices = [rank + chunk * p for chunk in range(peer.num_chunks)]
        if peer.is_v:
            indices[1] = 2 * p - 1 - rank
        num_stages = p * peer.num_chunks
        block = partial(EmulatedBlock, seconds, weight_share=weight_share)
        self.stages = [_stage([block] * num_blocks, index, num_stages) for index in indices]
        given: Any = self.stages if peer.num_chunks > 1 else self.stages[0]
        self._schedule = peer.make(given, num_microbatches, loss_fn=_mean)
        self._parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE)
        self._clip = clip
        self._batch = torch.zeros(num_microbatches, FEATURES)
        self._has_first = any(stage.is_first for stage in self.stages)
        self._has_last = any(stage.is_last for stage in self.stages)

    def step(self) -> None:
        """Train on one batch."""
        self._optimizer.zero_grad()
        arguments = (self._batch,) if self._has_first else ()
        self._schedule.step(*arguments, target=self._batch if self._has_last else None)
        if self._clip is not None:
            norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
            squared = norm**2
            dist.all_reduce(squared)
            clip_grads_with_norm_(self._parameters, self._clip, squared.sqrt())
        self._optimizer.step()


def _stage(blocks: Sequence[Callable[..., nn.Module]], index: int, num_stages: int) -> Any:
    store = WeightGradStore()
    sample = torch.zeros(1, FEATURES, requires_grad=True)
    return PipelineStage(
        nn.Sequential(*(block(defer=store.put) for block in blocks)),
        index,
        num_stages,
        torch.device("cpu"),
        # Given, not inferred: inference would run a backward whose weight gradients stay left.
        input_args=sample,
        output_args=sample,
        dw_builder=store.take,
    )


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()
