"""How far every rank of a pipeline is while a schedule is being made, action by action."""

from __future__ import annotations

from collections import deque
from math import inf

from ..actions import Action, Kind
from .problem import ROUNDING, Problem

__all__ = ["Progress"]


class Progress:
    """How far every rank is, and what it has used up.

    Attributes:
        problem: What is scheduled.
        forward_ready: When each microbatch that has arrived can start F, for every stage.
        backward_ready: The same for B.
        num_forward: How many F every stage has started; the next one's microbatch.
        num_backward: The same for B.
        pending: B without W of every rank, as stage and microbatch, oldest first.
        free: When every rank has ended what it runs.
        memory: What every rank holds.
        idle: Seconds that every rank has waited since its first F.
        actions: What every rank has run.
    """

    def __init__(self, problem: Problem) -> None:
        ranks, stages = range(problem.num_ranks), range(problem.num_stages)
        self.problem = problem
        self.forward_ready: list[list[float]] = [[] for _ in stages]
        self.forward_ready[0] = [0.0] * problem.num_microbatches
        self.backward_ready: list[list[float]] = [[] for _ in stages]
        self.num_forward = [0 for _ in stages]
        self.num_backward = [0 for _ in stages]
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.memory = [0.0 for _ in ranks]
        self.idle = [0.0 for _ in ranks]
        self.actions: list[list[Action]] = [[] for _ in ranks]

    def next_forward(self, stage: int) -> float:
        """Return when the next F of a stage can start; ``inf`` if that is not known."""
        ready, index = self.forward_ready[stage], self.num_forward[stage]
        return ready[index] if index < len(ready) else inf

    def next_backward(self, stage: int) -> float:
        """Return when the next B of a stage can start; ``inf`` if that is not known."""
        ready, index = self.backward_ready[stage], self.num_backward[stage]
        return ready[index] if index < len(ready) else inf

    def has_room(self, rank: int, memory: float) -> bool:
        """Whether a rank can hold this much more."""
        return self.memory[rank] + memory <= self.problem.memory_limit * (1 + ROUNDING)

    def run(self, rank: int, kind: Kind, stage: int, now: float) -> tuple[int, float] | None:
        """Run F or B, and return the rank that can go on by it and when, if there is one."""
        problem = self.problem
        forward = kind is Kind.F
        counts = self.num_forward if forward else self.num_backward
        # A stage takes its microbatches in order.
        microbatch = counts[stage]
        counts[stage] += 1
        seconds = (problem.forward if forward else problem.backward_input)[stage]
        self.memory[rank] += (problem.activation if forward else problem.growth)[stage]
        if not forward:
            self.pending[rank].append((stage, microbatch))
        self._occupy(rank, Action(kind, stage, microbatch), now, seconds)
        return self._hand_on(forward, stage, now + seconds)

    def run_weight(self, rank: int, now: float) -> None:
        """Run the oldest W of a rank."""
        stage, microbatch = self.pending[rank].popleft()
        self.memory[rank] -= self.problem.residue[stage]
        seconds = self.problem.backward_weight[stage]
        self._occupy(rank, Action(Kind.W, stage, microbatch), now, seconds)

    def _occupy(self, rank: int, action: Action, now: float, seconds: float) -> None:
        if self.actions[rank]:
            self.idle[rank] += now - self.free[rank]
        self.actions[rank].append(action)
        self.free[rank] = now + seconds

    def _hand_on(self, forward: bool, stage: int, end: float) -> tuple[int, float] | None:
        last = stage == self.problem.num_stages - 1
        if forward and last:
            self.backward_ready[stage].append(end)
            return None
        to = stage + 1 if forward else stage - 1
        if to < 0:
            return None
        # A hop goes by the stage before it, whichever way the message travels.
        arrival = end + self.problem.hop[min(stage, to)]
        (self.forward_ready if forward else self.backward_ready)[to].append(arrival)
        return self.problem.placement[to], arrival
