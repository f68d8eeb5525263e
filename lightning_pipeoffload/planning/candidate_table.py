"""What ``schedule="auto"`` has tried, as a table; it needs neither torch nor lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE
from rich.table import Column, Table

from lightning_pipeoffload.schedule.candidates import Candidate
from lightning_pipeoffload.schedule.make_plan import Plan
from lightning_pipeoffload.schedule.quantities import share_text

__all__ = ["choice_table", "lines_by_reason", "lines_of_refused"]

Write = Callable[[float], str]


def choice_table(plan: Plan, seconds: Write, memory: Write, most: int | None = None) -> Table:
    """Return a table of the plans that fit, the fastest first.

    Args:
        plan: The plan that was chosen.
        seconds: Writes a time.
        memory: Writes an amount of memory.
        most: The most plans to show; None: all.
    """
    candidates = plan.candidates
    has_counts = len({c.option.num_microbatches for c in candidates}) > 1
    recomputes = len({c.option.recompute for c in candidates}) > 1
    varied = {"microbatches": has_counts, "recompute": recomputes}
    numbers = [name for name, is_varied in varied.items() if is_varied]
    table = Table(
        Column("schedule", no_wrap=True),
        *("stages", *numbers, "offload", "step", "bubble", "memory", ""),
        title=f"Plans that fit: {sum(c.fits for c in candidates)} of {len(candidates)}",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    fitting = [c for c in candidates if c.fits]
    for candidate in sorted(fitting, key=lambda c: (c is not plan.best, c.score))[:most]:
        option = candidate.option
        cells = [option.schedule, str(option.num_chunks)]
        cells += [str(option.num_microbatches)] * has_counts + [option.recompute] * recomputes
        table.add_row(*cells, *_figures(candidate, seconds, memory))
    return table


def _figures(candidate: Candidate, seconds: Write, memory: Write) -> list[str]:
    assert candidate.period is not None
    assert candidate.peak_memory is not None
    return [
        candidate.offload,
        seconds(candidate.period),
        share_text(candidate.bubble or 0.0),
        memory(candidate.peak_memory),
        candidate.reason or "taken",
    ]


def lines_of_refused(candidates: Sequence[Candidate]) -> list[str]:
    """Say why others do not fit, families with one reason together."""
    fitting = {candidate.option for candidate in candidates if candidate.fits}
    others = (c for c in candidates if c.option not in fitting)
    return [f"{line}." for line in lines_by_reason((c.option.schedule, c.reason) for c in others)]


def lines_by_reason(refused: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each reason, with the names that it is said of.

    Args:
        refused: Names with their reasons.
    """
    by_reason: dict[str, dict[str, None]] = {}
    for name, reason in refused:
        by_reason.setdefault(reason, {})[name] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
