"""``pipeoffload-plan model=...``: what each rank needs of memory, and the plan for a device."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from lightning_pipeoffload.cli.given_plan import parse_name
from lightning_pipeoffload.cli.model_planner import Estimate, ModelPlanner
from lightning_pipeoffload.cli.plan_output import MEASURED, bare_table, describe, print_choice
from lightning_pipeoffload.planning.memory_needs import ON_DEVICE, RankNeeds, describe_needs
from lightning_pipeoffload.schedule import (
    Costs,
    MemoryLimitError,
    Schedule,
    ScheduleError,
    split_fused_backward,
)
from lightning_pipeoffload.schedule.candidates import Option, options
from lightning_pipeoffload.schedule.families import FAMILIES
from lightning_pipeoffload.schedule.make_plan import Plan
from lightning_pipeoffload.schedule.quantities import bytes_text, share_text
from lightning_pipeoffload.schedule.recipe import check_sizes

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["estimate_model", "plan_for_device"]

_GIB, _MIB = 1 << 30, 1 << 20
_HEADINGS = (*ON_DEVICE, "device", "host")


def plan_for_device(config: DictConfig) -> tuple[Schedule, Costs, dict[str, Any]]:
    """Return the fastest plan that fits a device, its costs, and what JSON says of it.

    Raises:
        ValueError: The device is unknown, the model cannot be built, or nothing fits.
    """
    check_sizes(num_ranks=config.num_ranks)
    planner = ModelPlanner(config)
    with _saying(f"Planning {config.strategy.schedule} for {config.num_ranks} ranks"):
        plan = _plan(planner, config)
    if config.format == "text":
        print_choice(plan, MEASURED)
        Console().out(f"{_basis(planner, config)}\n", highlight=False)
    told = describe(plan) | _figures(planner, config, plan.best.option)
    return split_fused_backward(plan.schedule), plan.costs, told


def _saying(what: str) -> AbstractContextManager[Any]:
    """Show on a terminal what takes seconds."""
    return Console(stderr=True).status(what)


def _plan(planner: ModelPlanner, config: DictConfig) -> Plan:
    name = config.strategy.schedule
    if name != "auto" and name not in FAMILIES:
        raise ScheduleError(
            f"schedule ({name}) cannot be planned for a device; use auto or one of "
            f"{', '.join(FAMILIES)}"
        )
    sizes = [config.num_microbatches], None, config.num_chunks, [config.strategy.recompute]
    wanted = [option for option in options(*sizes) if name in ("auto", option.schedule)]
    if not wanted:
        raise ScheduleError(f"num_chunks ({config.num_chunks}) is none that {name} takes")
    try:
        return planner.plan(wanted, config.num_ranks)
    except MemoryLimitError as error:
        _, memory, needed = error.args
        raise ScheduleError(
            f"{config.device} has {bytes_text(memory)}, and any such plan needs "
            f"{bytes_text(needed)} or more of a device; "
            f"{planner.advice(planner.settings_named(name), config.num_ranks)}"
        ) from None


def _basis(planner: ModelPlanner, config: DictConfig) -> str:
    """Say what the figures go by."""
    device, precision = planner.device, planner.probe.precision
    assert device is not None
    assert planner.memory is not None
    return (
        f"{device.name} at {config.efficiency:g} of its data sheet's rates: "
        f"{planner.flops / 1e12:.4g} TFLOP/s dense (precision {precision}), copies "
        f"{device.copy_rate / 1e9:.4g} GB/s each way, messages {device.link_rate / 1e9:.4g} GB/s, "
        f"memory {bytes_text(planner.memory)} less weights, gradients and optimizer states of the "
        f"stages"
    )


def _figures(planner: ModelPlanner, config: DictConfig, option: Option) -> dict[str, Any]:
    """Return what JSON says of the device, and of what the weights of an option take."""
    device = planner.device
    assert device is not None
    return {
        "device": device.name,
        "precision": planner.probe.precision,
        "efficiency": config.efficiency,
        "flops_per_second": planner.flops,
        "copy_rate": device.copy_rate,
        "link_rate": device.link_rate,
        "device_memory": planner.memory,
        "taken_by_weights": planner.taken(option, config.num_ranks),
    }


def estimate_model(config: DictConfig) -> None:
    """Print what each rank needs for the model of ``config``, in one plan or several.

    Raises:
        ValueError: The model, its data or a plan cannot be; or no plan fits ``device_memory``.
    """
    planner = ModelPlanner(config)
    limit = planner.memory
    with _saying("Counting what the model needs"):
        found, refusals = _estimate_all(
            planner,
            [str(name) for name in _as_list(config.compare) or [config.strategy.schedule]],
            [int(num_ranks) for num_ranks in _as_list(config.num_ranks)],
        )
    if not found:
        raise ScheduleError(refusals[0])
    least = min(found, key=lambda plan: plan.device)
    if limit is not None and least.device > limit:
        with _saying("It does not fit; looking for the fastest plan that does"):
            advice = planner.advice(least.settings, least.num_ranks)
        raise ScheduleError(_refusal(least, limit, advice))
    _print(config, found, refusals, limit)


def _estimate_all(
    planner: ModelPlanner, names: Sequence[str], ranks: Sequence[int]
) -> tuple[list[Estimate], list[str]]:
    """Estimate each schedule for each number of ranks; say why others cannot be."""
    found, refusals = [], []
    for num_ranks, name in product(ranks, names):
        try:
            found.append(planner.estimate(planner.settings_named(*parse_name(name)), num_ranks))
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            is_one = len(ranks) * len(names) == 1
            refusals.append(reason if is_one else f"{name}, {num_ranks} ranks: {reason}")
    return found, refusals


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _refusal(plan: Estimate, limit: float, advice: str) -> str:
    needs = plan.largest
    unit = _Unit.of([needs])
    parts = ", ".join(f"{name} {unit.text(getattr(needs, name))}" for name in ON_DEVICE)
    return (
        f"rank {plan.needs.index(needs)} of {plan.num_ranks} needs {unit.text(needs.device)} for "
        f"{plan.name} ({parts}), and device_memory is {unit.text(limit)}; {advice}"
    )


def _print(
    config: DictConfig, found: Sequence[Estimate], refusals: Sequence[str], limit: float | None
) -> None:
    is_one = not config.compare and len(found) == 1
    if config.format == "json":
        figures = [_describe(plan) for plan in found]
        several = {"estimates": figures, "refused": list(refusals)}
        sys.stdout.write(json.dumps(figures[0] if is_one else several) + "\n")
        return
    console = Console()
    console.print(_table_of_ranks(found[0].needs) if is_one else _table_of_plans(found, limit))
    lines = [
        f"{plan.name}: {plan.num_ranks} ranks, {plan.num_microbatches} microbatches, bubble "
        f"{share_text(plan.bubble)} by the operations that are counted"
        for plan in found
    ]
    for line in (*lines, *refusals):
        console.out(line, highlight=False)


def _describe(plan: Estimate) -> dict[str, Any]:
    return {
        "schedule": plan.name,
        "num_ranks": plan.num_ranks,
        "num_microbatches": plan.num_microbatches,
        "recompute": plan.settings.recompute,
        "bubble": plan.bubble,
        "memory": describe_needs(plan.needs),
    }


def _table_of_ranks(needs: Sequence[RankNeeds]) -> Table:
    unit = _Unit.of(needs)
    title = f"{unit.name} of each rank"
    table = bare_table("rank", *_HEADINGS, title=title, is_narrow=True)
    for index, rank in enumerate(needs):
        table.add_row(str(index), *unit.cells(rank))
    return table


def _table_of_plans(found: Sequence[Estimate], limit: float | None) -> Table:
    """Return a table with the rank of each plan that needs most."""
    unit = _Unit.of([plan.largest for plan in found])
    fits = () if limit is None else ("fits",)
    title = f"{unit.name} of the rank that needs most"
    columns = (Column("schedule", no_wrap=True), "ranks", *_HEADINGS, *fits)
    table = bare_table(*columns, title=title, is_narrow=True)
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

    def text(self, num_bytes: float) -> str:
        """Write bytes in it."""
        return f"{num_bytes / self.size:.1f} {self.name}"

    def cells(self, needs: RankNeeds) -> list[str]:
        """Return what a rank needs, by ``_HEADINGS``."""
        return [f"{getattr(needs, name) / self.size:.1f}" for name in _HEADINGS]
