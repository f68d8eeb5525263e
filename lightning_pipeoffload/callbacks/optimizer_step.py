"""What one rank measures of an optimizer step, read when its clock has gone past it."""

from __future__ import annotations

from typing import Any

from lightning_pipeoffload.runtime.timing import ActionTimer, TimedStep

__all__ = ["OptimizerStep"]


class OptimizerStep:
    """The plans that ran from one step's first batch to the next one's.

    Args:
        number: The steps that are done when it is.
        is_logged: Whether its figures are wanted.

    Attributes:
        plans: What was measured of each batch that accumulates.
        breaks: Moments between which the ranks did what is no part of a step, such as validation.
        figures: What is known by its end: numbers, or tensors that may still be computed.
        has_period: Whether all between its start and the next one's is its own, but for breaks.
    """

    def __init__(self, number: int, is_logged: bool) -> None:
        self.number = number
        self.is_logged = is_logged
        self.plans: list[TimedStep] = []
        self.breaks: list[tuple[Any, Any]] = []
        self.figures: dict[str, Any] = {}
        self.has_period = True
        self._following: TimedStep | None = None

    def add(self, name: str, number: Any) -> None:
        """Add to one of its figures."""
        self.figures[name] = self.figures.get(name, 0) + number

    def follow_with(self, plan: TimedStep) -> None:
        """Let the period end where the next step's first plan has started."""
        self._following = plan

    def has_passed(self, timer: ActionTimer) -> bool:
        """Whether its moments can be read without waiting."""
        last = self.plans[-1].end if self._following is None else self._following.start
        return timer.clock.has_passed(last)

    def read(self, timer: ActionTimer) -> dict[str, Any]:
        """Return all of its figures; those of the period only where that is known."""
        seconds = timer.clock.seconds
        found = {"step_seconds": sum(seconds(plan.start, plan.end) for plan in self.plans)}
        if self._following is not None and self.has_period:
            period = seconds(self.plans[0].start, self._following.start)
            period -= sum(seconds(start, end) for start, end in self.breaks)
            busy = sum(map(timer.busy_seconds, self.plans))
            found |= {"period_seconds": period, "bubble": 1 - busy / period}
        return self.figures | found
