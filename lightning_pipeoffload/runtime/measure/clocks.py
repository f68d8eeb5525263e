"""How far the clocks of a pipeline's processes are apart: each machine's starts where it likes.

The root sends a message to each rank, which answers with its time. That was read between the
moments at which the root sent and heard::

    root    sends at s                     hears at h        offset = t - (s + h) / 2
    rank                 answers with t                      error  = (h - s) / 2
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.transport import blaming_peers

_REPETITIONS = 16
_TAG = 1  # checksums of batches have 0


class ClockOffset(NamedTuple):
    """What a rank's ``time.perf_counter()`` is ahead of the root's.

    Attributes:
        seconds: The estimate.
        error: The most that it is wrong by.
    """

    seconds: float = 0.0
    error: float = 0.0


def compare_clocks(group: PipelineGroup) -> list[ClockOffset] | None:
    """Compare the clocks of all ranks, which call it together.

    Args:
        group: The pipeline's processes.

    Returns:
        On the root, the offset of each rank; None elsewhere.
    """
    with blaming_peers("lost a rank while comparing clocks"):
        if group.global_rank != group.root:
            _answer(group, group.root)
            return None
        return [
            ClockOffset() if rank == group.root else _ask(group, rank)
            for rank in group.global_ranks
        ]


def _ask(group: PipelineGroup, rank: int) -> ClockOffset:
    """Return the offset by the quickest answer; the first one waits until the rank is here."""
    found = []
    box = torch.zeros(1, dtype=torch.float64)
    peer = dist.get_group_rank(group.host_group, rank)
    for _ in range(_REPETITIONS):
        sent = time.perf_counter()
        group.host_group.send([box], peer, _TAG).wait()
        group.host_group.recv([box], peer, _TAG).wait()
        heard = time.perf_counter()
        found.append(ClockOffset(float(box) - (sent + heard) / 2, (heard - sent) / 2))
    return min(found, key=lambda offset: offset.error)


def _answer(group: PipelineGroup, root: int) -> None:
    peer = dist.get_group_rank(group.host_group, root)
    asked = torch.zeros(1, dtype=torch.float64)
    for _ in range(_REPETITIONS):
        group.host_group.recv([asked], peer, _TAG).wait()
        group.host_group.send([_time_now()], peer, _TAG).wait()


def _time_now() -> Tensor:
    return torch.tensor([time.perf_counter()], dtype=torch.float64)
