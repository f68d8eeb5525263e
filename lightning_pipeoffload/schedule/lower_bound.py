"""What no plan of a step can be faster than."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .actions import Kind
from .placement import stages_on

__all__ = ["earliest_end", "earliest_starts", "most_work"]

_Seconds = Mapping[Kind, Sequence[float]]


def earliest_starts(seconds: _Seconds, hops: Sequence[float]) -> dict[Kind, list[float]]:
    """Return when each stage can start its first F, B and W at the earliest.

    Args:
        seconds: What F, B and W of every stage take.
        hops: What the message after each stage takes.
    """
    forward = [0.0]
    for second, hop in zip(seconds[Kind.F], hops, strict=True):
        forward.append(forward[-1] + second + hop)
    last = len(hops) - 1
    backward = {last: forward[last] + seconds[Kind.F][last]}
    for stage in range(last - 1, -1, -1):
        backward[stage] = backward[stage + 1] + seconds[Kind.B][stage + 1] + hops[stage]
    backwards = [backward[stage] for stage in range(len(hops))]
    weights = [start + b for start, b in zip(backwards, seconds[Kind.B], strict=True)]
    return {Kind.F: forward[:-1], Kind.B: backwards, Kind.W: weights}


def earliest_end(
    seconds: _Seconds, hops: Sequence[float], placement: tuple[int, ...], num_microbatches: int
) -> float:
    """Return when a step can end at the earliest: when every rank has begun, and done its work.

    Args:
        seconds: What F, B and W of every stage take.
        hops: What the message after each stage takes.
        placement: The rank of every stage.
        num_microbatches: Microbatches of one step.
    """
    first = earliest_starts(seconds, hops)[Kind.F]

    def end(rank: int) -> float:
        start = min(first[stage] for stage in stages_on(placement, rank))
        return start + num_microbatches * _work(seconds, placement, rank)

    return max(map(end, range(max(placement) + 1)))


def most_work(seconds: _Seconds, placement: tuple[int, ...], num_microbatches: int) -> float:
    """Return what a step's work takes on the rank that has most of it.

    Args:
        seconds: What F, B and W of every stage take.
        placement: The rank of every stage.
        num_microbatches: Microbatches of one step.
    """
    ranks = range(max(placement) + 1)
    return num_microbatches * max(_work(seconds, placement, rank) for rank in ranks)


def _work(seconds: _Seconds, placement: tuple[int, ...], rank: int) -> float:
    stages = stages_on(placement, rank)
    return sum(of_kind[stage] for of_kind in seconds.values() for stage in stages)
