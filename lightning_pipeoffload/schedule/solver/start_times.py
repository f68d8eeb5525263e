"""When each action of a plan starts, in ticks: the hints of a solver that starts from the plan."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..actions import ACTIVATION, COPIES, Action, Kind, Part
from ..costs import Costs
from ..schedule import Schedule
from ..simulation.simulate import StepSimulation
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
    def of(
        cls, plan: Schedule, costs: Costs, whole: WholeCosts, has_barrier: bool = True
    ) -> StartTimes:
        """Time a plan whose B and W are apart, before it is lowered.

        Without a barrier it is timed in a step among many, when the ranks have settled.
        """
        kinds = _kinds_of_copies(plan)
        moves = COPIES - {Kind.FREE, Kind.FREE_W}
        ticks = {
            action: float(whole.copy(action, kinds[action[1:]]))
            for rank in plan
            for action in rank
            if action.kind in moves
        }
        for_w = {action: _for_w(action, whole) for action in ticks if action.kind is Kind.RELOAD}
        simulation = StepSimulation(plan, _in_ticks(costs, whole), (ticks, for_w))
        ends = [0.0] * plan.num_ranks
        for _ in range(1 if has_barrier else 1 + _STEPS_TO_SETTLE):
            first = min(ends)
            events = simulation.run([end - first for end in ends])
            for event in events:
                if event.lane == COMPUTE_LANE:
                    ends[event.rank] = event.end
        begins = {e.action: round(e.start) for e in events if e.lane == COMPUTE_LANE}
        copies = {e.action: round(e.start) for e in events if e.lane != COMPUTE_LANE}
        return cls(begins, copies, kinds, tuple(map(round, ends)))


def _in_ticks(costs: Costs, whole: WholeCosts) -> Costs:
    return Costs(
        whole.seconds[Kind.F],
        whole.seconds[Kind.B],
        whole.seconds[Kind.W],
        communication=whole.hops,
        copy_lanes=costs.copy_lanes,
        ranks_per_link=costs.ranks_per_link,
    )


def _for_w(reload: Action, whole: WholeCosts) -> float:
    ticks = whole.reload[reload.stage]
    return float(ticks[ACTIVATION] - ticks[Part.FOR_B])


def _kinds_of_copies(plan: Schedule) -> dict[tuple[int, int], frozenset[Kind]]:
    kinds: defaultdict[tuple[int, int], set[Kind]] = defaultdict(set)
    for rank in plan:
        for action in rank:
            kinds[action[1:]] |= {action.kind} & COPIES
    return {place: frozenset(of_place) for place, of_place in kinds.items()}
