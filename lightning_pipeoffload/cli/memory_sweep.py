"""``pipeoffload-plan sweep=memory_limit``: how long a step takes in how much memory, by family."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf, log10
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from lightning_pipeoffload.cli.given_plan import GivenPlans
from lightning_pipeoffload.cli.plan_output import Units, bare_table
from lightning_pipeoffload.planning.figures import lines_by_reason
from lightning_pipeoffload.schedule import ScheduleError
from lightning_pipeoffload.schedule.candidates import Candidate, best_of
from lightning_pipeoffload.schedule.families import FAMILIES
from lightning_pipeoffload.schedule.make_plan import make_plan
from lightning_pipeoffload.schedule.quantities import share_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["MemorySweep", "print_sweep", "sweep_memory_limit"]

# Limits that are not given are round, and about so many.
_MANY = 10
# What needs more than so many times the memory of the fastest plan has no part in choosing them.
_TOO_LARGE = 2.0
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Family:
    """What one family of schedules offers.

    Attributes:
        name: Its name.
        plans: Each needs more memory than the one before, and takes less time.
        reason: Why there are none, or none without a limit; else empty.
    """

    name: str
    plans: Sequence[Candidate]
    reason: str = ""

    @classmethod
    def of(cls, name: str, found: Iterable[Candidate], reason: str) -> Family:
        """Keep of what was found what nothing else is better than."""
        plans: list[Candidate] = []
        for plan in sorted(found, key=lambda one: (_memory(one), _seconds(one))):
            if not plans or _seconds(plan) * _ROUNDING < _seconds(plans[-1]):
                plans.append(plan)
        return cls(name, plans, reason)

    def within(self, limit: float) -> Candidate | None:
        """Return the fastest plan that keeps a limit."""
        kept = [plan for plan in self.plans if _memory(plan) <= limit * _ROUNDING]
        return kept[-1] if kept else None


@dataclass(frozen=True)
class MemorySweep:
    """What all families offer.

    Attributes:
        limits: The limits that plans were made for, rising.
        families: What each offers.
        units: What times and memory are counted in.
        title: What was planned, in words.
    """

    limits: Sequence[float]
    families: Sequence[Family]
    units: Units
    title: str

    def fastest(self, limit: float) -> Candidate | None:
        """Return the fastest plan of all that keeps a limit."""
        return best_of(filter(None, (family.within(limit) for family in self.families)))

    def figures(self) -> dict[str, Any]:
        """Return what JSON says of it."""
        families = [
            {
                "schedule": family.name,
                "period": [_time_of(family.within(limit)) for limit in self.limits],
                "plans": [_figures(plan) for plan in family.plans],
                "reason": "" if family.plans else family.reason,
            }
            for family in self.families
        ]
        best = [self.fastest(limit) for limit in self.limits]
        fastest = [plan and _figures(plan) for plan in best]
        return {
            "sweep": "memory_limit",
            "limits": [*self.limits],
            "fastest": fastest,
            "families": families,
        }

    def table(self) -> Table:
        """Return a row per family and a column per limit, the last row the fastest of all."""
        title = f"{self.title}; step time over the memory limit{self.units.words}"
        heads = map(self.units.write_memory, self.limits)
        table = bare_table(Column("limit", no_wrap=True), *heads, title=title, is_narrow=True)
        best = [self.fastest(limit) for limit in self.limits]
        for family in self.families:
            plans = [family.within(limit) for limit in self.limits]
            table.add_row(family.name, *map(_cell, plans, best))
        table.add_section()
        table.add_row("fastest", *(_cell(plan, None) for plan in best))
        table.add_row("bubble", *("-" if p is None else share_text(p.bubble or 0.0) for p in best))
        return table

    def lines_of_refused(self) -> list[str]:
        """Say why families have no plan at all, those with one reason together."""
        return lines_by_reason((f.name, f.reason) for f in self.families if not f.plans)


def sweep_memory_limit(config: DictConfig, plans: GivenPlans) -> MemorySweep:
    """Plan all families for each of several limits.

    Args:
        config: Conf/plan.yaml with the command line's overrides.
        plans: The plans by the costs that it gives.

    Raises:
        ScheduleError: An argument has no place here, or nothing fits any limit.
    """
    _refuse_what_is_for_one_plan(config)
    given = _given_limits(config)
    search = _Search(plans)
    search.plan_all(None)
    search.refuse_if_nothing_is_found()
    limits = given or _round_limits(search.found.values())
    for limit in limits:
        search.plan_all(limit)
    title = f"{config.num_ranks} ranks, {config.num_microbatches} microbatches, {plans.steps.words}"
    sweep = MemorySweep(limits, search.families(), plans.units, title)
    if not sweep.fastest(limits[-1]):
        raise ScheduleError(f"memory_limit ({limits[-1]:g}) is less than any plan needs")
    return sweep


class _Search:
    """Plans each family by itself, for beside the others only what may be the fastest is planned.

    Attributes:
        found: The plans of each family so far.
    """

    def __init__(self, plans: GivenPlans) -> None:
        self._wanted = plans.all_options()
        self._request = plans.request(self._wanted, searches_always=True)
        names = dict.fromkeys(option.schedule for option in self._wanted)
        self.found: dict[str, list[Candidate]] = {name: [] for name in names}
        self._reasons = dict.fromkeys(names, "")

    def plan_all(self, limit: float | None) -> None:
        """Plan every family under a limit that may change its plan."""
        for name in self.found:
            if limit is None or not _has_one_plan(name):
                self._plan(name, limit)

    def _plan(self, name: str, limit: float | None) -> None:
        own = [option for option in self._wanted if option.schedule == name]
        request = replace(self._request, options=own, memory_limit=limit)
        try:
            plan = make_plan(request)
        except ScheduleError as error:
            self._reasons[name] = self._reasons[name] or str(error).partition("\n")[0]
        else:
            self.found[name] += [candidate for candidate in plan.candidates if candidate.fits]

    def refuse_if_nothing_is_found(self) -> None:
        """Raise what the first family was refused for."""
        if not any(self.found.values()):
            raise ScheduleError(next(iter(self._reasons.values())))

    def families(self) -> list[Family]:
        """Return what each family offers."""
        return [Family.of(name, plans, self._reasons[name]) for name, plans in self.found.items()]


def print_sweep(sweep: MemorySweep, is_json: bool) -> None:
    """Print it as a table or as JSON."""
    if is_json:
        sys.stdout.write(json.dumps(sweep.figures()) + "\n")
        return
    console = Console()
    console.print(sweep.table())
    for line in sweep.lines_of_refused():
        console.out(line, highlight=False)


def _refuse_what_is_for_one_plan(config: DictConfig) -> None:
    if config.sweep != "memory_limit":
        raise ScheduleError(f"sweep ({config.sweep}) must be memory_limit")
    if config.strategy.schedule != "auto":
        raise ScheduleError(
            f"sweep plans all families; use schedule=auto, not {config.strategy.schedule}"
        )
    for name in ("compare", "options"):
        if config[name]:
            raise ScheduleError(f"{name} ({config[name]}) has no part in a sweep; leave it out")


def _given_limits(config: DictConfig) -> list[float]:
    """Return the limits that the user names, rising; none: they are to be chosen."""
    given = config.memory_limit
    if given is None:
        return []
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not given or not all(map(_is_limit, given)):
        raise ScheduleError(
            f"memory_limit ({given}) must be a list of numbers above 0 in a sweep, as in "
            f"memory_limit=[1,2,4]; without it limits are chosen"
        )
    return sorted({float(limit) for limit in given})


def _is_limit(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < inf


def _round_limits(found: Iterable[Iterable[Candidate]]) -> list[float]:
    """Return round limits up to the largest that a family has a use for."""
    best = [plan for plan in map(best_of, found) if plan is not None]
    fastest = best_of(best)
    assert fastest is not None
    most = max(m for m in map(_memory, best) if m <= _TOO_LARGE * _memory(fastest))
    if not most:
        raise ScheduleError("no plan needs any memory; set costs.activation above 0")
    step = _round_step(most / _MANY)
    return [step * number for number in range(1, ceil(most / step / _ROUNDING) + 1)]


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 and so on that is not less."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _has_one_plan(name: str) -> bool:
    """Whether a search for seconds gives the same for any limit."""
    recipe = FAMILIES[name]
    return recipe.takes_seconds and not recipe.heeds_limit


def _memory(plan: Candidate) -> float:
    assert plan.peak_memory is not None
    return plan.peak_memory


def _seconds(plan: Candidate) -> float:
    assert plan.period is not None
    return plan.period


def _time_of(plan: Candidate | None) -> float | None:
    return None if plan is None else plan.period


def _figures(plan: Candidate) -> dict[str, Any]:
    names = ("offload", "period", "makespan", "bubble", "peak_memory")
    return {**vars(plan.option), **{name: getattr(plan, name) for name in names}}


def _cell(plan: Candidate | None, best: Candidate | None) -> str:
    if plan is None:
        return "-"
    is_best = best is not None and _seconds(plan) <= _seconds(best) * _ROUNDING
    return f"[bold]{_seconds(plan):.4g}[/]" if is_best else f"{_seconds(plan):.4g}"
