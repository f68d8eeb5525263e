"""The V-shaped building block: down the ranks and back up, as a row of numbers.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from .building_block import BuildingBlock, walk

__all__ = ["INTERVAL", "v_block"]

INTERVAL = 6
"""Slots between two microbatches: F, B and W of two stages."""


def v_block(down: Sequence[int], turns: Sequence[int], interval: int = INTERVAL) -> BuildingBlock:
    """Return the block with these slots between the steps of a microbatch.

    Args:
        down: Slots between each rank and the next one for what goes down the ranks: F of the first
            chunk and B of the second. What goes up takes one slot between two ranks.
        turns: Slots between the chunks: of F on the last rank, from F to B on the first rank, and
            of B on the last rank.
        interval: Slots between two microbatches.
    """
    up = (1,) * len(down)
    f_to_f, f_to_b, b_to_b = turns
    return BuildingBlock(walk((*down, f_to_f, *up, f_to_b, *down, b_to_b, *up)), interval)
