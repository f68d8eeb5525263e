"""A callback that draws the memory of a step's activations next to the plan's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_pipeoffload.pictures import (
    MISSING,
    SMALL,
    has_matplotlib,
    new_figure,
    picture_path_error,
    save_figure,
)
from lightning_pipeoffload.runtime.memory import HeldBytes
from lightning_pipeoffload.schedule import Costs, Timeline, bytes_text, simulate
from lightning_pipeoffload.schedule.simulation import Curve, host_memory_curves, memory_curves
from lightning_pipeoffload.strategy import PipeOffloadStrategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _PANEL, _AROUND = 1090.0, 62.0, 96.0  # pixels
_DEVICE, _HOST, _MOVING = "#5c6784", "#8e5bb5", "#d9822b"


class MemoryPicture(Callback):
    """Writes a picture when training has ended, on global rank 0.

    For every rank: the plan's saved bytes over a step, with the seconds and bytes that were
    measured, and below it those of the last step: on the device, on the host and on the way between
    them. Times are the host's; an accelerator may lag.

    Args:
        path: The file to write: ``.svg`` or ``.png``.

    Raises:
        ValueError: The path ends otherwise, or matplotlib is not installed; or, when a fit begins,
            the file cannot be written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        if self._path.suffix not in (".svg", ".png"):
            raise ValueError(f"path ({path}) of a MemoryPicture must end in .svg or .png")
        if not has_matplotlib():
            raise ValueError(f"MemoryPicture cannot draw: {MISSING}")

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PipeOffloadStrategy):
            raise ValueError(
                f"MemoryPicture draws a pipeline's plan, and the strategy is "
                f'{type(trainer.strategy).__name__}; use strategy="pipeoffload"'
            )
        if stage == "fit":
            obstacle = picture_path_error(self._path) if trainer.is_global_zero else ""
            obstacle = trainer.strategy.broadcast(obstacle)
            if obstacle:
                raise ValueError(
                    f"path ({self._path}) of a MemoryPicture cannot be written: {obstacle}"
                )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PipeOffloadStrategy)
        costs = strategy.split.measurements.costs_at_end
        if stage != "fit" or costs is None or not trainer.is_global_zero:
            return
        save_figure(_draw(strategy, costs), self._path)


def _draw(strategy: PipeOffloadStrategy, costs: Costs) -> Figure:
    report = strategy.report(live_bytes=True)
    planned = planned_panels(simulate(strategy.plan, costs), costs)
    measured = [_measured_panel(entries) for entries in report["measured"]["live_bytes"]]
    title = f"{report['schedule']}, {report['num_microbatches']} microbatches: saved activations"
    return draw_memory(list(zip(planned, measured, strict=True)), title)


def _measured_panel(entries: list[tuple[Any, ...]]) -> MemoryPanel:
    times = [0.0, *(entry[0] for entry in entries)]
    held = [HeldBytes(), *(HeldBytes(*entry[1:]) for entry in entries)]
    device, host, moving = (
        [(time, float(there[index])) for time, there in zip(times, held, strict=True)]
        for index in range(3)
    )
    return MemoryPanel("measured", device, host, moving, times[-1])


@dataclass(frozen=True)
class MemoryPanel:
    """The memory of one rank over a step, as curves of (seconds, bytes from then on).

    Attributes:
        name: "plan" or "measured".
        device: Bytes on the device.
        host: Bytes on the host.
        moving: Bytes of pending copies; empty where they are not known.
        end: Seconds of the step.
    """

    name: str
    device: Curve
    host: Curve
    moving: Curve
    end: float

    @property
    def highest(self) -> float:
        """The most of its curves."""
        return max(_peak(curve) for curve in (self.device, self.host, self.moving))


def planned_panels(timeline: Timeline, costs: Costs) -> list[MemoryPanel]:
    """Return the panel of each rank of a simulated timeline; costs are in seconds and bytes."""
    on_device, on_host = memory_curves(timeline, costs), host_memory_curves(timeline, costs)
    return [
        MemoryPanel("plan", device, host, [], timeline.makespan)
        for device, host in zip(on_device, on_host, strict=True)
    ]


def draw_memory(ranks: Sequence[Sequence[MemoryPanel]], title: str) -> Figure:
    """Draw the panels of each rank, one below the other, with a line above."""
    panels = [
        (f"rank {number} {panel.name}", panel) for number, r in enumerate(ranks) for panel in r
    ]
    height = _PANEL * len(panels) + _AROUND
    figure = new_figure(_WIDTH, height)
    all_axes = figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0]
    figure.subplots_adjust(0.11, 56 / height, 0.86, 1 - 36 / height, hspace=0.15)
    figure.suptitle(title, x=0.01, ha="left", fontsize=1.2 * SMALL)
    for axes, (name, panel) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=SMALL)
    highest = max((panel.highest for _, panel in panels), default=0.0) or 1.0
    longest = max((panel.end for _, panel in panels), default=0.0) or 1.0
    all_axes[-1].set(xlim=(0, 1e3 * longest), ylim=(0, 1.05 * highest))
    all_axes[-1].set_xlabel("ms", fontsize=SMALL)
    all_axes[-1].tick_params(axis="x", labelsize=SMALL)
    handles, words = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, words, loc="lower left", ncols=3, fontsize=SMALL, frameon=False)
    return figure


def _draw_panel(axes: Axes, panel: MemoryPanel) -> None:
    curves = (
        ("on the device", panel.device, _DEVICE),
        ("on the host", panel.host, _HOST),
        ("in pending copies", panel.moving, _MOVING),
    )
    for words, curve, color in curves:
        times = [1e3 * time for time in (*(time for time, _ in curve), panel.end)]
        values = [memory for _, memory in curve]
        values.append(values[-1] if values else 0.0)
        axes.step(times, values, where="post", color=color, linewidth=0.8, label=words)
        if words == "on the device":
            axes.fill_between(times, values, step="post", color=color, alpha=0.25, linewidth=0)
    peaks = "\n".join(
        f"{what} peak {bytes_text(_peak(curve))}"
        for what, curve in (("device", panel.device), ("host", panel.host))
    )
    axes.text(1.01, 0.5, peaks, transform=axes.transAxes, va="center", fontsize=SMALL)
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _peak(curve: Curve) -> float:
    return max((memory for _, memory in curve), default=0.0)
