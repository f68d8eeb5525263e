"""Which rank holds which stage.

A placement is a tuple with the rank of every stage, in model order. Builders use it; everything
else reads the placement off the schedule.
"""

from __future__ import annotations

__all__ = ["loop", "stages_on", "v"]


def loop(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Go round the ranks: stage ``s`` is on rank ``s % num_ranks``.

    Three ranks of two chunks each::

        rank     0  1  2
        chunk 0  0  1  2
        chunk 1  3  4  5
    """
    return tuple(range(num_ranks)) * num_chunks


def v(num_ranks: int, num_chunks: int = 2) -> tuple[int, ...]:
    """Go down the ranks and back up, so that two neighbouring chunks meet on one rank.

    Three ranks of two chunks each::

        rank     0  1  2
        chunk 0  0  1  2
        chunk 1  5  4  3
    """
    down = tuple(range(num_ranks))
    return tuple(
        rank for chunk in range(num_chunks) for rank in (down[::-1] if chunk % 2 else down)
    )


def stages_on(placement: tuple[int, ...], rank: int) -> list[int]:
    """Return the stages of one rank, in model order."""
    return [stage for stage, owner in enumerate(placement) if owner == rank]
