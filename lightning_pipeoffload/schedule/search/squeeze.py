"""Squeeze an order: no rank waits longer than it must, and W fills what would be idle.

The three last steps of a schedule from building blocks (Qi et al., "Pipeline Parallelism with
Controllable Memory", sections 3.2 and appendix A) are one list scheduling here. Squeezed: a visit
starts as soon as its rank is free and its input is there. Reordered: where the next visit of the
order is not ready, another may overtake it, unless the rest of the order would then exceed the
memory. W: when nothing else can run, or memory must be freed. The order that goes in has no circle
and its next visit always fits, so there is never a deadlock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from .building_block import Order, OrderTiming, Visit

__all__ = ["POLICIES", "Policy", "squeeze"]

TOLERANCE = 1e-9


class Policy(NamedTuple):
    """What a rank does when there is a choice.

    Attributes:
        forwards_overtake: Whether F may overtake the order after the warm-up too, which ends with
            the first B of the rank's first chunk.
        forwards_overtake_weights: Whether F may do so while a W is left to run.
        backwards_overtake: Whether B may overtake the order.
        weights_first: Whether W runs right after its B as long as there are forwards.
        keeps_room: Whether the first chunk's F, where it overtakes in the warm-up, leaves room for
            the second chunk: for one F on the first rank, for one more on each next one.
    """

    forwards_overtake: bool = True
    forwards_overtake_weights: bool = True
    backwards_overtake: bool = True
    weights_first: bool = False
    keeps_room: bool = False


POLICIES = (
    Policy(),
    Policy(forwards_overtake=False, backwards_overtake=False, keeps_room=True),
    Policy(forwards_overtake_weights=False),
    Policy(forwards_overtake=False),
    Policy(forwards_overtake=False, weights_first=True),
    Policy(forwards_overtake=False, backwards_overtake=False),
    Policy(keeps_room=True),
    Policy(forwards_overtake_weights=False, keeps_room=True),
    Policy(forwards_overtake=False, keeps_room=True),
    Policy(forwards_overtake=False, weights_first=True, keeps_room=True),
)
"""The most useful first: for equal times hardly any block needs the later ones."""


class _Rank:
    """What a rank has done, and what is left of its order."""

    def __init__(self, order: list[Visit]) -> None:
        self.order = order
        self.steps = sorted({step for step, _ in order})
        self.head = 0
        self.forwards_left = 0
        self.in_flight = 0
        self.live = 0.0
        self.weights: deque[Visit] = deque()
        self.clock = 0.0
        self.idle = 0.0
        self.done: list[Visit] = []


def squeeze(
    order: Order,
    timing: OrderTiming,
    memory: float,
    residue: float = 1.0,
    policy: Policy = POLICIES[0],
) -> Order:
    """Return the order in which the ranks run F, B and W when none waits longer than it must.

    Takes time proportional to the visits, and for those that overtake to how many they overtake.

    Args:
        order: F and B of every rank, in an order without circles.
        timing: What the visits cost.
        memory: The most memory of a rank, in activations; at least what is in flight in ``order``.
        residue: What is alive from the end of B to the end of W, in activations; at most 1.
        policy: What a rank does when there is a choice.
    """
    return _Squeeze(order, timing, memory, 0.0 if timing.is_fused else residue, policy).run()


class _Squeeze:
    """One squeeze: a clock for each rank, and an agenda of when to look at which rank again."""

    def __init__(
        self, order: Order, timing: OrderTiming, memory: float, residue: float, policy: Policy
    ) -> None:
        self._timing, self._policy = timing, policy
        self._memory, self._residue = memory + TOLERANCE, residue
        self._num_stages = timing.num_stages
        self._tolerance = TOLERANCE * max(timing.seconds)
        self._ranks = [_Rank(rank) for rank in order]
        num_steps = 2 * timing.num_stages
        self._places: list[list[int]] = [[] for _ in range(num_steps)]
        self._started = [0] * num_steps
        self._arrivals: list[list[float]] = [[] for _ in range(num_steps)]
        self._agenda = [(0.0, rank) for rank in range(len(order))]
        self._place_visits()

    def _place_visits(self) -> None:
        for rank in self._ranks:
            for place, (step, _) in enumerate(rank.order):
                self._places[step].append(place)
                rank.forwards_left += step < self._num_stages
        self._arrivals[0] = [0.0] * len(self._places[0])

    def run(self) -> Order:
        while self._agenda:
            time, number = heapq.heappop(self._agenda)
            rank = self._ranks[number]
            if rank.clock <= time + self._tolerance:
                chosen = self._choose(rank, time)
                if chosen is not None:
                    self._start(rank, chosen, time)
                    heapq.heappush(self._agenda, (rank.clock, number))
        return [rank.done for rank in self._ranks]

    def _choose(self, rank: _Rank, time: float) -> Visit | None:
        if rank.weights and rank.forwards_left and self._policy.weights_first:
            return rank.weights[0]
        chosen = self._next_of_order(rank, time) or self._overtaking(rank, time)
        if chosen is not None:
            is_full = chosen[0] < self._num_stages and rank.live + 1 > self._memory
            return rank.weights[0] if is_full else chosen
        if rank.weights and not self._should_wait(rank, time):
            return rank.weights[0]
        return None

    def _next_of_order(self, rank: _Rank, time: float) -> Visit | None:
        """Return the first visit of what is left of the order if it may start, as it mostly may."""
        if rank.head == len(rank.order):
            return None
        step, microbatch = visit = rank.order[rank.head]
        fits = step >= self._num_stages or rank.in_flight + 1 <= self._memory
        return visit if fits and self._has_arrived(step, microbatch, time) else None

    def _overtaking(self, rank: _Rank, time: float) -> Visit | None:
        """Return the first other visit of the order that may start."""
        for place in sorted(self._ready(rank, time)):
            if place != rank.head and self._may_start_early(rank, place):
                return rank.order[place]
        return None

    def _ready(self, rank: _Rank, time: float) -> Iterator[int]:
        for step in rank.steps:
            started = self._started[step]
            if self._has_arrived(step, started, time):
                yield self._places[step][started]

    def _has_arrived(self, step: int, microbatch: int, time: float) -> bool:
        arrivals = self._arrivals[step]
        return microbatch < len(arrivals) and arrivals[microbatch] <= time + self._tolerance

    def _may_start_early(self, rank: _Rank, place: int) -> bool:
        if rank.order[place][0] >= self._num_stages:
            return self._policy.backwards_overtake
        if rank.in_flight + 1 > self._memory:
            return False
        return self._may_overtake(rank, place) and self._fits_before(rank, place)

    def _may_overtake(self, rank: _Rank, place: int) -> bool:
        if rank.weights and not self._policy.forwards_overtake_weights:
            return False
        if self._started[rank.steps[-1]]:
            return self._policy.forwards_overtake
        first = rank.steps[0]
        if rank.order[place][0] != first or not self._policy.keeps_room:
            return True
        room = min(first + 1, self._memory // 2)
        return self._started[first] + 1 + room <= self._memory

    def _advance_head(self, rank: _Rank) -> None:
        order = rank.order
        while rank.head < len(order) and self._is_started(order[rank.head]):
            rank.head += 1

    def _is_started(self, visit: Visit) -> bool:
        step, microbatch = visit
        return microbatch < self._started[step]

    def _fits_before(self, rank: _Rank, place: int) -> bool:
        """Whether what the visit overtakes still fits into memory with the visit done before it."""
        in_flight = rank.in_flight + 1
        for visit in rank.order[rank.head : place]:
            if not self._is_started(visit):
                in_flight += 1 if visit[0] < self._num_stages else -1
                if in_flight > self._memory:
                    return False
        return True

    def _should_wait(self, rank: _Rank, time: float) -> bool:
        """Whether to leave W for later, since a B comes before W would be over.

        Only in the cool-down, where W can fill the end, and only on a rank that has been idle less
        than another one: it can afford the wait.
        """
        if rank.forwards_left:
            return False
        gap = self._next_arrival(rank, time) - time
        if gap >= self._timing.seconds[rank.weights[0][0]] - self._tolerance:
            return False
        return rank.idle + gap <= max(other.idle for other in self._ranks) + self._tolerance

    def _next_arrival(self, rank: _Rank, time: float) -> float:
        known = (s for s in rank.steps if self._started[s] < len(self._arrivals[s]))
        arrivals = (self._arrivals[step][self._started[step]] for step in known)
        return min((arrival for arrival in arrivals if arrival > time), default=inf)

    def _start(self, rank: _Rank, chosen: Visit, time: float) -> None:
        step, microbatch = chosen
        if rank.done:
            rank.idle += time - rank.clock
        rank.clock = time + self._timing.seconds[step]
        rank.done.append(chosen)
        self._count(rank, chosen)
        if step < 2 * self._num_stages:
            self._started[step] += 1
            self._advance_head(rank)
            self._announce(step, rank.clock)

    def _count(self, rank: _Rank, chosen: Visit) -> None:
        step, microbatch = chosen
        if step < self._num_stages:
            rank.forwards_left -= 1
            rank.in_flight += 1
            rank.live += 1
        elif step < 2 * self._num_stages:
            rank.in_flight -= 1
            rank.live -= 1 - self._residue
            if not self._timing.is_fused:
                rank.weights.append((step + self._num_stages, microbatch))
        else:
            rank.weights.popleft()
            rank.live -= self._residue

    def _announce(self, step: int, end: float) -> None:
        """Note when the next step's input is there, and look at its rank again by then."""
        if step + 1 < len(self._arrivals):
            arrival = end + self._timing.hops[step]
            self._arrivals[step + 1].append(arrival)
            number = self._timing.ranks[step + 1]
            heapq.heappush(self._agenda, (max(arrival, self._ranks[number].clock), number))
