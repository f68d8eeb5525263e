"""The figures of a plan, by the names that reports and comparisons give them."""

from __future__ import annotations

from typing import Any

from lightning_pipeoffload.schedule import Schedule, Timeline
from lightning_pipeoffload.schedule.messages import send_after

__all__ = ["figures", "messages_sent"]


def figures(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a plan by their names in ``Schedule`` and ``Timeline``.

    ``messages`` is how many activations and gradients each rank sends in a step.
    """
    sizes = ("num_ranks", "num_chunks", "num_microbatches")
    totals = ("makespan", "bubble", "bubble_unsynchronized", "peak_memory", "peak_host_memory")
    return {
        "schedule": schedule.name,
        **{name: getattr(schedule, name) for name in sizes},
        **{name: getattr(timeline, name) for name in totals},
        "messages": messages_sent(schedule),
    }


def messages_sent(schedule: Schedule) -> tuple[int, ...]:
    """Return how many messages each rank sends in a step, from a schedule of compute actions."""
    return tuple(
        sum(send_after(schedule, action) is not None for action in rank) for rank in schedule
    )
