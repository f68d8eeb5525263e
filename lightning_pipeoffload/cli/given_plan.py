"""What ``pipeoffload-plan`` asks the planner where the costs of a rank are given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pipeoffload.cli.costs_file import read_costs
from lightning_pipeoffload.cli.plan_output import MEASURED, PlannedSteps, Steps, Units
from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    ScheduleError,
    add_reductions,
    estimated_copy_ratio,
    with_copy_ratio,
)
from lightning_pipeoffload.schedule.build import check_name
from lightning_pipeoffload.schedule.candidates import Option, options
from lightning_pipeoffload.schedule.make_plan import Plan, PlanRequest, make_plan
from lightning_pipeoffload.schedule.recipe import Recipe, check_limit, check_sizes
from lightning_pipeoffload.schedule.solver.optpipe import solved
from lightning_pipeoffload.schedule.solver.plan_problem import PlanProblem

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["GivenPlans", "costs_of_stage", "mapping", "parse_name", "steps_of"]

_COSTS = tuple(field.name for field in fields(Costs))
_LAYER = ("hidden_size", "sequence_length", "compute_rate", "copy_rate")
_OF_THE_MACHINE = ("communication", "copy_lanes", "ranks_per_link")
_SYNCS = ("barrier", "post_validation")


def mapping(
    config: DictConfig, name: str, known: Collection[str] | None = None
) -> Mapping[str, Any]:
    """Return names and values of a part of the configuration.

    Raises:
        ScheduleError: It has none, or others than are known.
    """
    values = config[name]
    if not isinstance(values, Mapping):
        raise ScheduleError(f"{name} ({values}) must have names and values; use {name}.NAME=VALUE")
    for key in values:
        if known is not None and key not in known:
            raise ScheduleError(f"{name}.{key} is unknown; {name} has {', '.join(known)}")
    return values


def steps_of(config: DictConfig) -> Steps:
    """Read ``strategy.optimizer_sync``, what makes such a run wait, and ``picture.steps``.

    Ranks wait where the trainer clips by norm or its precision has a loss scale.

    Raises:
        ScheduleError: One of them is not what it can be.
    """
    sync = config.strategy.optimizer_sync
    if sync not in _SYNCS:
        raise ScheduleError(f"strategy.optimizer_sync ({sync}) must be one of {', '.join(_SYNCS)}")
    picture, trainer = config.picture, config.get("trainer") or {}
    drawn = None if isinstance(picture, str) else picture.get("steps")
    if drawn is not None and (not isinstance(drawn, int) or drawn < 1):
        raise ScheduleError(f"picture.steps ({drawn}) must be a whole number from 1 on")
    by_norm = trainer.get("gradient_clip_algorithm") != "value"
    clips = bool(trainer.get("gradient_clip_val")) and by_norm
    is_scaled = str(trainer.get("precision")) in ("16", "16-mixed")
    return Steps(sync == "barrier" and (is_scaled or clips), drawn or 1)


def parse_name(name: str) -> tuple[str, str | float | None]:
    """Take ``uniform+half`` or ``uniform+0.3`` apart: the schedule, and what of it is offloaded.

    The amount is a share of the activations, or its name; None: there is none.
    """
    base, _, amount = name.partition("+")
    try:
        return base, float(amount)
    except ValueError:
        return base, amount or None


def costs_of_stage(costs: Costs, num_chunks: int) -> Costs:
    """Return what one of several stages of a rank costs.

    So schedules with few and with many stages on a rank have the same work, and memory has one
    unit for all of them, and for the limit: the ``activation`` of a rank.

    Args:
        costs: The costs of a rank's whole part of the model; a sequence has one number for each
            stage, and stays as it is.
        num_chunks: Stages of a rank.
    """
    values = {field.name: getattr(costs, field.name) for field in fields(costs)}
    divided: dict[str, Any] = {
        name: value / num_chunks
        for name, value in values.items()
        if name not in _OF_THE_MACHINE and isinstance(value, (int, float))
    }
    return replace(costs, **divided)


@dataclass(frozen=True)
class _Named:
    """A schedule that is asked for by its name."""

    name: str
    num_chunks: int
    recipe: Recipe


class GivenPlans:
    """Plans by the costs that a configuration gives.

    Args:
        config: Conf/plan.yaml with the command line's overrides.

    Attributes:
        costs: What a rank's whole part of the model costs.
        units: What times and memory are counted in.
        steps: How steps follow each other.

    Raises:
        ScheduleError: A value cannot be.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        _refuse_what_a_run_measures(config)
        self.costs = _costs(config)
        self.units = MEASURED if config.costs_file else Units.of(self.costs)
        self.steps = steps_of(config)

    def request(self, wanted: list[Option], **more: Any) -> PlanRequest:
        """Return what is asked for some options."""
        values = {"offload": self._config.strategy.offload, **more}
        return PlanRequest(
            self._config.num_ranks,
            wanted,
            lambda option: costs_of_stage(self.costs, option.num_chunks),
            has_barrier=lambda option: self.steps.has_barrier,
            **values,
        )

    def all_options(self) -> list[Option]:
        """Return all families in all cuts, for the sizes that are given.

        Raises:
            ScheduleError: A size cannot be.
        """
        config = self._config
        sizes = {name: config[name] for name in ("num_ranks", "num_microbatches", "num_chunks")}
        if sizes["num_chunks"] is None:
            del sizes["num_chunks"]
        check_sizes(**sizes)
        return options([config.num_microbatches], None, config.num_chunks)

    def chosen(self) -> Plan:
        """Return the fastest plan of all that fit, as ``schedule=auto`` has it.

        Raises:
            ScheduleError: Nothing fits, or an argument is for one schedule.
        """
        config = self._config
        if config.options:
            raise ScheduleError(f"options ({config.options}) are for one schedule; name that one")
        check_limit(config.memory_limit)
        return make_plan(self.request(self.all_options(), memory_limit=config.memory_limit))

    def solved(self) -> tuple[Schedule, Costs]:
        """Return a solver's plan; it starts from the best of all families, in whatever cut."""
        config, limit = self._config, self._config.memory_limit
        auto = self.request(self.all_options(), memory_limit=limit, offload="auto")
        best = make_plan(auto)
        problem = PlanProblem(
            config.num_microbatches,
            best.schedule.placement,
            best.costs,
            limit,
            self.steps.has_barrier,
        )
        options = mapping(config, "options", ("solver_seconds", "plan_cache"))
        return solved(problem, **options), best.costs

    def named(self, name: str, amount: str | float) -> tuple[PlannedSteps, Plan]:
        """Return the plan of one schedule, by its name or from a file.

        Args:
            name: The name, or the path of a .csv.
            amount: What is offloaded.

        Raises:
            ScheduleError: It cannot be, or does not fit.
        """
        given = self._from_file(name) if name.endswith(".csv") else self._by_name(name)
        options = self._builder_options()
        option = Option(given.name, given.num_chunks, self._config.num_microbatches)
        limit = self._config.memory_limit
        check_limit(limit)
        request = self.request(
            [option],
            memory_limit=limit,
            offload=amount,
            recipes={given.name: given.recipe},
            builder_options=options,
        )
        plan = make_plan(request)
        return self.timed(plan.schedule, plan.costs), plan

    def timed(self, schedule: Schedule, costs: Costs) -> PlannedSteps:
        """Return a schedule with its times; with REDUCE where that takes any."""
        takes_time = any(costs.per_stage("reduce", schedule.num_stages))
        if takes_time and not schedule.has_reductions:
            schedule = add_reductions(schedule)
        return PlannedSteps(schedule, costs, self.steps)

    def _by_name(self, name: str) -> _Named:
        check_name(name)
        recipe, wanted = SCHEDULES[name], self._config.num_chunks
        if wanted is None or (self._config.compare and recipe.max_chunks):
            wanted = recipe.num_chunks  # side by side num_chunks is for those that take any
        check_sizes(num_chunks=wanted)
        return _Named(name, wanted, recipe)

    def _from_file(self, path: str) -> _Named:
        if not Path(path).is_file():
            raise ScheduleError(
                f"strategy.schedule ({path}) is no file; Schedule.to_csv writes one"
            )
        given = Schedule.from_csv(path)
        recipe = Recipe(lambda *sizes: given, 1, None, lambda *sizes: given.placement)
        return _Named(given.name, given.num_chunks, recipe)

    def _builder_options(self) -> Mapping[str, Any]:
        options = mapping(self._config, "options")
        for option in options:
            if option in ("num_ranks", "num_microbatches", "num_chunks", "costs", "memory_limit"):
                raise ScheduleError(f"options.{option} has a place of its own; set {option}")
        return options


def _costs(config: DictConfig) -> Costs:
    """Return the costs, those of copies by the paper's formula where a layer is described."""
    costs = Costs(**mapping(config, "costs", _COSTS))
    if config.costs_file is not None:
        costs = read_costs(str(config.costs_file))
    layer = mapping(config, "layer", _LAYER)
    given = [name for name in ("hidden_size", "sequence_length") if layer[name] is not None]
    if not given:
        return costs
    if len(given) < 2 or costs.offload or costs.reload:
        raise ScheduleError(
            "layer needs both hidden_size and sequence_length, and estimates costs.offload and "
            "costs.reload; give these, or those"
        )
    return with_copy_ratio(costs, estimated_copy_ratio(**layer))


def _refuse_what_a_run_measures(config: DictConfig) -> None:
    """Refuse arguments of the strategy that mean nothing for costs that are given."""
    limit, recompute = config.strategy.memory_limit, config.strategy.recompute
    if limit is not None:
        raise ScheduleError(
            f"strategy.memory_limit ({limit}) is in bytes, of a run; here set memory_limit, in the "
            f"unit of costs.activation"
        )
    if recompute != "none":
        raise ScheduleError(
            f"strategy.recompute ({recompute}) is of a run; here it is in the costs that are "
            f"given: a smaller costs.activation, a larger costs.backward_input"
        )
