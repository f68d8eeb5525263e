"""A schedule as ``pipeoffload-plan`` has timed it: one step, and steps one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_pipeoffload.cli.border_options import BorderOptions
from lightning_pipeoffload.cli.units import Units
from lightning_pipeoffload.pictures.picture_file import Drawn
from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    Timeline,
    period_bubble,
    simulate,
    simulate_steps,
    steady_period,
)
from lightning_pipeoffload.schedule.messages import send_after
from lightning_pipeoffload.schedule.quantities import share_text

__all__ = ["PlannedSteps", "messages_sent"]


@dataclass(frozen=True)
class PlannedSteps:
    """What is planned, and what follows from it.

    Attributes:
        schedule: The schedule of a step.
        costs: The costs of its stages.
        border: What stands between two steps.
    """

    schedule: Schedule
    costs: Costs
    border: BorderOptions

    @cached_property
    def timeline(self) -> Timeline:
        """One step alone."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def period(self) -> float:
        """The time from one step to the next."""
        return steady_period(self.schedule, self.costs, self.border.has_barrier)

    @property
    def period_bubble(self) -> float:
        """The idle share of the period."""
        return period_bubble(self.timeline, self.period)

    @property
    def sizes(self) -> str:
        """The name and the sizes of the schedule, in words."""
        schedule = self.schedule
        stages = "1 stage" if schedule.num_chunks == 1 else f"{schedule.num_chunks} stages"
        return (
            f"{schedule.name}: {schedule.num_ranks} ranks of {stages}, "
            f"{schedule.num_microbatches} microbatches"
        )

    def figures(self) -> dict[str, Any]:
        """Return the figures of the plan by their names in ``Schedule`` and ``Timeline``.

        ``period`` is from one step to the next, ``messages`` how many activations and gradients
        each rank sends in a step.
        """
        sizes = ("num_ranks", "num_chunks", "num_microbatches")
        totals = ("makespan", "bubble", "bubble_unsynchronized", "peak_memory", "peak_host_memory")
        return {
            "schedule": self.schedule.name,
            **{name: getattr(self.schedule, name) for name in sizes},
            **{name: getattr(self.timeline, name) for name in totals},
            "has_barrier": self.border.has_barrier,
            "period": self.period,
            "period_bubble": self.period_bubble,
            "messages": messages_sent(self.schedule),
        }

    def drawn(self, units: Units) -> Drawn:
        """Return what a picture shows, with a line above it.

        Args:
            units: What time is counted in.
        """
        title = (
            f"{self.sizes}; a step every {units.sentence(self.period)} {self.border.words}, bubble "
            f"{share_text(self.period_bubble)}"
        )
        how = self.border.num_drawn, self.border.has_barrier
        return Drawn(simulate_steps(self.schedule, self.costs, *how), self.costs, title)


def messages_sent(schedule: Schedule) -> tuple[int, ...]:
    """Return how many messages each rank sends in a step, from a schedule of compute actions."""
    return tuple(
        sum(send_after(schedule, action) is not None for action in rank) for rank in schedule
    )
