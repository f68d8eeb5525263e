"""Divides things of unequal cost into parts of nearly equal cost.

The largest differencing method of Karmarkar and Karp: two partial divisions that differ most are
laid over each other, the heaviest part of one on the lightest of the other, until one is left.
Then the heaviest part swaps things with others for as long as that makes it lighter.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

Parts = list[list[int]]

_MAX_SWAPS = 100


def partition(costs: Sequence[float], num_parts: int, equal_counts: bool = False) -> Parts:
    """Divide things into parts whose heaviest is as light as can be found.

    Args:
        costs: The cost of each thing.
        num_parts: How many parts; some may be empty.
        equal_counts: Whether all parts have as many things, give or take one.

    Returns:
        The places of the things in each part.
    """
    found = [_improved(_difference(costs, num_parts, equal_counts=True), costs)]
    if not equal_counts:
        found.append(_improved(_difference(costs, num_parts, equal_counts=False), costs))
    return min(found, key=lambda parts: max(_weights(parts, costs), default=0.0))


def _difference(costs: Sequence[float], num_parts: int, equal_counts: bool) -> Parts:
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    size = num_parts if equal_counts else 1
    ties = count()
    heap = []
    for start in range(0, len(order), size):
        parts = [[index] for index in order[start : start + size]]
        parts += [[] for _ in range(num_parts - len(parts))]
        heap.append(_entry(parts, costs, next(ties)))
    heapify(heap)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heappop(heap), heappop(heap)
        light = zip(first, reversed(second), strict=True)
        joined = [(a + c, one + other) for (a, one), (c, other) in light]
        heappush(heap, _entry([part for _, part in joined], costs, next(ties)))
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]


_Entry = tuple[float, int, list[tuple[float, list[int]]]]


def _entry(parts: Parts, costs: Sequence[float], tie: int) -> _Entry:
    """Return a partial division as the heap orders it: the one that differs most comes first."""
    pairs = zip(_weights(parts, costs), parts, strict=True)
    weighted = sorted(pairs, key=lambda pair: pair[0], reverse=True)
    return weighted[-1][0] - weighted[0][0], tie, weighted


def _weights(parts: Parts, costs: Sequence[float]) -> list[float]:
    return [sum(costs[index] for index in part) for part in parts]


def _improved(parts: Parts, costs: Sequence[float]) -> Parts:
    """Swap things of the heaviest part for lighter ones of others, while that helps."""
    weights = _weights(parts, costs)
    for _ in range(_MAX_SWAPS):
        heavy = max(range(len(parts)), key=weights.__getitem__)
        best = min(
            (
                (_after_swap(weights, heavy, light, costs[i] - costs[j]), light, i, j)
                for light in range(len(parts))
                for i in parts[heavy]
                for j in parts[light]
                if light != heavy and costs[i] > costs[j]
            ),
            default=None,
        )
        if best is None or best[0] >= weights[heavy]:
            break
        _, light, i, j = best
        parts[heavy].remove(i)
        parts[light].remove(j)
        parts[heavy].append(j)
        parts[light].append(i)
        for part in (heavy, light):
            weights[part] = sum(costs[index] for index in parts[part])
    return parts


def _after_swap(weights: list[float], heavy: int, light: int, difference: float) -> float:
    """Return the heavier of two parts after they have swapped things that differ."""
    return max(weights[heavy] - difference, weights[light] + difference)
