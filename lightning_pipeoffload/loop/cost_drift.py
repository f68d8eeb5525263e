"""Steps that have come to take another time than their plan says, as all ranks agree on it.

Nobody waits for it: after a batch in some each rank starts to count who is off, and reads that
before a later step, when a whole batch has taken every rank since::

    every rank   end of batch 20: counts    end of batch 21    before 22: reads 20's count

Only where a rank is off they meet, between two steps, tell each other, and plan anew.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

from lightning_pipeoffload.planning.cost_watch import NUM_LOOKS, STEPS_BETWEEN_LOOKS, CostWatch
from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.schedule import Costs

log = logging.getLogger(__name__)

_SLOWER = 1.1  # than its plan, and than half of the others are

_SLOW = (
    "global rank %d on host %s is slower than its plan: a microbatch takes it %.2f ms where %.2f "
    "ms are planned, %.0f%% more, and others are not as late; see whether its device is throttled "
    "or shared"
)


class _Times(NamedTuple):
    """What a microbatch takes a rank, in seconds."""

    global_rank: int
    host: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.planned if self.planned else 1.0


class CostDrift:
    """One rank's part in finding it out.

    Args:
        group: The run's processes.
        executor: The executor of this rank.
    """

    def __init__(self, group: PipelineGroup, executor: Executor) -> None:
        self._group = group
        self._watch = CostWatch(executor)
        self._num_batches = 0
        self._vote: tuple[int, Callable[[], int]] | None = None
        self._num_left_out = 0
        self._named: set[int] = set()

    def start(self, costs: Costs | None, num_stages: int) -> None:
        """Watch the plan that is in use from now on.

        Args:
            costs: What it was made by, in seconds; None: no measured costs.
            num_stages: The stages of all ranks.
        """
        self._watch.start(costs, num_stages, self._num_left_out)

    def before_step(self) -> bool:
        """Look at this rank's last step; return whether any rank is off, on all of them alike."""
        if self._num_batches % STEPS_BETWEEN_LOOKS == 0:
            self._watch.look()
        if self._vote is None or self._vote[0] >= self._num_batches:
            return False
        (_, count), self._vote = self._vote, None
        return count() > 0

    def end_batch(self) -> None:
        """Vote, now and then; called at the end of each batch of training."""
        self._num_batches += 1
        if self._num_batches % STEPS_BETWEEN_LOOKS == 0 and self._vote is None:
            counting = self._group.world.start_counting(self._watch.has_drifted)
            self._vote = self._num_batches, counting

    def leave(self) -> None:
        """Forget a vote that nobody will count."""
        self._vote, self._num_batches = None, 0

    def settle(self, changes: bool) -> None:
        """Let what is measured now count, and look less often where it has changed nothing.

        Args:
            changes: Whether another plan runs from now on.
        """
        self._num_left_out = 0 if changes else 2 * self._num_left_out + NUM_LOOKS

    def name_slower(self) -> None:
        """Name ranks that stand out, each once; all ranks call it, and wait for each other."""
        self._watch.accept()
        found = self._group.world.gather(self._times())
        # A rank that has no such times is on time.
        usual = median_low([1.0 if times is None else times.ratio for times in found])
        for times in filter(None, found):
            is_slow = times.ratio > _SLOWER * max(1.0, usual)
            if is_slow and times.global_rank not in self._named:
                self._named.add(times.global_rank)
                if self._group.reports:
                    log.warning(_SLOW, *_words(times))

    def _times(self) -> _Times | None:
        times = self._watch.times
        if times is None:
            return None
        return _Times(self._group.global_rank, platform.node(), *times)


def _words(times: _Times) -> tuple[int, str, float, float, float]:
    milliseconds = 1e3 * times.measured, 1e3 * times.planned
    return times.global_rank, times.host, *milliseconds, 100 * (times.ratio - 1)
