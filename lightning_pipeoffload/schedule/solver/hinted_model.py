"""A CP-SAT model each of whose variables has a hint, so that the solver starts from a plan.

OR-tools is an extra: it is imported where a plan is solved, and nowhere else.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..actions import ScheduleError

__all__ = ["Hinted", "HintedModel", "check_solver", "cp_model"]


def check_solver() -> None:
    """Check that there is a solver, without loading it.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    if find_spec("ortools") is None:
        raise ScheduleError(
            "schedule=optpipe needs OR-tools, which is not installed; run: "
            "pip install 'lightning-pipeoffload[solver]', or use schedule=auto"
        )


@cache
def cp_model() -> Any:
    """Return the module in which models are written.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    check_solver()
    from ortools.sat.python import cp_model as module  # noqa: PLC0415 - an extra

    return module


class Hinted(NamedTuple):
    """A number of the model, and what it is in the plan to start from.

    Attributes:
        now: The variable, or a sum of one and a number.
        hint: Its value in that plan.
    """

    now: Any
    hint: int

    def plus(self, number: int) -> Hinted:
        """Return the sum with a number."""
        return Hinted(self.now + number, self.hint + number)


class HintedModel:
    """Variables with hints, and the intervals that they make.

    Args:
        horizon: The largest number there is.

    Attributes:
        model: The model itself.
        horizon: The same.
    """

    def __init__(self, horizon: int) -> None:
        self.model = cp_model().CpModel()
        self.horizon = horizon

    def number(self, hint: int, low: int = 0) -> Hinted:
        """Add a whole number from ``low`` on.

        Args:
            hint: What it is in the plan to start from.
            low: The least that it is.
        """
        hint = max(low, min(hint, self.horizon))
        variable = self.model.new_int_var(low, self.horizon, "")
        self.model.add_hint(variable, hint)
        return Hinted(variable, hint)

    def flag(self, hint: bool) -> Hinted:
        """Add what is so or not."""
        variable = self.model.new_bool_var("")
        self.model.add_hint(variable, hint)
        return Hinted(variable, int(hint))

    def both(self, one: Hinted, other: Hinted) -> Hinted:
        """Add a flag that says whether two others are up."""
        flag = self.flag(bool(one.hint and other.hint))
        self.model.add_bool_and([one.now, other.now]).only_enforce_if(flag.now)
        self.model.add_bool_or([flag.now, one.now.Not(), other.now.Not()])
        return flag

    def but_not(self, one: Hinted, other: Hinted) -> Hinted:
        """Add a flag that says whether the first of two is up, and the second is not."""
        return self.both(one, Hinted(other.now.Not(), 1 - other.hint))

    def either(self, one: Hinted, other: Hinted) -> Hinted:
        """Add a flag that says whether one of two is up."""
        flag = self.flag(bool(one.hint or other.hint))
        self.model.add_implication(one.now, flag.now)
        self.model.add_implication(other.now, flag.now)
        self.model.add_bool_or([flag.now.Not(), one.now, other.now])
        return flag

    def where(self, flag: Hinted, this: Hinted, that: Hinted) -> Hinted:
        """Add a number that is one of two, by a flag."""
        chosen = self.number(this.hint if flag.hint else that.hint)
        self.model.add(chosen.now == this.now).only_enforce_if(flag.now)
        self.model.add(chosen.now == that.now).only_enforce_if(flag.now.Not())
        return chosen

    def after(self, later: Hinted, earlier: Hinted, flag: Hinted | None = None) -> None:
        """Let a number be no less than another, always or where a flag is up."""
        rule = self.model.add(later.now >= earlier.now)
        if flag is not None:
            rule.only_enforce_if(flag.now)

    def work(self, start: Hinted, size: int, flag: Hinted | None = None) -> Any:
        """Return the interval of a fixed size from a start on."""
        if flag is None:
            return self.model.new_fixed_size_interval_var(start.now, size, "")
        return self.model.new_optional_fixed_size_interval_var(start.now, size, flag.now, "")

    def stay(self, start: Hinted, end: Hinted, flag: Hinted | None = None) -> Any:
        """Return the interval from a start to an end."""
        is_hinted = flag is None or flag.hint
        size = self.number(end.hint - start.hint if is_hinted else 0)
        if flag is None:
            return self.model.new_interval_var(start.now, size.now, end.now, "")
        return self.model.new_optional_interval_var(start.now, size.now, end.now, flag.now, "")
