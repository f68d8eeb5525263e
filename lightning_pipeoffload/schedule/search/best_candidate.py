"""The best of several candidates, as far as a budget of work goes."""

from __future__ import annotations

from math import inf

from ..schedule import Schedule
from .list_schedule import Filled, OrderRule, fill_gaps, fill_rounds
from .order_rules import FixedOrder
from .problem import ROUNDING, Problem

__all__ = ["Search"]


class Search:
    """Candidates for a schedule of one problem; each is timed until it is longer than the best.

    Attributes:
        best: The schedule with the shortest longest span so far.
        longest_span: Its seconds.
    """

    def __init__(self, problem: Problem, num_actions: int) -> None:
        """Start without a candidate.

        Args:
            problem: The pipeline.
            num_actions: How many actions all candidates after the first complete one may place.
        """
        self.best: Schedule | None = None
        self.longest_span = inf
        self._problem = problem
        self._num_actions_left = num_actions

    def consider(self, order: OrderRule, patience: float | None) -> None:
        """Complete an order of F and B, and keep it if it is shorter than all before.

        Args:
            order: The order.
            patience: Seconds, as for ``fill_gaps``.
        """
        if self.best and (self._num_actions_left <= 0 or self.has_no_bubble):
            return
        self._keep(fill_gaps(self._problem, order, patience, self.longest_span))

    def consider_rounds(self, order: FixedOrder, is_patient_before_b: bool) -> None:
        """Complete an order round by round, and keep it if it is shorter than all before.

        Whatever is left of the work, for it is little.

        Args:
            order: The order, without leave to overtake.
            is_patient_before_b: As for ``fill_rounds``.
        """
        if not self.has_no_bubble:
            limit = self.longest_span
            self._keep(fill_rounds(self._problem, order, is_patient_before_b, limit))

    def _keep(self, filled: Filled) -> None:
        self._num_actions_left -= filled.num_actions
        if filled.schedule:
            self.best, self.longest_span = filled.schedule, filled.longest_span

    @property
    def has_no_bubble(self) -> bool:
        """Whether the best takes no longer than some rank's work, so that nothing is shorter."""
        return self.longest_span <= max(self._problem.work) * (1 + ROUNDING)

    def shortest(self) -> Schedule:
        """Return the best schedule.

        Raises:
            RuntimeError: No candidate fits the memory.
        """
        if self.best is None:
            raise RuntimeError(
                "no candidate fits the memory limit; one that always fits is missing"
            )
        return self.best
