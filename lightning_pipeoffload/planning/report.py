"""The report of a run as a dict, and the lines that a run prints.

Lines go to standard output by way of the logger ``lightning_pipeoffload.report``: level DEBUG adds
tables of plans, stages and ranks, WARNING silences all. Tables fit 80 columns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from statistics import mean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_pipeoffload.planning.figures import PlannedStep, choice_table, lines_of_refused
from lightning_pipeoffload.runtime.run import Executor, Pipeline
from lightning_pipeoffload.schedule import (
    Costs,
    Plan,
    Schedule,
    bytes_text,
    compute_seconds,
    copy_ratios,
    hideable_copy_share,
    seconds_text,
    share_text,
)
from lightning_pipeoffload.schedule.search import ROUNDING

_SECONDS_SILENT = 2.0
_NUM_COLUMNS = 80  # of the text that other handlers get
_NAME_WIDTH = 24  # of a stage's blocks, so that the table of stages fits these


def predict_figures(
    plan: Schedule, pipeline: Pipeline, measured: Costs | None, has_barrier: bool
) -> dict[str, Any]:
    """Return the predicted figures of a lowered plan.

    Args:
        plan: The lowered plan.
        pipeline: The pipeline that runs the plan.
        measured: Costs in seconds and bytes; None: the pipeline's estimate, in units of an average
            block's work and activation.
        has_barrier: Whether no rank begins a step before all have ended the one before.
    """
    costs = measured or pipeline.cut.costs
    step = PlannedStep(plan, costs, has_barrier)
    timeline = step.timeline
    work = compute_seconds(costs, plan.num_stages)
    total = sum(work) or 1.0
    return {
        "schedule": plan.name,
        "num_ranks": plan.num_ranks,
        "num_chunks": plan.num_chunks,
        "num_microbatches": plan.num_microbatches,
        "recompute": pipeline.settings.recompute,
        "stages": [
            {
                "rank": plan.rank_of(stage),
                "blocks": pipeline.cut.block_names(stage),
                "num_parameters": pipeline.cut.num_parameters[stage],
                "work": work[stage] / total,
            }
            for stage in range(plan.num_stages)
        ],
        "has_copies": plan.has_copies,
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "period": step.period,
        "period_bubble": step.bubble,
        "peak_memory": list(timeline.peak_memory),
        "peak_host_memory": list(timeline.peak_host_memory),
        "k": list(copy_ratios(costs, plan.num_stages)) if measured else None,
        "free_share": hideable_copy_share(costs, plan.num_stages) if measured else None,
    }


def read_rank_figures(executor: Executor, weight_flops: int, remote_bytes: int) -> dict[str, Any]:
    """Return the measured figures of one rank: seconds, bytes, and the operations left for W.

    The bubble is the idle share of a step's period, which ends where the next step starts, the
    median over steps; ``between_steps`` is the share of what comes after the step itself.
    ``live_bytes`` are those of the last step after each action that can change them: seconds since
    the step's start on the host's clock, bytes on the device, on the host, and in pending copies.
    ``message_buffer_bytes`` are those of buffers that messages over NCCL go through; gloo has none.
    ``peak_remote_weight_bytes`` are the most of other ranks' weights that the rank has held in a
    step that ran whole, or in a call in a hook: what is small outside of the blocks, no block.
    """
    memories = [m for runner in executor.stages.values() for m in runner.memories.values()]
    deferred = sum(memory.deferred_flops or 0 for memory in memories)
    ledger = executor.memory.ledger
    return {
        "step_seconds": executor.timer.step_seconds(),
        "bubble": executor.timer.idle_share(),
        "between_steps": executor.timer.boundary_share(),
        "peak_activation_bytes": ledger.peak_device_bytes,
        "offloaded_bytes": ledger.offloaded_bytes,
        "peak_host_bytes": ledger.peak_host_bytes,
        "message_buffer_bytes": executor.transport.buffer_bytes,
        "peak_remote_weight_bytes": remote_bytes,
        "live_bytes": [(entry.seconds, *entry.held) for entry in ledger.entries],
        "deferred_flops": deferred,
        "weight_flops": weight_flops,
    }


def join_measurements(parts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn one dict for each rank into one list for each figure, in pipeline order."""
    return {name: [part[name] for part in parts] for name in parts[0]}


class _ConsoleHandler(logging.Handler):
    """Prints the tables and lines of a record, as wide and as colorful as standard output is."""

    def emit(self, record: logging.LogRecord) -> None:
        console = Console()
        for part in record.parts:  # type: ignore[attr-defined] # of this module's own records
            console.print(part, highlight=False)


# Users silence these names, which do not depend on where this module lies.
_PACKAGE = "lightning_pipeoffload"
log = logging.getLogger(f"{_PACKAGE}.report")
log.addHandler(_ConsoleHandler())
log.propagate = False  # a script's own handlers would print each line a second time
_package_log = logging.getLogger(_PACKAGE)
_package_log.setLevel(_package_log.level or logging.INFO)


def _print(*parts: Table | str, level: int = logging.INFO) -> None:
    """Log tables and lines; a handler gets them as text."""
    if not log.isEnabledFor(level):
        return
    text = StringIO()
    # Where rich believes to be in a notebook it shows what it writes to any file.
    console = Console(file=text, width=_NUM_COLUMNS, force_jupyter=False)
    for part in parts:
        console.print(part, highlight=False)
    log.log(level, "%s", text.getvalue().strip(), extra={"parts": parts})


def print_line(line: str) -> None:
    """Print a line on the progress of something that takes long."""
    _print(line)


class Progress:
    """Prints what is being done where it takes longer than two seconds.

    Args:
        is_on: Whether to print anything: on one process, unless the user has switched bars off.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on, self._last = is_on, time.monotonic()

    @classmethod
    def of(cls, pipeline: Pipeline) -> Progress:
        """Return one that prints on the rank that reports, if the trainer has a progress bar."""
        trainer: Any = pipeline.module.trainer
        has_bar = getattr(trainer, "progress_bar_callback", None) is not None
        return cls(pipeline.group.is_global_zero and has_bar)

    @contextmanager
    def print_if_slow(self, text: str) -> Iterator[None]:
        """Print a line once what runs inside has taken more than two seconds."""
        timer = threading.Timer(_SECONDS_SILENT, print_line, (f"{text} ...",))
        timer.daemon = True
        if self._is_on:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            if self._is_on:
                timer.join()

    def show(self, text: str) -> None:
        """Print a line if the last one, or the start, is more than two seconds ago."""
        now = time.monotonic()
        if self._is_on and now - self._last > _SECONDS_SILENT:
            self._last = now
            print_line(f"{text} ...")


def print_choice(plan: Plan, is_measured: bool) -> None:
    """Print what was chosen among how many plans; the table of all is logged for debugging.

    Args:
        plan: The plan that was chosen.
        is_measured: Whether times are in seconds, not in an average block's.
    """

    def seconds(value: float) -> str:
        return seconds_text(value) if is_measured else f"{value:.1f}"

    num_fitting = sum(candidate.fits for candidate in plan.candidates)
    _print(
        f"Chosen {plan.best.option.schedule} among {num_fitting} plans that fit, of "
        f'{len(plan.candidates)}; all are in strategy.report()["candidates"].'
    )
    refused = lines_of_refused(plan.candidates)
    _print("", choice_table(plan, seconds, bytes_text), *refused, level=logging.DEBUG)


def print_gain(before: float, after: float) -> None:
    """Print what a better plan gains, by the seconds of a step."""
    _print(
        f"The solver's plan takes {seconds_text(after)} a step instead of {seconds_text(before)}, "
        f"{share_text(1 - after / before)} less, and runs from now on."
    )


def print_outgrown_plan(name: str, after: float | None) -> None:
    """Print that a microbatch needs more memory than planned, and which plan runs from now on.

    Args:
        name: The schedule that runs from now on.
        after: Seconds of a step by the new plan; None where the plan in use stays.
    """
    outgrown = "A microbatch keeps more than any that was planned for, and than the limit allows. "
    if after is None:
        _print(f"{outgrown}The plan in use stays: {name}.")
    else:
        _print(f"{outgrown}Planned anew, {name} takes {seconds_text(after)} a step.")


def print_prediction(report: dict[str, Any]) -> None:
    """Print what is predicted; the table of the stages is logged for debugging."""
    is_measured = report["k"] is not None
    _print(f"Pipeline: {_headline(report)}. {_prediction(report, is_measured)}")
    unit = "" if is_measured else "\n(blocks)"
    table = Table(title=f"Stages: {_headline(report)}", title_justify="left")
    for column in ("stage", "rank", "blocks", "parameters", f"peak memory{unit}"):
        table.add_column(column, justify="left" if column == "blocks" else "right")
    for index, stage in enumerate(report["stages"]):
        blocks, peak = block_range_text(stage["blocks"]), report["peak_memory"][stage["rank"]]
        memory = bytes_text(peak) if is_measured else f"{peak:.1f}"
        parameters = f"{stage['num_parameters']:,}"
        table.add_row(str(index), str(stage["rank"]), blocks, parameters, memory)
    _print("", table, level=logging.DEBUG)


def print_unlike_devices(report: Mapping[str, Any]) -> None:
    """Print which device is which rank's where they are unlike, and a better order of them."""
    devices = report["devices"]
    kinds = {(each["name"], each["slowness"], each["memory_limit"]) for each in devices}
    if len(kinds) == 1:
        return
    order = report.get("better_order")
    texts = [_device_text(rank, each) for rank, each in enumerate(devices)]
    better = (
        f" In another order of the same devices a step is planned {share_text(order['gain'])} "
        f"faster: {order['line']}."
        if order
        else ""
    )
    _print(f"Devices, as you count them: {'; '.join(texts)}.{better}")


def _device_text(rank: int, device: Mapping[str, Any]) -> str:
    limit = device["memory_limit"]
    parts = [device["name"], f"{device['slowness']:.2f} times the fastest's time"]
    parts += [] if limit is None else [f"{bytes_text(limit)} for activations"]
    return f"rank {rank} is on device {device['device']} ({', '.join(parts)})"


def print_host_syncs(reads: Sequence[dict[str, str]]) -> None:
    """Print the lines of a step that read values of the device."""
    for read in reads:
        _print(escape(f"The host waits for the device {read['part']}: {read['line']}"))


def _prediction(report: dict[str, Any], is_measured: bool) -> str:
    bubble = share_text(report["period_bubble"])
    if not is_measured:
        return f"Predicted by operations: a bubble of {bubble}. The rest is still to be measured."
    return (
        f"Predicted by measured blocks: a step every {seconds_text(report['period'])}, a bubble of "
        f"{bubble}, at most {bytes_text(max(report['peak_memory']))} of activations on a rank."
    )


def block_range_text(names: Sequence[str]) -> str:
    """Name a stage's first and last block, and their container once if it is the same."""
    if not names:
        return "after the blocks"
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
    """Shorten a name to a width: without its outer modules, or without its middle."""
    if len(name) <= width:
        return name
    parts = name.split(".")
    for start in range(1, len(parts)):
        shorter = f"…{'.'.join(parts[start:])}"
        if len(shorter) <= width:
            return shorter
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"


def print_accumulation_advice(num_batches: int, num_microbatches: int) -> None:
    """Print what to set in place of ``accumulate_grad_batches=num_batches``."""
    _print(
        f"accumulate_grad_batches={num_batches}: each batch has a plan of its own, after which the "
        f"pipeline is empty. Faster, with the same microbatches: accumulate_grad_batches=1, a "
        f"batch of {num_batches} times the samples and num_microbatches="
        f"{num_batches * num_microbatches}."
    )


def print_timeline_paths(step: int, paths: Sequence[str], error: float) -> None:
    """Print the files that show a step, and by how many seconds two ranks' times may differ."""
    _print(
        f"The timeline of step {step} is in {', '.join(paths)}; the ranks' clocks are compared to "
        f"±{seconds_text(error)}."
    )


def print_offload(report: dict[str, Any], limits: Sequence[float] | None = None) -> None:
    """Print what is offloaded from now on, and what is not and why.

    Args:
        report: The report of the plan, with measured costs.
        limits: Bytes of each rank's device that activations may take; None: any.
    """
    peak = max(report["peak_memory"])
    exceeding = [
        rank
        for rank, limit in enumerate(limits or ())
        if report["peak_memory"][rank] > limit * (1 + ROUNDING)
    ]
    lines = [
        f"Planned anew with measured costs: {_headline(report)}; predicted are a bubble of "
        f"{share_text(report['period_bubble'])} and a peak of {bytes_text(peak)} of activations."
    ]
    if limits is not None and exceeding:
        whose = "every device" if len({*limits}) == 1 else f"the device of rank {exceeding[0]}"
        lines.append(
            f"No plan fits the {bytes_text(limits[exceeding[0]])} that {whose} has left for "
            f"activations; the one that needs least is tried."
        )
    _print(*lines, *_about_copies(report, limits is not None and not exceeding))


def _about_copies(report: dict[str, Any], is_met: bool) -> list[str]:
    offload = report.get("offload", {})
    reason = [f"{offload['reason']}."] if offload.get("reason") else []
    if not report["has_copies"]:
        return [f"Offloaded: nothing{', order alone meets the limit' if is_met else ''}.", *reason]
    ratio = (
        f"k = (offload + reload) / (F + B + W) is at most {max(report['k']):.2f}: while the ranks "
        f"compute, {share_text(report['free_share'])} of the activations can be copied."
    )
    if not offload:
        return [f"Offloaded: what {report['schedule']} says.", ratio]
    wanted, away, queued = (sum(offload[n]) for n in ("wanted", "offloaded", "queued"))
    counts = f"of {wanted} activations of a step {away} from F to B, {queued} from B to W"
    return [f"Offloaded: {counts}.", ratio, *reason]


def print_measurement(report: dict[str, Any], peaks: Sequence[float], planned: float) -> None:
    """Print what was measured, and why that is not what was predicted; ranks are for debugging.

    Args:
        report: The report of the plan.
        peaks: The memory of each rank by the plan with the costs that were measured.
        planned: The idle share of a step's period by the same.
    """
    measured = report["measured"]
    peak_bytes = measured["peak_activation_bytes"]
    rank = max(range(len(peak_bytes)), key=lambda rank: peak_bytes[rank])
    rates = f"{report['samples_per_second']:.1f} samples/s"
    if "tokens_per_second" in report:
        rates += f", {report['tokens_per_second']:,.0f} tokens/s"
    _print(
        f"Measured: {_headline(report)}: {rates}, a step "
        f"every {seconds_text(max(measured['step_seconds']))}. {_explain_bubble(report, planned)} "
        f"Activations took at most {bytes_text(peak_bytes[rank])}, on rank {rank}; "
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
            bytes_text(peak_bytes[rank]),
            bytes_text(peaks[rank]),
            share_text(measured["deferred_flops"][rank] / flops) if flops else "-",
        )
    _print("", table, level=logging.DEBUG)


def _explain_bubble(report: dict[str, Any], planned: float) -> str:
    """Say what the measured bubble consists of, in shares of the time that a step takes."""
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
