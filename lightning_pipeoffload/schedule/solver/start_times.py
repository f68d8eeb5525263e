"""When each action of a plan starts, in ticks: what a solver is told of a plan that there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..actions import COMPUTE, COPIES, Action, Kind
from ..costs import Costs
from ..dependencies import outcome, replay
from ..schedule import Schedule
from ..simulation.copy_lanes import SimulatedCopies
from ..timeline import COMPUTE_LANE
from .whole_costs import WholeCosts

__all__ = ["StartTimes"]

_STEPS_TO_SETTLE = 8


@dataclass(frozen=True)
class StartTimes:
    """When a plan does what, in ticks.

    Attributes:
        begins: When each F, B and W starts, and when each copy back takes its memory.
        copies: When each copy starts.
        kinds: The kinds of copies of each stage and microbatch.
        ends: When each rank's last action ends.
    """

    begins: dict[Action, int]
    copies: dict[Action, int]
    kinds: dict[tuple[int, int], frozenset[Kind]]
    ends: tuple[int, ...]

    @property
    def makespan(self) -> int:
        """When the last action ends."""
        return max(self.ends)

    @classmethod
    def steady(cls, plan: Schedule, costs: Costs, whole: WholeCosts) -> StartTimes:
        """Time a plan in a step among many, where no rank waits for all others between two.

        Args:
            plan: The plan, before it is lowered.
            costs: Which copies run at a time.
            whole: What everything takes.
        """
        times = cls.of(plan, costs, whole)
        for _ in range(_STEPS_TO_SETTLE):
            first = min(times.ends)
            times = cls.of(plan, costs, whole, [end - first for end in times.ends])
        return times

    @classmethod
    def of(
        cls, plan: Schedule, costs: Costs, whole: WholeCosts, starts: Sequence[int] = ()
    ) -> StartTimes:
        """Time a plan whose B and W are apart.

        Args:
            plan: The plan, before it is lowered.
            costs: Which copies run at a time.
            whole: What everything takes.
            starts: When each rank may begin; all at once where nothing is said.
        """
        kinds = _kinds_of_copies(plan)
        seconds = {
            action: float(whole.copy(action, kinds[action[1:]]))
            for rank in plan
            for action in rank
            if action.kind in COPIES and action.kind not in (Kind.FREE, Kind.FREE_W)
        }
        # A solver's B waits for all of a RELOAD.
        lanes = SimulatedCopies(plan.num_ranks, costs, seconds, {})
        begins: dict[Action, int] = {}
        copies: dict[Action, int] = {}
        ended: dict[Action, int] = {}
        clocks = list(starts) or [0] * plan.num_ranks
        for rank, action, awaited in replay(plan):
            start = clocks[rank]
            if awaited is not None:
                start = max(start, ended[awaited] + _hop(plan, awaited, rank, whole))
            start = round(lanes.wait(action, start))
            for event in lanes.start(rank, action, start):
                times = begins if event.lane == COMPUTE_LANE else copies
                times[action] = round(event.start)
            end = start
            if action.kind in COMPUTE:
                begins[action] = start
                end += whole.seconds[action.kind][action.stage]
            clocks[rank] = ended[outcome(action)] = end
        return cls(begins, copies, kinds, tuple(clocks))


def _kinds_of_copies(plan: Schedule) -> dict[tuple[int, int], frozenset[Kind]]:
    kinds: defaultdict[tuple[int, int], set[Kind]] = defaultdict(set)
    for rank in plan:
        for action in rank:
            kinds[action[1:]] |= {action.kind} & COPIES
    return {place: frozenset(of_place) for place, of_place in kinds.items()}


def _hop(plan: Schedule, awaited: Action, rank: int, whole: WholeCosts) -> int:
    if plan.rank_of(awaited.stage) == rank:
        return 0
    return whole.hops[awaited.stage if awaited.kind is Kind.F else awaited.stage - 1]
