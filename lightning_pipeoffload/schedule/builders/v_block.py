"""The V-shaped building block: down the ranks and back up, as a row of numbers.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..search.building_block import BuildingBlock, walk

__all__ = ["INTERVAL", "v_block"]

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
