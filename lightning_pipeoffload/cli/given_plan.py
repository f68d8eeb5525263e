"""``pipeoffload-plan`` where costs are given: one schedule, several, the best, and a sweep."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import ceil, floor, inf, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich.table import Column, Table

from lightning_pipeoffload.cli.plan_output import (
    Answer,
    Part,
    about_choice,
    about_comparison,
    plan_answer,
    plan_figures,
    progress,
    step_figures,
)
from lightning_pipeoffload.planning.figures import (
    MEASURED,
    PlannedStep,
    Units,
    bare_table,
    lines_by_reason,
)
from lightning_pipeoffload.planning.plan_options import options_of
from lightning_pipeoffload.schedule import (
    FAMILIES,
    SCHEDULES,
    Candidate,
    Costs,
    Plan,
    PlanOption,
    PlanRequest,
    Recipe,
    Schedule,
    ScheduleError,
    Slices,
    as_executed,
    best_candidate,
    check_limit,
    check_name,
    check_positive_integers,
    check_slices,
    estimated_copy_ratio,
    make_plan,
    share_text,
    with_copy_ratio,
)
from lightning_pipeoffload.schedule.solver import PlanProblem, solve_plan

if TYPE_CHECKING:
    from omegaconf import DictConfig

_COSTS = tuple(field.name for field in fields(Costs))
_SLICES = tuple(field.name for field in fields(Slices) if field.name != "units")
_LAYER = ("hidden_size", "sequence_length", "compute_rate", "copy_rate")
_OF_THE_MACHINE = ("communication", "copy_lanes")
_OF_A_WHOLE_STEP = ("reduce", "step")
_SYNCS = ("barrier", "post_validation")

# Arguments of the strategy that count where costs are given. Others may only have the values that
# conf/offload sets.
_COUNTING = ("schedule", "offload", "optimizer_sync")
_UNSET = {"memory_limit": None, "recompute": "none"}
_SIZES = ("num_microbatches", "num_chunks", "num_sequence_slices")
SIZES_INSTEAD = {name: f"set {name}, without strategy." for name in _SIZES}
"""What to write in place of ``strategy.num_microbatches`` and the like in a plan."""
_INSTEAD = {
    "memory_limit": "set memory_limit, in the unit of costs.activation, as in memory_limit=4",
    "recompute": "express it by a smaller costs.activation and a larger costs.backward_input",
    **{name: f"write it as +options.{name}" for name in ("solver_seconds", "plan_cache")},
    **SIZES_INSTEAD,
}

# The approximate number of limits in a sweep, and the largest as a multiple of the fastest plan's.
_NUM_LIMITS, _LARGEST_LIMIT = 10, 2.0
_ROUNDING = 1 + 1e-9

_DEFAULT_COPIES = (
    "Copies of a stage out and back are counted as long as its F, B and W, since "
    "costs.offload and costs.reload are 0; set them, or offload=none."
)


def mapping(
    config: DictConfig, name: str, names: Collection[str] | None = None
) -> Mapping[str, Any]:
    """Return names and values of a part of the configuration; refuse names that are not known."""
    values = OmegaConf.select(config, name)
    if not isinstance(values, Mapping):
        raise ScheduleError(f"{name} ({values}) must have names and values; use {name}.NAME=VALUE")
    for key in values:
        if names is not None and key not in names:
            raise ScheduleError(f"{name}.{key} is unknown; {name} has {', '.join(names)}")
    return values


def has_barrier(config: DictConfig) -> bool:
    """Return whether ranks wait between steps, as :func:`needs_all_gradients` requires.

    Raises:
        ScheduleError: ``strategy.optimizer_sync`` has another value than it can have.
    """
    sync = config.strategy.optimizer_sync
    if sync not in _SYNCS:
        raise ScheduleError(f"strategy.optimizer_sync ({sync}) must be one of {', '.join(_SYNCS)}")
    return sync == "barrier" and needs_all_gradients(config)


def needs_all_gradients(config: DictConfig) -> bool:
    """Whether the trainer clips by norm, or scales the loss."""
    trainer = config.get("trainer") or {}
    by_norm = trainer.get("gradient_clip_algorithm") != "value"
    clips = bool(trainer.get("gradient_clip_val")) and by_norm
    is_scaled = str(trainer.get("precision")) in ("16", "16-mixed")
    return is_scaled or clips


def split_offload_suffix(name: str) -> tuple[str, str | float]:
    """Split ``uniform+half`` or ``uniform+0.3`` into the schedule and the amount of offload."""
    base, _, amount = name.partition("+")
    try:
        return base, float(amount)
    except ValueError:
        return base, amount


class GivenPlans:
    """Plans by the costs of a rank that conf/plan.yaml and the command line give.

    Raises:
        ScheduleError: A value cannot be.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config, self._limit = config, config.memory_limit
        if not config.sweep:
            check_limit(self._limit)
        _refuse_arguments_of_a_run(config)
        self.costs = _costs(config)
        self.has_default_copies = str(config.strategy.schedule) in ("auto", "optpipe") and not (
            self.costs.offload or self.costs.reload or config.strategy.offload == "none"
        )
        if self.has_default_copies:
            self.costs = with_copy_ratio(self.costs, 1.0)
        self.units = MEASURED if config.costs_file else Units.of(self.costs)
        self._num_slices = config.get("num_sequence_slices", 1)
        check_positive_integers(num_sequence_slices=self._num_slices)
        self._has_barrier = has_barrier(config)
        self._steps_early = not needs_all_gradients(config)

    def _request(self, options: Sequence[PlanOption], offload: str | float) -> PlanRequest:
        num_ranks = self._config.num_ranks
        return PlanRequest(
            num_ranks,
            options,
            lambda option: _costs_of(option, self.costs, num_ranks),
            self._limit,
            offload,
            has_barrier=lambda option: self._has_barrier,
            steps_early=self._steps_early,
        )

    def _request_for_all(self, offload: str | float) -> PlanRequest:
        """Return the request for all families, for the sizes that are given."""
        config = self._config
        chunks = {} if config.num_chunks is None else {"num_chunks": config.num_chunks}
        sizes = {"num_ranks": config.num_ranks, "num_microbatches": config.num_microbatches}
        check_positive_integers(**sizes, **chunks)
        wanted = options_of(
            "auto",
            [config.num_microbatches],
            config.num_chunks,
            num_sequence_slices=self._num_slices,
        )
        return self._request(wanted, offload)

    def plan(self) -> Answer:
        """Return the plan of ``strategy.schedule``."""
        name = str(self._config.strategy.schedule)
        if name == "auto":
            return self._plan_all_families()
        if name == "optpipe":
            return plan_answer(self._plan_by_solver(), {}, self.units)
        plan = self._named(name, self._config.strategy.offload)
        return self._answer(plan, plan_figures(plan, with_candidates=False))

    def _answer(self, plan: Plan, figures: dict[str, Any], before: Sequence[Part] = ()) -> Answer:
        return plan_answer(
            self._to_planned_step(plan.schedule, plan.costs), figures, self.units, before
        )

    def _plan_all_families(self) -> Answer:
        if self._config.options:
            options = self._config.options
            raise ScheduleError(f"options ({options}) are for one schedule; name that one")
        with progress("Planning all schedules") as show:
            request = self._request_for_all(self._config.strategy.offload)
            plan = make_plan(replace(request, show=show))
        before = about_choice(plan, self.units, _DEFAULT_COPIES * self.has_default_copies)
        return self._answer(plan, plan_figures(plan, with_candidates=True), before)

    def _plan_by_solver(self) -> PlannedStep:
        """Return a solver's plan; it starts from the best of all families."""
        offload = self._config.strategy.offload
        if offload not in ("none", "auto"):
            raise ScheduleError(
                f"schedule=optpipe plans what it offloads by memory_limit; leave out "
                f"offload ({offload})"
            )
        check_slices("optpipe", SCHEDULES["optpipe"], self._num_slices)
        with progress("Planning all schedules") as show:
            best = make_plan(replace(self._request_for_all("auto"), show=show))
        problem = PlanProblem(
            self._config.num_microbatches,
            best.schedule.placement,
            best.costs,
            self._limit,
            self._has_barrier,
        )
        options = mapping(self._config, "options", ("solver_seconds", "plan_cache"))
        with progress("The solver searches"):
            return self._to_planned_step(solve_plan(problem, **options), best.costs)

    def _named(self, name: str, amount: str | float) -> Plan:
        """Return the plan of one schedule, by its name or from a .csv file."""
        sizes = {size: self._config[size] for size in ("num_ranks", "num_microbatches")}
        check_positive_integers(**sizes)
        from_file = name.endswith(".csv")
        name, num_chunks, recipe = self._from_file(name) if from_file else self._family(name)
        options = mapping(self._config, "options")
        for key in options:
            if key in ("num_ranks", "num_microbatches", "num_chunks", "costs", "memory_limit"):
                raise ScheduleError(f"options.{key} is an argument of its own; set {key}")
        # In a comparison slices are for those that have any, as num_chunks are.
        is_whole = self._config.compare and not recipe.can_slice
        num_slices = 1 if is_whole else self._num_slices
        option = PlanOption(
            name, num_chunks, sizes["num_microbatches"], num_sequence_slices=num_slices
        )
        how: Any = {"recipes": {name: recipe}, "builder_options": options}
        return make_plan(replace(self._request([option], amount), **how))

    def _family(self, name: str) -> tuple[str, int, Recipe]:
        check_name(name)
        recipe, wanted = SCHEDULES[name], self._config.num_chunks
        if wanted is None or (self._config.compare and recipe.max_chunks):
            wanted = recipe.num_chunks  # in a comparison num_chunks is for those that take any
        check_positive_integers(num_chunks=wanted)
        return name, wanted, recipe

    def _from_file(self, path: str) -> tuple[str, int, Recipe]:
        if not Path(path).is_file():
            raise ScheduleError(
                f"strategy.schedule ({path}) is no file; Schedule.to_csv writes one"
            )
        schedule = Schedule.from_csv(path)
        recipe = Recipe(lambda *sizes: schedule, 1, None, lambda *sizes: schedule.placement)
        return schedule.name, schedule.num_chunks, recipe

    def _to_planned_step(self, schedule: Schedule, costs: Costs) -> PlannedStep:
        """Return a schedule as it runs, with its figures; REDUCE and STEP where they take time."""
        plan = as_executed(schedule, costs, self._steps_early)
        return PlannedStep(plan, costs, self._has_barrier)

    def compare(self) -> Answer:
        """Return schedules side by side, for the same work of every rank."""
        config = self._config
        if config.strategy.offload != "none":
            raise ScheduleError(
                f"offload ({config.strategy.offload}) is for one schedule; in compare write it "
                f"after a name, as in compare=[uniform,uniform+half]"
            )
        if config.options:
            raise ScheduleError(
                f"options ({config.options}) are for one schedule; leave out compare"
            )
        is_list = isinstance(config.compare, Sequence) and not isinstance(config.compare, str)
        rows: list[dict[str, Any]] = []
        steps: list[PlannedStep] = []
        for name in map(str, config.compare if is_list else [config.compare]):
            base, amount = split_offload_suffix(name)
            try:
                plan = self._named(base, amount or "none")
            except ScheduleError as error:
                rows.append({"schedule": name, "refused": str(error).partition("\n")[0]})
            else:
                steps.append(self._to_planned_step(replace(plan.schedule, name=name), plan.costs))
                rows.append(step_figures(steps[-1]))
        if not steps:
            raise ScheduleError(rows[0]["refused"])
        sizes = {size: config[size] for size in ("num_ranks", "num_microbatches")}
        title = f"{config.num_ranks} ranks, {config.num_microbatches} microbatches"
        about = about_comparison(rows, title, self.units)
        return Answer({**sizes, "compare": rows}, about, steps)

    def sweep(self) -> Answer:
        """Return how long a step takes in how much memory, by family.

        Raises:
            ScheduleError: An argument has no place here, or nothing fits any limit.
        """
        config = self._config
        if config.sweep != "memory_limit":
            raise ScheduleError(f"sweep ({config.sweep}) must be memory_limit")
        if config.strategy.schedule != "auto":
            raise ScheduleError(
                f"sweep plans all families; use schedule=auto, not {config.strategy.schedule}"
            )
        for name in ("compare", "options"):
            if config[name]:
                raise ScheduleError(f"{name} ({config[name]}) has no part in a sweep; leave it out")
        limits = None if self._limit is None else _given_limits(self._limit)
        with progress("Planning all schedules under each limit") as show:
            request = self._request_for_all(config.strategy.offload)
            sweep = _MemorySweep(replace(request, searches_always=True, show=show), limits)
        barrier = f"with{'' if self._has_barrier else 'out'} a barrier between steps"
        sizes = f"{config.num_ranks} ranks, {config.num_microbatches} microbatches, {barrier}"
        title = f"{sizes}; step time over the memory limit{self.units.title_suffix}"
        lines = lines_by_reason((n, r) for n, r in sweep.reasons.items() if not sweep.plans[n])
        notes = [_DEFAULT_COPIES] * self.has_default_copies
        return Answer(sweep.figures(), [*notes, sweep.table(title, self.units), *lines])


class _MemorySweep:
    """All families under several limits; round ones are chosen where ``limits`` is None.

    Each family is planned by itself, for among others only what may be the fastest is planned.
    """

    def __init__(self, request: PlanRequest, limits: Sequence[float] | None) -> None:
        self._request = request
        names = dict.fromkeys(option.schedule for option in request.options)
        self.plans: dict[str, list[Candidate]] = {name: [] for name in names}
        self.reasons = dict.fromkeys(names, "")
        self._plan_all(None)
        if not any(self.plans.values()):
            raise ScheduleError(next(iter(self.reasons.values())))
        self.limits = limits or _round_limits(
            [best_candidate(plans) for plans in self.plans.values()]
        )
        for limit in self.limits:
            self._plan_all(limit)
        if not self._fastest(self.limits[-1]):
            raise ScheduleError(f"memory_limit ({self.limits[-1]:g}) is less than any plan needs")

    def _plan_all(self, limit: float | None) -> None:
        for name in self.plans:
            if limit is not None and not self._may_gain(name, limit):
                continue
            options = [option for option in self._request.options if option.schedule == name]
            try:
                plan = make_plan(replace(self._request, options=options, memory_limit=limit))
            except ScheduleError as error:
                self.reasons[name] = self.reasons[name] or str(error).partition("\n")[0]
            else:
                self.plans[name] += [candidate for candidate in plan.candidates if candidate.fits]

    def _may_gain(self, name: str, limit: float) -> bool:
        """Whether another plan may be found under a limit than is known: a faster one, or any."""
        recipe = FAMILIES[name]
        if recipe.takes_seconds and not recipe.respects_memory_limit:
            return False  # the same search would find the same plan
        best = self._fastest_of_family(name, limit)
        free = min(map(_seconds, self.plans[name]), default=0.0)
        return best is None or _seconds(best) > free * _ROUNDING

    def _fastest_of_family(self, name: str, limit: float) -> Candidate | None:
        """Return a family's fastest plan that keeps a limit."""
        fitting = [plan for plan in self.plans[name] if _memory(plan) <= limit * _ROUNDING]
        return min(fitting, key=_time_and_memory, default=None)

    def _fastest(self, limit: float) -> Candidate | None:
        return best_candidate(
            filter(None, (self._fastest_of_family(name, limit) for name in self.plans))
        )

    def _pareto_plans(self, name: str) -> list[Candidate]:
        """Return a family's plans that none beats: each needs more memory, and takes less time."""
        plans: list[Candidate] = []
        for plan in sorted(self.plans[name], key=lambda plan: _time_and_memory(plan)[::-1]):
            if not plans or _seconds(plan) * _ROUNDING < _seconds(plans[-1]):
                plans.append(plan)
        return plans

    def figures(self) -> dict[str, Any]:
        """Return what JSON says of it."""
        plans_by_name = {
            name: [self._fastest_of_family(name, limit) for limit in self.limits]
            for name in self.plans
        }
        best = [self._fastest(limit) for limit in self.limits]
        return {
            "sweep": "memory_limit",
            "limits": [*self.limits],
            "fastest": [plan and _figures(plan) for plan in best],
            "families": [
                {
                    "schedule": name,
                    "period": [plan and plan.period for plan in plans],
                    "plans": [_figures(plan) for plan in self._pareto_plans(name)],
                    "reason": "" if self.plans[name] else self.reasons[name],
                }
                for name, plans in plans_by_name.items()
            ],
        }

    def table(self, title: str, units: Units) -> Table:
        """Return a row per family and a column per limit, the last rows the fastest of all."""
        heads = (units.format_memory(limit, max(self.limits)) for limit in self.limits)
        table = bare_table(Column("limit", no_wrap=True), *heads, title=title, is_narrow=True)
        best = [self._fastest(limit) for limit in self.limits]
        for name in self.plans:
            plans = [self._fastest_of_family(name, limit) for limit in self.limits]
            table.add_row(name, *map(_cell, plans, best))
        table.add_section()
        table.add_row("fastest", *(_cell(plan, None) for plan in best))
        table.add_row("bubble", *("-" if p is None else share_text(p.bubble or 0.0) for p in best))
        return table


def _given_limits(limits: Any) -> list[float]:
    is_list = isinstance(limits, Sequence) and not isinstance(limits, str)
    if not is_list or not limits or not all(map(_is_limit, limits)):
        raise ScheduleError(
            f"memory_limit ({limits}) must be a list of numbers above 0 in a sweep, as in "
            f"memory_limit=[1,2,4]; without it limits are chosen"
        )
    return sorted({float(limit) for limit in limits})


def _is_limit(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < inf


def _round_limits(best: Iterable[Candidate | None]) -> list[float]:
    """Return round limits up to the largest that makes any family faster."""
    plans = [plan for plan in best if plan is not None]
    fastest = best_candidate(plans)
    assert fastest is not None
    most = max(m for m in map(_memory, plans) if m <= _LARGEST_LIMIT * _memory(fastest))
    if not most:
        raise ScheduleError("no plan needs any memory; set costs.activation above 0")
    power = 10.0 ** floor(log10(most / _NUM_LIMITS))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= most / _NUM_LIMITS)
    return [step * number for number in range(1, ceil(most / step / _ROUNDING) + 1)]


def _memory(plan: Candidate) -> float:
    assert plan.peak_memory is not None
    return plan.peak_memory


def _seconds(plan: Candidate) -> float:
    assert plan.period is not None
    return plan.period


def _time_and_memory(plan: Candidate) -> tuple[float, float]:
    return _seconds(plan), _memory(plan)


def _figures(plan: Candidate) -> dict[str, Any]:
    names = ("offload", "period", "makespan", "bubble", "peak_memory")
    return {**vars(plan.option), **{name: getattr(plan, name) for name in names}}


def _cell(plan: Candidate | None, best: Candidate | None) -> str:
    if plan is None:
        return "-"
    is_best = best is not None and _seconds(plan) <= _seconds(best) * _ROUNDING
    return f"[bold]{_seconds(plan):.4g}[/]" if is_best else f"{_seconds(plan):.4g}"


def _costs_of(option: PlanOption, costs: Costs, num_ranks: int) -> Costs:
    """Return the costs of an option's stages; slices take equal time unless they have sizes."""
    of_stage, num_slices = _costs_of_stage(costs, option.num_chunks), option.num_sequence_slices
    if num_slices == 1 or (costs.slices is not None and costs.slices.sizes):
        return of_stage
    return of_stage.with_balanced_slices(num_ranks * option.num_chunks, num_slices)


def _costs_of_stage(costs: Costs, num_chunks: int) -> Costs:
    """Return the costs of one of a rank's stages, which share the rank's work.

    So schedules with few and with many stages have the same work, and memory has one unit for all
    of them and for the limit: the ``activation`` of a rank. A sequence, one number for each stage,
    stays as it is.
    """
    values = {field.name: getattr(costs, field.name) for field in fields(costs)}
    divided: dict[str, Any] = {
        name: value / num_chunks
        for name, value in values.items()
        if name not in _OF_THE_MACHINE and isinstance(value, (int, float))
    }
    return replace(costs, **divided)


def _costs(config: DictConfig) -> Costs:
    """Return the costs, those of copies by the paper's formula where a layer is described."""
    numbers = {**mapping(config, "costs", _COSTS)}
    if numbers.get("slices") is not None:
        numbers["slices"] = Slices(**mapping(config, "costs.slices", _SLICES))
    costs = Costs(**numbers)
    if config.costs_file is not None:
        costs = _read_costs(str(config.costs_file))
    layer = mapping(config, "layer", _LAYER)
    sizes = [name for name in ("hidden_size", "sequence_length") if layer[name] is not None]
    if not sizes:
        return costs
    if len(sizes) < 2 or costs.offload or costs.reload:
        raise ScheduleError(
            "layer needs both hidden_size and sequence_length, and estimates costs.offload and "
            "costs.reload; give the two sizes, or the two costs"
        )
    return with_copy_ratio(costs, estimated_copy_ratio(**layer))


def _read_costs(path: str) -> Costs:
    try:
        return Costs(**json.loads(Path(path).read_text())["costs"])
    except OSError as error:
        raise ScheduleError(
            f"costs_file ({path}) cannot be read: {error.strerror}; pipeoffload-rehearse writes one"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScheduleError(f"costs_file ({path}) has no costs in it: {error}") from error


def write_costs(path: str, costs: Costs, num_ranks: int, num_stages: int) -> None:
    """Write a rank's mean costs and the largest latency, in seconds and bytes, for ``costs_file``.

    Raises:
        ScheduleError: It cannot be written.
    """
    omitted = (*_OF_THE_MACHINE, *_OF_A_WHOLE_STEP, "slices")
    names = [field.name for field in fields(Costs) if field.name not in omitted]
    mean = {name: sum(costs.per_stage(name, num_stages)) / num_ranks for name in names}
    latency = max(costs.per_stage("communication", num_stages))
    whole = {**mean, "communication": latency, "copy_lanes": costs.copy_lanes}
    try:
        Path(path).write_text(json.dumps({"costs": whole}, indent=1) + "\n")
    except OSError as error:
        raise ScheduleError(f"costs_file ({path}) cannot be written: {error.strerror}") from error


def _refuse_arguments_of_a_run(config: DictConfig) -> None:
    """Refuse arguments of the strategy that mean nothing for costs that are given."""
    for name, value in config.strategy.items():
        if name not in _COUNTING and (name not in _UNSET or value != _UNSET[name]):
            what = _INSTEAD.get(name, "leave it out")
            raise ScheduleError(f"strategy.{name} ({value}) is for runs; here {what}")
