"""What no plan of a step can be faster than."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .actions import Kind
from .placement import stages_on

__all__ = ["earliest_end", "earliest_starts"]

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
        stages = stages_on(placement, rank)
        work = sum(of_kind[stage] for of_kind in seconds.values() for stage in stages)
        return min(first[stage] for stage in stages) + num_microbatches * work

    return max(map(end, range(max(placement) + 1)))
