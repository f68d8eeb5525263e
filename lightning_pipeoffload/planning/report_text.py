"""What a run prints of its pipeline: a few lines, and tables for those who want them.

They go to standard output by way of the logger ``lightning_pipeoffload.report``: level DEBUG shows
tables of plans, stages and ranks too, WARNING silences all. Tables fit 80 columns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from io import StringIO
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_pipeoffload.planning.candidate_table import choice_table, lines_of_refused
from lightning_pipeoffload.schedule.make_plan import Plan
from lightning_pipeoffload.schedule.quantities import bytes_text, seconds_text, share_text

_NUM_COLUMNS = 80  # of what other handlers get
_NAME_WIDTH = 24  # of a stage's blocks, so that the table of stages fits these


class _ConsoleHandler(logging.Handler):
    """Prints what a record was made of, as wide and as colorful as standard output is."""

    def emit(self, record: logging.LogRecord) -> None:
        console = Console()
        for part in record.parts:  # type: ignore[attr-defined] # of this module's own records
            console.print(part, highlight=False)


# Where this module lies is nothing that people who silence it should know.
_PACKAGE = "lightning_pipeoffload"
log = logging.getLogger(f"{_PACKAGE}.report")
log.addHandler(_ConsoleHandler())
log.propagate = False  # what a script's own handlers print would be there twice
_package_log = logging.getLogger(_PACKAGE)
_package_log.setLevel(_package_log.level or logging.INFO)


def _tell(*parts: Table | str, level: int = logging.INFO) -> None:
    """Log tables and lines; a handler gets them as text."""
    if not log.isEnabledFor(level):
        return
    text = StringIO()
    for part in parts:
        Console(file=text, width=_NUM_COLUMNS).print(part, highlight=False)
    log.log(level, "%s", text.getvalue().strip(), extra={"parts": parts})


def print_line(line: str) -> None:
    """Print how far something is that takes long."""
    _tell(line)


def print_choice(plan: Plan, is_measured: bool) -> None:
    """Print what was chosen among how many plans; the table of all is logged for debugging.

    Args:
        plan: The plan that was chosen.
        is_measured: Whether times are in seconds, not in an average block's.
    """

    def seconds(value: float) -> str:
        return seconds_text(value) if is_measured else f"{value:.1f}"

    num_fitting = sum(candidate.fits for candidate in plan.candidates)
    _tell(
        f"Chosen {plan.best.option.schedule} among {num_fitting} plans that fit, of "
        f'{len(plan.candidates)}; all are in strategy.report()["candidates"].'
    )
    refused = lines_of_refused(plan.candidates)
    _tell("", choice_table(plan, seconds, bytes_text), *refused, level=logging.DEBUG)


def print_gain(before: float, after: float) -> None:
    """Print what a better plan gains.

    Args:
        before: Seconds of a step by the plan that was in use.
        after: The same by the one that takes its place.
    """
    gain = 1 - after / before
    _tell(
        f"The solver's plan takes {seconds_text(after)} a step instead of {seconds_text(before)}, "
        f"{share_text(gain)} less, and runs from now on."
    )


def print_anew(name: str, after: float | None) -> None:
    """Print that a microbatch has outgrown the plan, and what came of it.

    Args:
        name: The name of the schedule that runs from now on.
        after: Seconds of a step by the new plan; None where the plan in use stays.
    """
    outgrown = "A microbatch keeps more than any that was planned for, and than the limit allows. "
    if after is None:
        _tell(f"{outgrown}The plan in use stays: {name}.")
        return
    _tell(f"{outgrown}Planned anew, {name} takes {seconds_text(after)} a step.")


def print_prediction(report: dict[str, Any]) -> None:
    """Print what is predicted; the table of the stages is logged for debugging."""
    is_measured = report["k"] is not None
    _tell(f"Pipeline: {_headline(report)}. {_prediction(report, is_measured)}")
    unit = "" if is_measured else "\n(blocks)"
    table = Table(title=f"Stages: {_headline(report)}", title_justify="left")
    for column in ("stage", "rank", "blocks", "parameters", f"peak memory{unit}"):
        table.add_column(column, justify="left" if column == "blocks" else "right")
    for index, stage in enumerate(report["stages"]):
        blocks, kept = span_of(stage["blocks"]), report["peak_memory"][stage["rank"]]
        peak = bytes_text(kept) if is_measured else f"{kept:.1f}"
        table.add_row(str(index), str(stage["rank"]), blocks, f"{stage['num_parameters']:,}", peak)
    _tell("", table, level=logging.DEBUG)


def _prediction(report: dict[str, Any], is_measured: bool) -> str:
    bubble = share_text(report["period_bubble"])
    if not is_measured:
        return f"Predicted by operations: a bubble of {bubble}. The rest is still to be measured."
    return (
        f"Predicted by measured blocks: a step every {seconds_text(report['period'])}, a bubble of "
        f"{bubble}, at most {bytes_text(max(report['peak_memory']))} of activations on a rank."
    )


def span_of(names: Sequence[str]) -> str:
    """Name a stage's first and last block, and their container once if it is the same."""
    first, last = names[0], names[-1]
    container, _, index = last.rpartition(".")
    if first == last:
        return _shortened(first, _NAME_WIDTH)
    if first.rpartition(".")[0] == container:
        end = f" .. {index}"
        return _shortened(first, _NAME_WIDTH - len(end)) + end
    width = (_NAME_WIDTH - len(" .. ")) // 2
    return f"{_shortened(first, width)} .. {_shortened(last, width)}"


def _shortened(name: str, width: int) -> str:
    """Leave out the outer modules that there is no room for, or the middle of the only one."""
    if len(name) <= width:
        return name
    parts = name.split(".")
    for start in range(1, len(parts)):
        kept = f"…{'.'.join(parts[start:])}"
        if len(kept) <= width:
            return kept
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"


def print_accumulation(num_batches: int, num_microbatches: int) -> None:
    """Say that the pipeline empties after each of the batches that add up, and what to set instead.

    Args:
        num_batches: Batches that add up to one optimizer step.
        num_microbatches: Microbatches of each.
    """
    _tell(
        f"accumulate_grad_batches={num_batches}: each batch has a plan of its own, after which the "
        f"pipeline is empty. Faster, with the same microbatches: accumulate_grad_batches=1, a "
        f"batch of {num_batches} times the samples and num_microbatches="
        f"{num_batches * num_microbatches}."
    )


def print_timeline(step: int, paths: Sequence[str], error: float) -> None:
    """Say where the timeline of a step is, and how far its ranks' times are to be trusted.

    Args:
        step: The number of the step.
        paths: The files that show it.
        error: Seconds by which times of two ranks may be apart.
    """
    _tell(
        f"The timeline of step {step} is in {', '.join(paths)}; the ranks' clocks are compared to "
        f"±{seconds_text(error)}."
    )


def print_offload(report: dict[str, Any], limit: float | None = None) -> None:
    """Say what is offloaded from now on, and what is not and why.

    Args:
        report: The report of the plan, with measured costs.
        limit: Bytes of a device that activations may take, given or what every one has left; None:
            any.
    """
    peak = max(report["peak_memory"])
    _tell(
        f"Planned anew with measured costs: {_headline(report)}; predicted are a bubble of "
        f"{share_text(report['period_bubble'])} and a peak of {bytes_text(peak)} of activations.",
        *_about_limit(peak, limit),
        *_about_copies(report, limit),
    )


def _about_limit(peak: float, limit: float | None) -> list[str]:
    if limit is None or peak <= limit:
        return []
    return [
        f"No plan fits the {bytes_text(limit)} that every device has left for activations; the one "
        f"that needs least is tried."
    ]


def _about_copies(report: dict[str, Any], limit: float | None) -> list[str]:
    if not report["has_copies"]:
        is_met = limit is not None and max(report["peak_memory"]) <= limit
        why = ", order alone meets the limit" if is_met else ""
        return [f"Offloaded: nothing{why}.", *_reason(report)]
    ratio = (
        f"k = (offload + reload) / (F + B + W) is at most {max(report['k']):.2f}: while the ranks "
        f"compute, {share_text(report['free_share'])} of the activations can be copied."
    )
    if "offload" not in report:
        return [f"Offloaded: what {report['schedule']} says.", ratio]
    offload = report["offload"]
    wanted, away, queued = (sum(offload[n]) for n in ("wanted", "offloaded", "queued"))
    told = f"Offloaded: of {wanted} activations of a step {away} from F to B, {queued} from B to W."
    return [told, ratio, *_reason(report)]


def _reason(report: dict[str, Any]) -> list[str]:
    reason = report["offload"]["reason"] if "offload" in report else ""
    return [f"{reason}."] if reason else []


def print_measurement(report: dict[str, Any], peaks: Sequence[float], planned: float) -> None:
    """Print what was measured, and why that is not what was predicted; ranks are for debugging.

    Args:
        report: The report of the plan.
        peaks: The memory of each rank by the plan with the costs that were measured.
        planned: The idle share of a step's period by the same.
    """
    measured = report["measured"]
    kept = measured["peak_activation_bytes"]
    rank = max(range(len(kept)), key=lambda rank: kept[rank])
    _tell(
        f"Measured: {_headline(report)}: {report['samples_per_second']:.1f} samples/s, a step "
        f"every {seconds_text(max(measured['step_seconds']))}. {_why(report, planned)} Activations "
        f"took at most {bytes_text(kept[rank])}, on rank {rank}; "
        f"planned were {bytes_text(peaks[rank])}."
    )
    table = Table(title=f"Measured: {_headline(report)}", title_justify="left")
    columns = ("rank", "step", "bubble", "peak memory", "planned", "gradients\nleft for W")
    for column in columns:
        table.add_column(column, justify="right")
    for rank, seconds in enumerate(measured["step_seconds"]):
        flops = measured["weight_flops"][rank]
        table.add_row(
            str(rank),
            seconds_text(seconds),
            share_text(measured["bubble"][rank]),
            bytes_text(kept[rank]),
            bytes_text(peaks[rank]),
            share_text(measured["deferred_flops"][rank] / flops) if flops else "-",
        )
    _tell("", table, level=logging.DEBUG)


def _why(report: dict[str, Any], planned: float) -> str:
    """Say what the measured bubble is made of, in shares of the time that a step takes."""
    bubble, between = (mean(report["measured"][name]) for name in ("bubble", "between_steps"))
    by_plan = (1 - bubble) * planned / (1 - planned) if planned < 1 else 0.0
    rest = max(0.0, bubble - between - by_plan)
    return (
        f"The bubble was predicted as {share_text(report['period_bubble'])}, and is "
        f"{share_text(bubble)}: {share_text(by_plan)} by the plan with the measured times, "
        f"{share_text(between)} between steps (data, optimizer, hooks, validation), "
        f"{share_text(rest)} waiting for messages and the host."
    )


def _headline(report: dict[str, Any]) -> str:
    chunks = f" x {report['num_chunks']} chunks" if report["num_chunks"] > 1 else ""
    num_replicas = report["num_replicas"]
    replicas = f"{num_replicas} replicas of " if num_replicas > 1 else ""
    return (
        f"{report['schedule']}, {replicas}{report['num_ranks']} ranks{chunks}, "
        f"{report['num_microbatches']} microbatches"
    )
