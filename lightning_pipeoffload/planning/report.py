"""What the strategy tells about the pipeline: as a dict, and as two tables.

The tables go to standard output by way of the logger ``lightning_pipeoffload.report``, so that its
level, or that of ``lightning_pipeoffload``, silences them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_pipeoffload.planning.accumulation import Accumulation
from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.schedule import Costs, Schedule, copy_ratios, free_share, simulate

_NUM_COLUMNS = 100  # of what other handlers get


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


def _tell(*parts: Table | str) -> None:
    """Log tables and lines; a handler gets them as text."""
    if not log.isEnabledFor(logging.INFO):
        return
    text = StringIO()
    for part in parts:
        Console(file=text, width=_NUM_COLUMNS).print(part, highlight=False)
    log.info("%s", text.getvalue().strip(), extra={"parts": parts})


def predict(plan: Schedule, pipeline: Pipeline, measured: Costs | None) -> dict[str, Any]:
    """Say what the plan promises.

    Args:
        plan: lowered.
        pipeline: what runs it.
        measured: costs in seconds and bytes; None: the pipeline's estimate, in units of an average
            block's work and activation.
    """
    costs = measured or pipeline.costs
    timeline = simulate(plan, costs)
    return {
        "schedule": plan.name,
        "num_ranks": plan.num_ranks,
        "num_chunks": plan.num_chunks,
        "num_microbatches": plan.num_microbatches,
        "stages": [
            {
                "rank": plan.rank_of(stage),
                "blocks": pipeline.block_names(stage),
                "num_parameters": pipeline.num_parameters[stage],
            }
            for stage in range(plan.num_stages)
        ],
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "peak_memory": list(timeline.peak_memory),
        "peak_host_memory": list(timeline.peak_host_memory),
        "k": list(copy_ratios(costs, plan.num_stages)) if measured else None,
        "free_share": free_share(costs, plan.num_stages) if measured else None,
    }


def measure(executor: Executor, weight_flops: int) -> dict[str, Any]:
    """Say what one rank measured: seconds, bytes, and the share of weight gradients left for W.

    The bubble is the idle share of a step's period, which ends where the next step starts, the
    median over steps.
    ``live_bytes`` are those of the last step after each action that can change them: seconds since
    the step's start on the host's clock, bytes on the device, on the host, and in copies that
    nobody has waited for.
    """
    memory = {index: runner.memory for index, runner in executor.stages.items()}
    deferred = sum(stage.deferred_flops or 0 for stage in memory.values())
    ledger = executor.memory.ledger
    return {
        "step_seconds": executor.timer.step_seconds(),
        "bubble": executor.timer.idle_share(),
        "peak_activation_bytes": ledger.peak_device_bytes,
        "offloaded_bytes": ledger.offloaded_bytes,
        "peak_host_bytes": ledger.peak_host_bytes,
        "live_bytes": [(entry.seconds, *entry.held) for entry in ledger.entries],
        "deferred_flops": deferred,
        "weight_flops": weight_flops,
    }


def print_prediction(report: dict[str, Any]) -> None:
    """Print the table of the stages."""
    table = Table(title=f"Pipeline: {_headline(report)}", title_justify="left")
    for column in ("stage", "rank", "blocks", "parameters", "peak activations"):
        table.add_column(column, justify="left" if column == "blocks" else "right")
    for index, stage in enumerate(report["stages"]):
        blocks, peak = span_of(stage["blocks"]), f"{report['peak_memory'][stage['rank']]:.1f}"
        table.add_row(str(index), str(stage["rank"]), blocks, f"{stage['num_parameters']:,}", peak)
    _tell(
        "",
        table,
        f"Predicted from FLOPs: a bubble of {report['bubble']:.1%}; peaks are of the rank, in "
        f"activations of an average block.",
    )


def span_of(names: Sequence[str]) -> str:
    """Name a stage's first and last block, and their container once if it is the same."""
    first, last = names[0], names[-1]
    container, _, index = last.rpartition(".")
    if first == last:
        return first
    return f"{first} .. {index if first.rpartition('.')[0] == container else last}"


def print_accumulation(single: Schedule, in_use: Schedule, accumulation: Accumulation) -> None:
    """Say whether batches that accumulate share a plan, and why not.

    Args:
        single: the plan of one batch.
        in_use: the plan that training begins with.
        accumulation: of the first batch.
    """
    count = in_use.num_microbatches // single.num_microbatches
    if accumulation.num_batches == 1:
        return
    if count > 1:
        note = f"One plan for {count} batches whose gradients add up."
    elif accumulation.watched_by:
        hooks = ", ".join(accumulation.watched_by)
        note = f"A plan for each batch, for between them run hooks that may use gradients: {hooks}."
    else:
        note = f"A plan for each batch: a common one of {single.name} is no faster, or keeps more."
    _tell(note)


def print_offload(report: dict[str, Any], device_limit: float | None = None) -> None:
    """Say what is offloaded from now on, and what is not and why.

    Args:
        report: of the plan, with measured costs.
        device_limit: bytes that every device has for it; None: not known, or another limit is kept.
    """
    worst, offload = max(report["k"]), report.get("offload")
    peak = max(report["peak_memory"]) / 2**20
    lines = [
        f"Planned anew with measured costs: {_headline(report)}; predicted are a bubble of "
        f"{report['bubble']:.1%} and a peak of {peak:.2f} MiB of activations.",
        f"k = (offload + reload) / (F + B + W) is at most {worst:.2f}: while the ranks compute, "
        f"{report['free_share']:.0%} of the activations can be copied.",
    ]
    if device_limit is not None and max(report["peak_memory"]) > device_limit:
        lines.append(
            f"No plan fits the {device_limit / 2**20:.2f} MiB that every device has left for "
            f"activations; the one that needs least is tried."
        )
    if offload is not None:
        wanted, away, queued = (sum(offload[n]) for n in ("wanted", "offloaded", "queued"))
        lines.append(
            f"Of {wanted} activations of a step {away} leave from F to B, {queued} from B to W."
        )
        lines += [f"{offload['reason']}."] if offload["reason"] else []
    _tell("\n".join(lines))


def print_measurement(report: dict[str, Any]) -> None:
    """Print the table of what was measured on each rank."""
    measured = report["measured"]
    table = Table(title=f"Measured: {_headline(report)}", title_justify="left")
    for column in ("rank", "step", "bubble", "peak activations", "weight gradients left for W"):
        table.add_column(column, justify="right")
    for rank, seconds in enumerate(measured["step_seconds"]):
        flops = measured["weight_flops"][rank]
        share = f"{measured['deferred_flops'][rank] / flops:.1%}" if flops else "-"
        table.add_row(
            str(rank),
            f"{seconds * 1e3:.1f} ms",
            f"{measured['bubble'][rank]:.1%}",
            f"{measured['peak_activation_bytes'][rank] / 2**20:.2f} MiB",
            share,
        )
    _tell("", table, f"Predicted was a bubble of {report['bubble']:.1%}.")


def join_measurements(parts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn one dict for each rank into one list for each figure, in pipeline order."""
    return {name: [part[name] for part in parts] for name in parts[0]}


def _headline(report: dict[str, Any]) -> str:
    chunks = f" x {report['num_chunks']} chunks" if report["num_chunks"] > 1 else ""
    return (
        f"{report['schedule']}, {report['num_ranks']} ranks{chunks}, "
        f"{report['num_microbatches']} microbatches"
    )
