"""Squeeze an order: no rank waits longer than it must, and W fills what would be idle.

The three last steps of a schedule from building blocks (Qi et al., "Pipeline Parallelism with
Controllable Memory", sections 3.2 and appendix A) are one list scheduling here. Squeezed: F or B
starts as soon as its rank is free and its input is there. Reordered: where the next one of the
order is not ready, another may overtake it, unless the rest of the order would then exceed the
memory. W: when nothing else can run, or memory must be freed. The order that goes in has no circle
and what is next in it always fits, so there is never a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from .list_schedule import ListScheduler
from .problem import Operations, Order, Pass

TOLERANCE = 1e-9


class Policy(NamedTuple):
    """The choices of a rank.

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


def squeeze(
    order: Order,
    operations: Operations,
    memory: float,
    residue: float = 1.0,
    policy: Policy = POLICIES[0],
) -> Order:
    """Return the order in which the ranks run F, B and W when none waits longer than it must.

    Takes time proportional to the passes, and for those that overtake to how many they overtake.

    Args:
        order: F and B of every rank, in an order without circles.
        operations: Their seconds.
        memory: The most memory of a rank, in activations; at least what is in flight in ``order``.
        residue: Memory from the end of B to the end of W, in activations; at most 1.
        policy: The choices of a rank.
    """
    squeezed = _Squeeze(order, operations, memory, residue, policy)
    squeezed.run()
    return squeezed.done


class _Rank:
    """The rest of a rank's order, and its activations in flight."""

    def __init__(self, order: list[Pass], num_stages: int) -> None:
        self.order = order
        self.operations = sorted({operation for operation, _ in order})
        self.head = 0
        self.forwards_left = sum(operation < num_stages for operation, _ in order)
        self.in_flight = 0


class _Squeeze(ListScheduler):
    """Keeps to the order of a building block; memory is in activations."""

    def __init__(
        self, order: Order, operations: Operations, memory: float, residue: float, policy: Policy
    ) -> None:
        count = operations.num_stages
        residue = 0.0 if operations.is_fused else residue
        growth = [*[1.0] * count, *[residue - 1] * count, *[-residue] * count]
        super().__init__(operations, sum(n == 0 for n, _ in order[0]), growth)
        self._policy, self._limit = policy, memory + TOLERANCE
        self._tolerance = TOLERANCE * max(operations.seconds)
        self._left = [_Rank(rank, count) for rank in order]
        self._places: list[list[int]] = [[] for _ in range(2 * count)]
        for rank in order:
            for place, (operation, _) in enumerate(rank):
                self._places[operation].append(place)

    def start_next(self, rank: int, key: float) -> None:
        if self.clock[rank] > key + self._tolerance:
            return
        left = self._left[rank]
        chosen = self._choose(rank, left, key)
        if chosen is None:
            return
        if chosen < 0:
            self.start_weight_grad(rank, key)
        else:
            forward = chosen < self._num_stages
            left.forwards_left -= forward
            left.in_flight += 1 if forward else -1
            self.start(rank, chosen, key)
            while left.head < len(left.order) and self._is_started(left.order[left.head]):
                left.head += 1
        self.requeue(rank)

    def _choose(self, rank: int, left: _Rank, time: float) -> int | None:
        """Return the operation to start; -1: W; None: wait."""
        pending = self.pending[rank]
        if pending and left.forwards_left and self._policy.weights_first:
            return -1
        chosen = self._next_of_order(left, time)
        if chosen is None:
            chosen = self._overtaking(rank, left, time)
        if chosen is not None:
            is_full = chosen < self._num_stages and self.memory[rank] + 1 > self._limit
            return -1 if is_full else chosen
        return -1 if pending and not self._should_wait(rank, left, time) else None

    def _next_of_order(self, left: _Rank, time: float) -> int | None:
        """Return what is first in what is left of the order if it may start, as it mostly may."""
        if left.head == len(left.order):
            return None
        operation, microbatch = left.order[left.head]
        if operation < self._num_stages and left.in_flight + 1 > self._limit:
            return None
        arrivals = self.arrivals[operation]
        is_there = microbatch < len(arrivals) and arrivals[microbatch] <= time + self._tolerance
        return operation if is_there else None

    def _overtaking(self, rank: int, left: _Rank, time: float) -> int | None:
        """Return the first of the rest of the order that may start."""
        for place in sorted(self._ready_places(left, time)):
            if place != left.head and self._may_start_early(rank, left, place):
                return left.order[place][0]
        return None

    def _ready_places(self, left: _Rank, time: float) -> Iterator[int]:
        latest = time + self._tolerance
        for operation in left.operations:
            arrivals, started = self.arrivals[operation], self.num_started[operation]
            if started < len(arrivals) and arrivals[started] <= latest:
                yield self._places[operation][started]

    def _is_started(self, one: Pass) -> bool:
        operation, microbatch = one
        return microbatch < self.num_started[operation]

    def _may_start_early(self, rank: int, left: _Rank, place: int) -> bool:
        operation, _ = left.order[place]
        if operation >= self._num_stages:
            return self._policy.backwards_overtake
        if left.in_flight + 1 > self._limit:
            return False
        return self._may_overtake(rank, left, operation) and self._fits_before(left, place)

    def _may_overtake(self, rank: int, left: _Rank, operation: int) -> bool:
        if self.pending[rank] and not self._policy.forwards_overtake_weights:
            return False
        first, *_, last = left.operations
        if self.num_started[last]:
            return self._policy.forwards_overtake
        if operation != first or not self._policy.keeps_room:
            return True
        room = min(first + 1, self._limit // 2)
        return self.num_started[first] + 1 + room <= self._limit

    def _fits_before(self, left: _Rank, place: int) -> bool:
        """Whether what F overtakes still fits into memory with that F done before it."""
        in_flight = left.in_flight + 1
        for one in left.order[left.head : place]:
            if not self._is_started(one):
                in_flight += 1 if one[0] < self._num_stages else -1
                if in_flight > self._limit:
                    return False
        return True

    def _should_wait(self, rank: int, left: _Rank, time: float) -> bool:
        """Whether to leave W for later, since a B comes before W would be over.

        Only in the cool-down, where W can fill the end, and only on a rank that has been idle less
        than another one: it can afford the wait.
        """
        if left.forwards_left:
            return False
        ready = (self.next_ready_time(operation) for operation in left.operations)
        gap = min((arrival for arrival in ready if arrival > time), default=inf) - time
        if gap >= self._seconds[self.pending[rank][0][0]] - self._tolerance:
            return False
        return self.idle[rank] + gap <= max(self.idle) + self._tolerance
