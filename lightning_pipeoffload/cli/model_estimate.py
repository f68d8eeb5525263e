"""``pipeoffload-plan model=...``: what each rank needs of memory, before any start."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from lightning_pipeoffload.cli.comparison import NARROW, bare_table, parse_name
from lightning_pipeoffload.cli.model_probe import ModelProbe
from lightning_pipeoffload.planning.memory_limit import parse_bytes
from lightning_pipeoffload.planning.memory_needs import (
    ON_DEVICE,
    MemoryNeeds,
    RankNeeds,
    describe_needs,
)
from lightning_pipeoffload.planning.plan_request import first_plan
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import ScheduleError, lower, simulate

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["estimate_model"]

_GIB = 1 << 30
_MIB = 1 << 20
_HEADINGS = (*ON_DEVICE, "device", "host")
_LEAN_SCHEDULES = ("zb_h1", "1f1b", "v_half", "v_min")


@dataclass(frozen=True)
class Estimated:
    """What a plan needs.

    Attributes:
        settings: The settings of the plan.
        num_ranks: The number of its ranks.
        num_microbatches: The number of its microbatches.
        needs: What each rank needs.
        bubble: The idle share, from the operations that are counted.
    """

    settings: PipelineSettings
    num_ranks: int
    num_microbatches: int
    needs: Sequence[RankNeeds]
    bubble: float

    @property
    def name(self) -> str:
        """The plan in words, as they are on the command line."""
        amount = self.settings.offload
        copies = "" if amount in ("none", "auto") else f"+{amount}"
        return f"{self.settings.schedule}{copies}"

    @property
    def largest(self) -> RankNeeds:
        """What the rank needs that needs most on its device."""
        return max(self.needs, key=lambda rank: rank.device)

    @property
    def device(self) -> int:
        """The most that a rank needs on its device."""
        return self.largest.device

    def figures(self) -> dict[str, Any]:
        """Return what JSON says of it."""
        return {
            "schedule": self.name,
            "num_ranks": self.num_ranks,
            "num_microbatches": self.num_microbatches,
            "recompute": self.settings.recompute,
            "bubble": self.bubble,
            "memory": describe_needs(self.needs),
        }


class _Estimator:
    """Estimates plans of one model.

    Args:
        config: Conf/plan.yaml with the command line's overrides.
    """

    def __init__(self, config: DictConfig) -> None:
        self._strategy = config.strategy
        self._num_chunks = config.num_chunks
        self._num_microbatches = int(config.num_microbatches)
        self._probe = ModelProbe(config)

    def settings(self, name: str) -> PipelineSettings:
        """Return the settings of a schedule by name, ``uniform+half`` with offload."""
        schedule, amount = parse_name(name)
        strategy = self._strategy
        return PipelineSettings(
            schedule=schedule,
            num_microbatches=self._num_microbatches,
            num_chunks="auto" if self._num_chunks is None else int(self._num_chunks),
            blocks=strategy.get("blocks"),
            split=strategy.get("split", "auto"),
            offload=strategy.offload if amount is None else amount,
            recompute=strategy.recompute,
        )

    def estimate(self, settings: PipelineSettings, num_ranks: int) -> Estimated:
        """Estimate one plan.

        Raises:
            ValueError: The plan cannot be, or the model cannot be cut so.
        """
        count = settings.choose_num_microbatches(num_ranks, self._probe.batch_size)
        schedule, _ = first_plan(settings, num_ranks, count)
        needs: MemoryNeeds = self._probe.needs_of(schedule.placement, count, settings)
        plan = lower(schedule)
        bubble = simulate(plan, needs.costs).bubble
        return Estimated(settings, num_ranks, count, needs.of_ranks(plan), bubble)

    def estimate_all(
        self, names: Sequence[str], ranks: Sequence[int]
    ) -> tuple[list[Estimated], list[str]]:
        """Estimate each schedule for each number of ranks; say why others cannot be."""
        found, refusals = [], []
        for num_ranks, name in product(ranks, names):
            try:
                found.append(self.estimate(self.settings(name), num_ranks))
            except ValueError as error:
                reason = str(error).partition("\n")[0]
                is_one = len(ranks) * len(names) == 1
                refusals.append(reason if is_one else f"{name}, {num_ranks} ranks: {reason}")
        return found, refusals

    def find_fitting(self, too_large: Estimated, limit: int) -> str | None:
        """Return the smallest change that lets a plan fit, as on the command line; None: none."""
        for words, settings, num_ranks in _changes(too_large):
            try:
                found = self.estimate(settings, num_ranks)
            except ValueError:
                continue  # it cannot be, so it is none
            if found.device <= limit:
                return words
        return None


def estimate_model(config: DictConfig) -> None:
    """Print what each rank needs for the model of ``config``, in one plan or several.

    Raises:
        ValueError: The model, its data or a plan cannot be; or no plan fits ``device_memory``.
    """
    limit = config.device_memory
    limit = None if limit is None else parse_bytes(limit, "device_memory")
    estimator = _Estimator(config)
    found, refusals = estimator.estimate_all(
        [str(name) for name in _as_list(config.compare) or [config.strategy.schedule]],
        [int(num_ranks) for num_ranks in _as_list(config.num_ranks)],
    )
    if not found:
        raise ScheduleError(refusals[0])
    least = min(found, key=lambda plan: plan.device)
    if limit is not None and least.device > limit:
        raise ScheduleError(_refusal(least, limit, estimator.find_fitting(least, limit)))
    _print(config, found, refusals, limit)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _changes(plan: Estimated) -> Iterator[tuple[str, PipelineSettings, int]]:
    """Yield changes of a plan from the smallest on: words, and what they ask for."""
    settings, ranks = plan.settings, plan.num_ranks
    for name in _LEAN_SCHEDULES:
        if name != settings.schedule:
            yield f"schedule={name}", replace(settings, schedule=name), ranks
    for amount in ("half", "full"):
        yield f"offload={amount}", replace(settings, offload=amount), ranks
    for amount in ("cheap", "full"):
        words = f"strategy.recompute={amount}"
        yield words, replace(settings, recompute=amount), ranks
    full = replace(settings, offload="full", recompute="full")
    yield "offload=full strategy.recompute=full", full, ranks
    for times in (2, 4, 8, 16):
        yield f"num_ranks={times * ranks}", settings, times * ranks
    for times in (2, 4, 8, 16):
        words = f"num_ranks={times * ranks} offload=full strategy.recompute=full"
        yield words, full, times * ranks


def _refusal(plan: Estimated, limit: int, change: str | None) -> str:
    needs = plan.largest
    unit = _Unit.of([needs])
    parts = ", ".join(f"{name} {unit.text(getattr(needs, name))}" for name in ON_DEVICE)
    advice = f"use {change}" if change else "use a smaller model, batch or data type"
    return (
        f"rank {plan.needs.index(needs)} of {plan.num_ranks} needs {unit.text(needs.device)} for "
        f"{plan.name} ({parts}), and device_memory is {unit.text(limit)}; {advice}"
    )


def _print(
    config: DictConfig, found: Sequence[Estimated], refusals: Sequence[str], limit: int | None
) -> None:
    is_one = not config.compare and len(found) == 1
    if config.format == "json":
        figures = [plan.figures() for plan in found]
        several = {"estimates": figures, "refused": list(refusals)}
        sys.stdout.write(json.dumps(figures[0] if is_one else several) + "\n")
        return
    console = Console()
    console.print(_table_of_ranks(found[0].needs) if is_one else _table_of_plans(found, limit))
    lines = [
        f"{plan.name}: {plan.num_ranks} ranks, {plan.num_microbatches} microbatches, bubble "
        f"{plan.bubble:.4f} from FLOPs"
        for plan in found
    ]
    for line in (*lines, *refusals):
        console.out(line, highlight=False)


def _table_of_ranks(needs: Sequence[RankNeeds]) -> Table:
    unit = _Unit.of(needs)
    title = f"{unit.name} of each rank"
    table = bare_table("rank", *_HEADINGS, title=title, padding=NARROW)
    for index, rank in enumerate(needs):
        table.add_row(str(index), *unit.cells(rank))
    return table


def _table_of_plans(found: Sequence[Estimated], limit: int | None) -> Table:
    """Return a table with the rank of each plan that needs most."""
    unit = _Unit.of([plan.largest for plan in found])
    fits = () if limit is None else ("fits",)
    title = f"{unit.name} of the rank that needs most"
    columns = (Column("schedule", no_wrap=True), "ranks", *_HEADINGS, *fits)
    table = bare_table(*columns, title=title, padding=NARROW)
    for plan in found:
        row = [plan.name, str(plan.num_ranks), *unit.cells(plan.largest)]
        table.add_row(*row, *(() if limit is None else ("yes" if plan.device <= limit else "no",)))
    return table


class _Unit(NamedTuple):
    """What figures that stand side by side are in: GiB where one of a device is large."""

    name: str
    size: int

    @classmethod
    def of(cls, needs: Iterable[RankNeeds]) -> _Unit:
        """Choose one for what ranks need."""
        is_large = max(rank.device for rank in needs) >= 10 * _GIB
        return cls("GiB", _GIB) if is_large else cls("MiB", _MIB)

    def text(self, num_bytes: int) -> str:
        """Write bytes in it."""
        return f"{num_bytes / self.size:.1f} {self.name}"

    def cells(self, needs: RankNeeds) -> list[str]:
        """Return what a rank needs, by ``_HEADINGS``."""
        return [f"{getattr(needs, name) / self.size:.1f}" for name in _HEADINGS]
