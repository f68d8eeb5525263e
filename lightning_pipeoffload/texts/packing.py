"""Distributes the texts of a minibatch over ranks and microbatches, as in arXiv 2601.19362.

Texts of unequal cost are divided into parts of nearly equal cost by the largest differencing method
of Karmarkar and Karp: it takes the two partial divisions with the largest differences and joins the
heaviest part of one with the lightest of the other, until one division is left. Then the heaviest
part swaps texts with others as long as that makes it lighter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from operator import index
from typing import Any

Cost = Callable[[int], float]


def quadratic(square: float, linear: float, constant: float = 0.0) -> Cost:
    """Return the cost curve of a transformer, in which attention is quadratic in the length.

    Args:
        square: Cost of the attention of 32,000 tokens.
        linear: Other costs of 32,000 tokens.
        constant: Cost of a text of any length.
    """

    def cost(length: int) -> float:
        share = length / 32000
        return square * share * share + linear * share + constant

    return cost


def tokens(length: int) -> float:
    """Return the length itself."""
    return float(length)


# Two curves are from arXiv 2601.19362, without the constant cost of a forward, which occurs once
# per microbatch.
COSTS: dict[str, Cost] = {
    "tokens": tokens,
    "1.5b": quadratic(1.982, 2.612),
    "7b": quadratic(4.348, 8.768),
}


def find_cost(cost: str | Cost) -> Cost:
    """Return the cost function of a name; return a function unchanged."""
    if not isinstance(cost, str):
        return cost
    if cost not in COSTS:
        raise ValueError(
            f"cost={cost!r} must be one of {', '.join(COSTS)}, or a function of a text's length"
        )
    return COSTS[cost]


Microbatches = list[list[int]]
"""The indices of the texts in each microbatch of one rank, which may have none."""


def lb_mini(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost
) -> list[Microbatches]:
    """Assign every rank equal work, in as few microbatches as it needs.

    For ranks that do not wait for each other within a minibatch.
    """
    costs = [cost(length) for length in lengths]
    shares = partition(costs, num_ranks)
    return [_pack_rank(share, lengths, costs, max_tokens, 0) for share in shares]


def lb_micro(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost
) -> list[Microbatches]:
    """Assign every rank the same number of texts and of microbatches, the heaviest first.

    For ranks that wait for each other at every layer of every microbatch.
    """
    costs = [cost(length) for length in lengths]
    shares = partition(costs, num_ranks, equal_counts=True)
    num = 0
    while True:
        packed = [_pack_rank(share, lengths, costs, max_tokens, num) for share in shares]
        most = max(len(microbatches) for microbatches in packed)
        if most <= num or all(len(microbatches) == most for microbatches in packed):
            return packed
        num = most


def local_sort(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost
) -> list[Microbatches]:
    """Assign texts to ranks in turn; each is a microbatch, a rank's longest text first."""
    shares = [range(rank, len(lengths), num_ranks) for rank in range(num_ranks)]
    return [[[i] for i in sorted(share, key=lambda i: -lengths[i])] for share in shares]


MODES: dict[str, Callable[[Sequence[int], int, int, Cost], list[Microbatches]]] = {
    "lb_mini": lb_mini,
    "lb_micro": lb_micro,
    "local_sort": local_sort,
}


def pack(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost, mode: str
) -> list[Microbatches]:
    """Divide the texts of one minibatch among ranks and microbatches.

    Args:
        lengths: The tokens of each text.
        num_ranks: The number of ranks.
        max_tokens: The largest number of tokens of a microbatch.
        cost: The cost of a text, from its length.
        mode: One of ``MODES``.

    Returns:
        The microbatches of each rank, the heaviest first. A microbatch of ``lb_micro`` is empty
        if its rank has fewer texts than another one has microbatches.
    """
    return MODES[mode](lengths, num_ranks, max_tokens, cost)


def check_packing(lengths: Sequence[int], max_tokens: int, mode: str) -> None:
    """Refuse an unknown mode, and a text that is empty or too long by itself."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}")
    check_lengths(lengths, max_tokens, "a microbatch")


def read_lengths(lengths: Iterable[Any]) -> list[int]:
    """Return the lengths of texts as ints.

    Raises:
        ValueError: One is no whole number.
    """
    numbers = []
    for place, length in enumerate(lengths):
        try:
            numbers.append(index(length))
        except TypeError:
            raise ValueError(
                f"lengths[{place}] is a {type(length).__name__}; lengths are numbers of tokens, "
                f"one for each text: [len(tokens) for tokens in texts]"
            ) from None
    return numbers


def check_lengths(lengths: Sequence[int], max_tokens: int, what: str) -> None:
    """Refuse a text that is empty, or too long for ``what`` by itself."""
    for place, length in enumerate(lengths):
        if not 0 < length <= max_tokens:
            raise ValueError(
                f"text {place} has {length} tokens, and max_tokens={max_tokens} is the most of "
                f"{what}: every text must have 1 to {max_tokens}; cut it, leave it out, or set "
                f"a larger max_tokens"
            )


def _pack_rank(
    share: Sequence[int], lengths: Sequence[int], costs: Sequence[float], limit: int, least: int
) -> Microbatches:
    """Divide a rank's texts into as few microbatches, of nearly equal cost, as ``limit`` allows."""
    total = sum(lengths[i] for i in share)
    num = max(least, -(-total // limit))
    while True:
        parts = partition([costs[i] for i in share], num) if num else []
        microbatches = [[share[place] for place in part] for part in parts]
        if all(sum(lengths[i] for i in part) <= limit for part in microbatches):
            return sorted(microbatches, key=lambda part: -sum(costs[i] for i in part))
        num += 1


Parts = list[list[int]]

_MAX_SWAPS = 100


def partition(costs: Sequence[float], num_parts: int, equal_counts: bool = False) -> Parts:
    """Divide texts into parts, and minimize the cost of the heaviest part.

    Args:
        costs: The cost of each text.
        num_parts: The number of parts; some may be empty.
        equal_counts: Whether the numbers of texts of two parts may differ by at most one.

    Returns:
        The indices of the texts in each part.
    """
    candidates = [_improved(_differencing_partition(costs, num_parts, equal_counts=True), costs)]
    if not equal_counts:
        candidates.append(
            _improved(_differencing_partition(costs, num_parts, equal_counts=False), costs)
        )
    return min(candidates, key=lambda parts: max(_weights(parts, costs), default=0.0))


def _differencing_partition(costs: Sequence[float], num_parts: int, equal_counts: bool) -> Parts:
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
    """Return a partial division with its heap key: the largest difference comes first."""
    pairs = zip(_weights(parts, costs), parts, strict=True)
    weighted = sorted(pairs, key=lambda pair: pair[0], reverse=True)
    return weighted[-1][0] - weighted[0][0], tie, weighted


def _weights(parts: Parts, costs: Sequence[float]) -> list[float]:
    return [sum(costs[index] for index in part) for part in parts]


def _improved(parts: Parts, costs: Sequence[float]) -> Parts:
    """Swap texts of the heaviest part with lighter ones of others, as long as that helps."""
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
    """Return the heavier of two parts after a swap of texts that differ by ``difference``."""
    return max(weights[heavy] - difference, weights[light] + difference)
