"""A text grid of a schedule around one action, for errors."""

from __future__ import annotations

from .schedule import Schedule

__all__ = ["grid_around"]


def grid_around(schedule: Schedule, rank: int, step: int, context: int = 4) -> str:
    """Draw the steps (rows) of all ranks (columns) around one action, and mark it.

    Args:
        schedule: What to draw.
        rank: The rank of the action to mark.
        step: Its place among the rank's actions.
        context: How many steps to show before and after it.
    """
    longest = max(len(actions) for actions in schedule)
    shown = range(max(0, step - context), min(longest, step + context + 1))
    rows = [["step", *(f"rank {r}" for r in range(schedule.num_ranks))]]
    rows += [[str(s), *(_cell(schedule, r, s) for r in range(schedule.num_ranks))] for s in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines[1 + step - shown.start] += f"  <-- ERROR HERE (rank {rank})"
    return "\n".join(line.rstrip() for line in lines)


def _cell(schedule: Schedule, rank: int, step: int) -> str:
    actions = schedule[rank]
    return str(actions[step]) if step < len(actions) else ""
