"""The output of ``pipeoffload-plan``: tables, lines and a drawing, or JSON.

What plans gives an :class:`Answer`; nothing else of the command prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from time import monotonic
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from lightning_pipeoffload.pictures import TitledTimeline
from lightning_pipeoffload.planning.figures import (
    PlannedStep,
    Units,
    bare_table,
    choice_table,
    lines_of_refused,
)
from lightning_pipeoffload.schedule import (
    Plan,
    copy_ratios,
    draw,
    hideable_copy_share,
    send_after,
    share_text,
    simulate_steps,
)

Part = str | Table
"""A paragraph of the text, or a table."""


class Answer(NamedTuple):
    """What a command answers.

    Attributes:
        figures: The JSON.
        parts: The text.
        steps: The plans, for a picture.
    """

    figures: Mapping[str, Any]
    parts: Sequence[Part]
    steps: Sequence[PlannedStep] = ()


def print_answer(answer: Answer, is_json: bool) -> None:
    """Print an answer as text, or as one JSON object."""
    if is_json:
        print_json(answer.figures)
        return
    console = Console()
    for part in answer.parts:
        is_text = isinstance(part, str)
        console.print(part, highlight=not is_text, markup=not is_text)


_EVEN = 1.01  # a rank whose work is more than so many times the mean is named
_SECONDS_BETWEEN_LINES = 10

_COUNTS = ("wanted", "offloaded", "queued", "kept")  # of each rank, as OffloadReport names them
_HEADINGS = ("stages", "step", "bubble", "alone", "its bubble", "memory", "host", "messages")


def step_figures(step: PlannedStep) -> dict[str, Any]:
    """Return the figures of a plan by their names in ``Schedule`` and ``Timeline``.

    ``period`` is from one step to the next, ``messages`` how many activations and gradients each
    rank sends in a step.
    """
    schedule, timeline = step.schedule, step.timeline
    slices = ("num_sequence_slices",) * (schedule.num_sequence_slices > 1)
    sizes = ("num_ranks", "num_chunks", "num_microbatches", *slices)
    totals = ("makespan", "bubble", "bubble_unsynchronized", "peak_memory", "peak_host_memory")
    return {
        "schedule": schedule.name,
        **{name: getattr(schedule, name) for name in sizes},
        **{name: getattr(timeline, name) for name in totals},
        "has_barrier": step.has_barrier,
        "period": step.period,
        "period_bubble": step.bubble,
        "messages": tuple(
            sum(send_after(schedule, action) is not None for action in rank) for rank in schedule
        ),
    }


def plan_figures(plan: Plan, with_candidates: bool) -> dict[str, Any]:
    """Return the JSON of a plan's candidates and of its offload, if any."""
    report, names = plan.report, (*_COUNTS, "slowdown", "reason")
    figures = {name: getattr(report, name) for name in names} if report else {}
    if with_candidates:
        figures["candidates"] = [candidate.report_row() for candidate in plan.candidates]
    return figures


def print_json(figures: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")


def about_choice(plan: Plan, units: Units, about_copies: str = "") -> list[Part]:
    """Return the plans that were tried, and why the rest was not."""
    table = choice_table(plan, units.format_time, units.format_memory)
    return [table, *lines_of_refused(plan.candidates), *[about_copies] * bool(about_copies), ""]


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` on standard error meanwhile; yield a function that shows how far it is.

    On a terminal it is one line that changes, elsewhere at most a line every ten seconds.
    """
    console, shown = Console(stderr=True), monotonic()
    with console.status(text) as status:

        def show(what: str) -> None:
            nonlocal shown
            status.update(f"{text}: {what}")
            if not console.is_terminal and monotonic() - shown > _SECONDS_BETWEEN_LINES:
                shown = monotonic()
                console.print(f"{text}: {what}", highlight=False)

        yield show


def plan_answer(
    step: PlannedStep,
    figures: Mapping[str, Any],
    units: Units,
    before: Iterable[Part] = (),
    after: Iterable[Part] = (),
) -> Answer:
    """Return the answer of a plan: a table of the ranks, the figures of all and a drawing.

    ``figures`` are in JSON too, as of :func:`plan_figures`; ``before`` and ``after`` are in the
    text before the table of the ranks, and after the figures.
    """
    ratio = max(copy_ratios(step.costs, step.schedule.num_stages))
    share, timeline = hideable_copy_share(step.costs, step.schedule.num_stages), step.timeline
    copies = {"copy_ratio": ratio if isfinite(ratio) else None, "free_share": share}
    copies["full_offload_is_free"] = share == 1
    makespan = units.format_time_with_unit(timeline.makespan)
    alone = f"alone {makespan}, bubble {share_text(timeline.bubble)}"
    parts: list[Part] = [*before, _rank_table(step, units), _sentence(step, units), alone]
    parts += [*_about_the_busiest(timeline.busy), *after, ""]
    parts += [_about_copies(ratio, share, figures)] * bool(ratio or "offloaded" in figures)
    parts.append(draw(timeline, Console().width))
    return Answer({**step_figures(step), **copies, **figures}, parts, [step])


def _sentence(step: PlannedStep, units: Units) -> str:
    barrier = f"with{'' if step.has_barrier else 'out'} a barrier between steps"
    period = units.format_time_with_unit(step.period)
    return f"a step every {period} {barrier}, bubble {share_text(step.bubble)}"


def _about_the_busiest(busy: Sequence[float]) -> list[str]:
    """Name the rank that the others wait for, where the work is uneven."""
    mean = sum(busy) / len(busy)
    rank = max(range(len(busy)), key=busy.__getitem__)
    if busy[rank] <= _EVEN * mean:
        return []
    more = share_text(busy[rank] / mean - 1)
    return [f"rank {rank} is the busiest, with {more} more work than the mean of the ranks"]


def _headline(step: PlannedStep) -> str:
    schedule = step.schedule
    stages = "1 stage" if schedule.num_chunks == 1 else f"{schedule.num_chunks} stages"
    sizes = f"{schedule.num_ranks} ranks of {stages}, {schedule.num_microbatches} microbatches"
    slices = schedule.num_sequence_slices
    return f"{schedule.name}: {sizes}" + f", {slices} slices of a sequence" * (slices > 1)


def _about_copies(ratio: float, share: float, figures: Mapping[str, Any]) -> str:
    if ratio == 0:
        allowed = "copies that take no time; costs.offload and costs.reload say how long they take"
    elif share == 1 and any(figures.get("kept", ())):
        allowed = "copies take no longer than computing, yet not all fit into this order of actions"
    elif share == 1:
        allowed = "full offload is free"
    else:
        allowed = f"copies of at most {share_text(share)} of the activations are hidden"
    lines = [f"k {f'{ratio:.3g}' if isfinite(ratio) else 'infinite'}: {allowed}"]
    if "offloaded" in figures:
        ranks = zip(*(figures[name] for name in _COUNTS), strict=True)
        for rank, (wanted, offloaded, queued, stay) in enumerate(ranks):
            parts = [f"{offloaded} leave from F to B"]
            parts += [f"{queued} from B to W"] * bool(queued) + [f"{stay} stay"] * bool(stay)
            lines.append(f"rank {rank}: of {wanted} activations {', '.join(parts)}")
        times = f"{figures['slowdown']:.4g}"
        longer = "" if times == "1" else f"{times} times "
        lines.append(f"the step takes {longer}as long as without copies")
        lines += [figures["reason"]] * bool(figures["reason"])
    return "\n".join(lines) + "\n"


def _rank_table(step: PlannedStep, units: Units) -> Table:
    schedule, timeline = step.schedule, step.timeline
    headings = "rank", "stages", "busy", "idle", "peak memory"
    table = bare_table(*headings, title=_headline(step) + units.title_suffix)
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory, strict=True)):
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        times = map(units.format_time, (busy, timeline.makespan - busy))
        table.add_row(
            str(rank), stages, *times, units.format_memory(peak, max(timeline.peak_memory))
        )
    return table


def picture_of_steps(step: PlannedStep, units: Units, num_steps: int) -> TitledTimeline:
    """Return the content of a picture of several steps, with a line above it."""
    timeline = simulate_steps(step.schedule, step.costs, num_steps, step.has_barrier)
    return TitledTimeline(timeline, step.costs, f"{_headline(step)}; {_sentence(step, units)}")


def about_comparison(rows: Sequence[Mapping[str, Any]], title: str, units: Units) -> list[Part]:
    """Return schedules side by side; under ``refused`` a row says why it has no figures."""
    refused = [f"{row['schedule']}: {row['refused']}" for row in rows if "refused" in row]
    return [comparison_table(rows, title, units), *refused]


def comparison_table(rows: Iterable[Mapping[str, Any]], title: str, units: Units) -> Table:
    """Return a table with one row per schedule; one that cannot be has a dash for each figure.

    A step is from one to the next, as ``optimizer_sync`` has it; "alone" is one step from its start
    to its end. Memory and host are the largest peaks of a rank, messages those of all ranks.
    """
    columns = (Column("schedule", no_wrap=True), *_HEADINGS)
    table = bare_table(*columns, title=title + units.title_suffix, is_narrow=True)
    rows = [*rows]
    memories = ("peak_memory", "peak_host_memory")
    most = max((max(row[m]) for row in rows if "refused" not in row for m in memories), default=0)
    for row in rows:
        cells = ["-"] * len(_HEADINGS) if "refused" in row else _cells(row, units, most)
        table.add_row(row["schedule"], *cells)
    return table


def _cells(row: Mapping[str, Any], units: Units, most: float) -> list[str]:
    return [
        str(row["num_chunks"]),
        units.format_time(row["period"]),
        share_text(row["period_bubble"]),
        units.format_time(row["makespan"]),
        share_text(row["bubble"]),
        units.format_memory(max(row["peak_memory"]), most),
        units.format_memory(max(row["peak_host_memory"]), most),
        str(sum(row["messages"])),
    ]
