"""Whether this rank's actions take what its plan says, or have not for many steps.

One step in some is looked at, by its medians; where they are off, by those of all steps since the
look before. All of the last looks have to be off, and their medians too: noise is not. Nothing
waits for a device here, nor for other ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import median

from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.timing import TimedStep
from lightning_pipeoffload.schedule import Costs, Kind

STEPS_BETWEEN_LOOKS = 4
NUM_LOOKS = 5
"""Looks that have to be off, one after the other."""

TOLERANCE = 0.1
"""By what share times have to be off."""

_Seconds = Mapping[tuple[Kind, int], float]


class CostWatch:
    """One rank's look at its own steps.

    Args:
        executor: The executor of this rank.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._looks: deque[_Seconds] = deque(maxlen=NUM_LOOKS)
        self._kept: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._last: TimedStep | None = None
        self._planned: _Seconds | None = None
        self._num_left_out = 0

    def start(self, costs: Costs | None, num_stages: int, num_left_out: int = 0) -> None:
        """Watch a plan from now on.

        Args:
            costs: What it was made by, in seconds; None: its first steps are what others are
                compared with.
            num_stages: The stages of all ranks.
            num_left_out: Looks before the first that counts.
        """
        self._planned = None if costs is None else self._times_of(costs, num_stages)
        self._num_left_out = num_left_out
        self._forget()

    def _times_of(self, costs: Costs, num_stages: int) -> _Seconds:
        seconds = costs.compute(num_stages)
        found = {(kind, s): of[s] for kind, of in seconds.items() for s in self._executor.stages}
        fused = {(Kind.BW, s): found[Kind.B, s] + found[Kind.W, s] for s in self._executor.stages}
        return found | fused

    def _forget(self) -> None:
        self._looks.clear()
        self._kept.clear()

    def look(self) -> None:
        """Look at the last step that has ended on the device; called between steps."""
        timer = self._executor.timer
        ended = timer.ended_after(self._last)[-STEPS_BETWEEN_LOOKS:]
        while ended and not timer.clock.has_passed(ended[-1].end):
            ended.pop()
        if not ended:
            return
        self._last = ended[-1]
        if self._num_left_out:
            self._num_left_out -= 1
            return
        if self._planned is None:
            self._learn(timer.seconds_in(ended))
        elif self._is_off(timer.seconds_in(ended[-1:])):
            self._note(timer.seconds_in(ended))
        else:
            self._forget()

    def _learn(self, found: _Seconds) -> None:
        self._looks.append(found)
        if len(self._looks) == NUM_LOOKS:
            self._planned = self._medians()
            self._forget()

    def _note(self, found: _Seconds) -> None:
        if self._is_off(found):
            self._looks.append(found)
            self._measure_memory()
        else:
            self._forget()

    def _measure_memory(self) -> None:
        """See what stages keep now, where they may not keep what they did."""
        for index, stage in self._executor.stages.items():
            if stage.memory.later is not None:
                self._kept[index].append(stage.memory.later)
            stage.memory.measure_later_step()

    @property
    def has_drifted(self) -> bool:
        """Whether the times have been off for long."""
        return (
            self._planned is not None
            and len(self._looks) == NUM_LOOKS
            and self._is_off(self._medians())
        )

    @property
    def times(self) -> tuple[float, float] | None:
        """Seconds of a microbatch by the plan, and as they are; None where they are not off."""
        if self._planned is None or not self._looks:
            return None
        found = self._medians()
        return sum(self._planned.get(key, 0.0) for key in found), sum(found.values())

    def accept(self) -> None:
        """Let memory count as it was in the steps that were off, the most of each stage."""
        for index, kept in self._kept.items():
            self._executor.stages[index].memory.count_as(*map(max, zip(*kept, strict=True)))

    def _medians(self) -> _Seconds:
        keys: Iterable[tuple[Kind, int]] = self._looks[-1]
        return {key: median(look[key] for look in self._looks if key in look) for key in keys}

    def _is_off(self, found: _Seconds) -> bool:
        assert self._planned is not None
        planned = {key: self._planned[key] for key in found if key in self._planned}
        apart = sum(abs(found[key] - seconds) for key, seconds in planned.items())
        return apart > TOLERANCE * sum(planned.values())
