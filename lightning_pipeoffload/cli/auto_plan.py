"""``pipeoffload-plan schedule=auto``: the plan that a run would choose for costs that are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lightning_pipeoffload.cli.border_options import BorderOptions
from lightning_pipeoffload.cli.comparison import costs_of_stage
from lightning_pipeoffload.cli.plan_report import figures_of
from lightning_pipeoffload.cli.units import Units
from lightning_pipeoffload.planning.candidate_table import choice_table, lines_of_refused
from lightning_pipeoffload.schedule import Costs, ScheduleError
from lightning_pipeoffload.schedule.candidates import Option, options
from lightning_pipeoffload.schedule.make_plan import Plan, PlanRequest, make_plan
from lightning_pipeoffload.schedule.recipe import check_limit, check_sizes

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["choose", "costs_by_option", "describe", "print_choice", "wanted_options"]


def choose(config: DictConfig, costs: Costs) -> Plan:
    """Plan all families for the costs of a rank's part of the model.

    Args:
        config: Conf/plan.yaml with the command line's overrides.
        costs: What a rank's part of the model costs.

    Raises:
        ScheduleError: Nothing fits, or an argument is for one schedule.
    """
    if config.options:
        raise ScheduleError(f"options ({config.options}) are for one schedule; name that one")
    check_limit(config.memory_limit)
    barrier = BorderOptions.of(config).has_barrier
    request = PlanRequest(
        config.num_ranks,
        wanted_options(config),
        costs_by_option(costs),
        config.memory_limit,
        config.strategy.offload,
        has_barrier=lambda option: barrier,
    )
    return make_plan(request)


def costs_by_option(costs: Costs) -> Callable[[Option], Costs]:
    """Return what gives the costs of an option's stages.

    Args:
        costs: What a rank's part of the model costs.
    """
    return lambda option: costs_of_stage(costs, option.num_chunks)


def wanted_options(config: DictConfig, recompute: str = "none") -> list[Option]:
    """Return what to make plans of, for the sizes that are given.

    Args:
        config: Conf/plan.yaml with the command line's overrides.
        recompute: What the backward computes again.

    Raises:
        ScheduleError: A size cannot be.
    """
    sizes = {name: config[name] for name in ("num_ranks", "num_microbatches", "num_chunks")}
    if sizes["num_chunks"] is None:
        del sizes["num_chunks"]
    check_sizes(**sizes)
    return options([config.num_microbatches], None, config.num_chunks, [recompute])


def describe(plan: Plan) -> dict[str, Any]:
    """Return what JSON says of the candidates, and of what the plan that was taken offloads."""
    report = plan.report
    candidates = [candidate.figures() for candidate in plan.candidates]
    return {"candidates": candidates, **(figures_of(report) if report else {})}


def print_choice(plan: Plan, units: Units) -> None:
    """Print what was tried.

    Args:
        plan: The plan that was chosen.
        units: The units of its figures.
    """
    console = Console()
    console.print(choice_table(plan, units.write_time, units.write_memory))
    for line in lines_of_refused(plan.candidates):
        console.print(line, highlight=False)
    console.print()
