"""Schedules as building blocks: the slots of one microbatch, repeated, and how long they take.

A microbatch has one way through a pipeline: F of every stage, then B of every stage backwards. A
building block says in which slot it takes each step of that way; the next microbatch does the same
an interval later. Two ranks in a V, with an interval of six slots; W goes where a slot is free::

    slot    0   1   2   3   4   5   6   7   8   9   10  11  12  13
    rank 0  0F0 .   .   3F0 3B0 .   0F1 0B0 .   3F1 3B1 .   .   0B1
    rank 1  .   1F0 2F0 .   .   2B0 1B0 1F1 2F1 .   .   2B1 1B1 .

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .problem import Order

__all__ = ["INTERVAL", "BuildingBlock", "v_block", "walk"]


@dataclass(frozen=True)
class BuildingBlock:
    """When one microbatch takes each step of its way, and how long after it the next one does.

    Attributes:
        slots: Slot of each step: F of every stage in model order, then B of every stage backwards.
        interval: Slots between two microbatches.
    """

    slots: tuple[int, ...]
    interval: int

    def repeat(self, placement: Sequence[int], num_microbatches: int) -> Order:
        """Return the order of each rank's F and B when every microbatch follows the block."""
        timed: list[list[tuple[int, int, int]]] = [[] for _ in range(1 + max(placement))]
        for step, (slot, rank) in enumerate(
            zip(self.slots, (*placement, *reversed(placement)), strict=True)
        ):
            timed[rank] += [
                (slot + microbatch * self.interval, step, microbatch)
                for microbatch in range(num_microbatches)
            ]
        return [[(step, microbatch) for _, step, microbatch in sorted(rank)] for rank in timed]

    def peak(self, placement: Sequence[int]) -> int:
        """Return the most activations on any rank, were W always the slot after B."""
        lives: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(placement))]
        for stage, rank in enumerate(placement):
            lives[rank].append((self.slots[stage], self.slots[-1 - stage] + 1))
        return max(self._most_alive(of_rank) for of_rank in lives)

    def _most_alive(self, lives: list[tuple[int, int]]) -> int:
        def alive_at(slot: int) -> int:
            ends = (
                (end - slot) // self.interval - (start - 1 - slot) // self.interval
                for start, end in lives
            )
            return sum(ends)

        return max(alive_at(start) for start, _ in lives)


def walk(hops: Sequence[int]) -> tuple[int, ...]:
    """Return the slots of the steps of a way from the slots between each step and the next one."""
    return tuple(accumulate(hops, initial=0))


INTERVAL = 6
"""Slots between two microbatches: F, B and W of two stages."""


def v_block(
    down: Sequence[int],
    turns: Sequence[int],
    interval: int = INTERVAL,
    last_up: Sequence[int] | None = None,
) -> BuildingBlock:
    """Return the block with these slots between the steps of a microbatch.

    Args:
        down: Slots between each rank and the next one for what goes down the ranks: F of the first
            chunk and B of the second. F of the second chunk takes one slot on its way up.
        turns: Slots between the chunks: of F on the last rank, from F to B on the first rank, and
            of B on the last rank.
        interval: Slots between two microbatches.
        last_up: Slots between each rank and the next one for B of the first chunk, the last rank
            first; None: one.
    """
    up = (1,) * len(down)
    f_to_f, f_to_b, b_to_b = turns
    forwards, backwards = (*down, f_to_f, *up), (*down, b_to_b, *(last_up or up))
    return BuildingBlock(walk((*forwards, f_to_b, *backwards)), interval)
