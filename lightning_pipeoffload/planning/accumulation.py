"""Batches whose gradients add up, run by one plan that does not empty the pipeline in between.

Lightning goes through its loop for each of them: hooks, ``self.log``, the next batch from the
loader. So a batch's call runs its forwards, which give its loss, and leaves backwards that the plan
has later to the next call; the last call runs all that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pipeoffload.runtime.executor import BeforeBackward, Executor
from lightning_pipeoffload.runtime.step.batch_slice import Microbatch
from lightning_pipeoffload.schedule import (
    Costs,
    JoinedPlan,
    Kind,
    Schedule,
    ScheduleError,
    cut_at_batches,
    lower,
    peak_memory,
    repeat_batch,
    simulate,
)

# Longer plans gain little, and take seconds to make.
_MOST_MICROBATCHES = 256
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Accumulation:
    """Where a batch is among those whose gradients add up.

    Attributes:
        num_batches: Batches that add up to one optimizer step.
        is_first: Whether gradients are set to zero before its backward.
        is_last: Whether the optimizer steps after it.
        watched_by: Hooks of the user that may look at gradients in between.
    """

    num_batches: int = 1
    is_first: bool = True
    is_last: bool = True
    watched_by: tuple[str, ...] = ()


def join_batches(
    make_schedule: Callable[[int], Schedule], single: Schedule, num_batches: int, costs: Costs
) -> JoinedPlan | None:
    """Make one plan over several batches, if it takes less time and no more memory.

    Args:
        make_schedule: Builds the schedule for a number of microbatches.
        single: The schedule of one batch.
        num_batches: Batches that are wanted in one plan.
        costs: The costs of the stages.

    Returns:
        The plan; None if batches with a plan each do as well, or the schedule is of a fixed size.
    """
    size = single.num_microbatches
    count = min(num_batches, _MOST_MICROBATCHES // size)
    if count < 2:
        return None
    try:
        joined = cut_at_batches(make_schedule(count * size), size)
    except ScheduleError:
        return None
    apart = lower(repeat_batch(single, count))
    saves_time = simulate(joined.plan, costs).makespan * _ROUNDING < simulate(apart, costs).makespan
    keeps_more = max(peak_memory(joined.plan, costs)) > max(peak_memory(apart, costs)) * _ROUNDING
    return joined if saves_time and not keeps_more else None


class JoinedRun:
    """One rank's run of a joined plan, batch by batch.

    Args:
        joined: The plan.
        size: Microbatches of a full batch.
        executor: The executor of the rank.
    """

    def __init__(self, joined: JoinedPlan, size: int, executor: Executor) -> None:
        self._actions = joined.plan[executor.rank]
        self._ends = joined.ends[executor.rank]
        self._size = size
        self._executor = executor
        self._there: set[int] = set()
        self._num_batches = self._place = 0
        executor.begin(joined.plan, [ends[0] for ends in joined.ends])

    @property
    def is_full(self) -> bool:
        """Whether the plan has no more batches."""
        return self._num_batches == len(self._ends)

    @property
    def num_microbatches_before(self) -> int:
        """Places before those of the next batch, by which the plan names microbatches."""
        return self._num_batches * self._size

    def run(self, microbatches: Sequence[Microbatch], before_backward: BeforeBackward) -> list[Any]:
        """Run all forwards of the next batch, and what else the plan has until then.

        Args:
            microbatches: The microbatches of the batch; those that it lacks drop out of the plan.
            before_backward: Called once, before the first backward if there is one, with what
                steps have returned by then.

        Returns:
            What the user's step returned for each microbatch; empty without the last stage.
        """
        self._there.update(microbatch.index for microbatch in microbatches)
        end = self._ends[self._num_batches]
        self._num_batches += 1
        pending = [before_backward]

        def once(results: list[Any]) -> None:
            pending.pop()(results)

        results = self._executor.go_on(self._take(end), microbatches, once)
        # The plan has no backward yet, but the batch has its hooks around one.
        if pending:
            once(results)
        return results

    def finish(self) -> None:
        """Run what is left of the batches that there were."""
        self._executor.go_on(self._take(len(self._actions)), [])
        self._executor.end()

    def _take(self, end: int) -> list[Any]:
        start, self._place = self._place, end
        # REDUCE is of all microbatches, the missing one that it is named after or not.
        actions = self._actions[start:end]
        return [a for a in actions if a.kind is Kind.REDUCE or a.microbatch in self._there]
