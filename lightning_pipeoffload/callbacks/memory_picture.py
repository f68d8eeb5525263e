"""A callback that draws the memory of a step's activations beside the plan's."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_pipeoffload.pictures.figures import MISSING, has_matplotlib, save_figure
from lightning_pipeoffload.pictures.memory import MemoryPanel, draw_memory, planned_panels
from lightning_pipeoffload.runtime.memory.ledger import Held
from lightning_pipeoffload.schedule import Costs, simulate
from lightning_pipeoffload.strategy import PipeOffloadStrategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MemoryPicture"]


class MemoryPicture(Callback):
    """Writes a picture when training has ended, on global rank 0.

    For every rank: the plan's saved bytes over a step, with the seconds and bytes that were
    measured, and below it those of the last step: on the device, on the host and on the way between
    them. Times are the host's; an accelerator may be behind.

    Args:
        path: The file to write: ``.svg`` or ``.png``.

    Raises:
        ValueError: The path ends otherwise, or matplotlib is not installed.
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

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PipeOffloadStrategy)
        costs = strategy.run.measurements.costs_at_end
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
    held = [Held(), *(Held(*entry[1:]) for entry in entries)]
    device, host, moving = (
        [(time, float(there[index])) for time, there in zip(times, held, strict=True)]
        for index in range(3)
    )
    return MemoryPanel("measured", device, host, moving, times[-1])
