"""What ``pipeoffload-rehearse`` has found of a rank, and how it tells it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from rich.console import Console

from lightning_pipeoffload.cli.plan_output import bare_table
from lightning_pipeoffload.schedule.quantities import bytes_text, seconds_text, share_text

__all__ = ["Rehearsed", "print_rehearsed"]

_TIMES = ("forward", "backward_input", "backward_weight", "offload", "reload")


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal has found.

    Attributes:
        schedule: The name of the schedule.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of a step.
        rank: The rank that has run.
        stages: What each of its stages costs, by index; seconds and bytes.
        step_seconds: Seconds of a step of this rank.
        planned_seconds: What the plan says they are.
        copy_ratio: Seconds of a stage's copies over those of its computing, the largest.
        hidden_share: The share of the copies' time that the step did not wait for; None: no copies.
        peak_bytes: The most that its activations took.
        planned_peak_bytes: What the plan says that is.
        host_bytes: The most that was on the host.
        memory: What the rank needs of its device in all, by what it is for.
        limit_bytes: What activations may take; None: anything.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    rank: int
    stages: dict[int, dict[str, float]]
    step_seconds: float
    planned_seconds: float
    copy_ratio: float
    hidden_share: float | None
    peak_bytes: int
    planned_peak_bytes: int
    host_bytes: int
    memory: dict[str, int]
    limit_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether the activations were within what they may take."""
        return self.limit_bytes is None or self.peak_bytes <= self.limit_bytes


def print_rehearsed(found: Rehearsed, output: str) -> None:
    """Print what was found, as a table or as one JSON object."""
    if output == "json":
        sys.stdout.write(json.dumps({**asdict(found), "fits": found.fits}) + "\n")
        return
    console = Console()
    title = (
        f"{found.schedule}: rank {found.rank} of {found.num_ranks}, {found.num_microbatches} "
        f"microbatches"
    )
    headings = ("stage", "F", "B", "W", "offload", "reload", "activation")
    table = bare_table(*headings, title=title)
    for index, stage in found.stages.items():
        times = [seconds_text(stage[name]) for name in _TIMES]
        table.add_row(str(index), *times, bytes_text(stage["activation"]))
    console.print(table)
    for line in _lines(found):
        console.print(line, highlight=False)


def _lines(found: Rehearsed) -> list[str]:
    over = found.step_seconds / found.planned_seconds if found.planned_seconds else 1.0
    hidden = (
        "" if found.hidden_share is None else f", {share_text(found.hidden_share)} of copies hidden"
    )
    limit = "" if found.limit_bytes is None else f" of {bytes_text(found.limit_bytes)}"
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in found.memory.items() if size)
    return [
        f"A step takes {seconds_text(found.step_seconds)}, {over:.3f} times what is planned.",
        f"k = {found.copy_ratio:.2f}{hidden}.",
        f"Activations took {bytes_text(found.peak_bytes)}{limit}, planned were "
        f"{bytes_text(found.planned_peak_bytes)}, and {bytes_text(found.host_bytes)} of the host: "
        f"{'it fits' if found.fits else 'it does not fit'}.",
        f"In all the rank needs {parts}.",
    ]
