"""Which texts of a minibatch each rank packs into which microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_pipeoffload.odc.partition import partition
from lightning_pipeoffload.odc.text_costs import Cost

Microbatches = list[list[int]]
"""Of one rank: the places of the texts in each of its microbatches; there may be none."""


def lb_mini(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost
) -> list[Microbatches]:
    """Give every rank as much work in all; each packs it into as few microbatches as it needs.

    For ranks that do not wait for each other inside of a minibatch.
    """
    costs = [cost(length) for length in lengths]
    shares = partition(costs, num_ranks)
    return [_packed(share, lengths, costs, max_tokens, 0) for share in shares]


def lb_micro(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost
) -> list[Microbatches]:
    """Give every rank as many texts and as many microbatches, the heaviest first.

    For ranks that meet at every layer of every microbatch.
    """
    costs = [cost(length) for length in lengths]
    shares = partition(costs, num_ranks, equal_counts=True)
    num = 0
    while True:
        packed = [_packed(share, lengths, costs, max_tokens, num) for share in shares]
        most = max(len(microbatches) for microbatches in packed)
        if most <= num or all(len(microbatches) == most for microbatches in packed):
            return packed
        num = most


def local_sort(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost
) -> list[Microbatches]:
    """Deal the texts out as they come; each is a microbatch, the longest of a rank first."""
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
    """Share out one minibatch.

    Args:
        lengths: The tokens of each text.
        num_ranks: How many ranks share them.
        max_tokens: The most tokens of one microbatch.
        cost: What a text costs, by its length.
        mode: One of ``MODES``.

    Returns:
        The microbatches of each rank, the heaviest first. A microbatch of ``lb_micro`` is empty
        where a rank has fewer texts than another one has microbatches.
    """
    return MODES[mode](lengths, num_ranks, max_tokens, cost)


def check_packing(lengths: Sequence[int], max_tokens: int, mode: str) -> None:
    """Refuse what cannot be packed.

    Raises:
        ValueError: There is no such mode, or a text that is empty or too long by itself.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}")
    for place, length in enumerate(lengths):
        if not 0 < length <= max_tokens:
            raise ValueError(
                f"text {place} has {length} tokens, and max_tokens={max_tokens} is the most of a "
                f"microbatch: every text must have 1 to {max_tokens}; cut it, leave it out, or set "
                f"a larger max_tokens"
            )


def _packed(
    share: Sequence[int], lengths: Sequence[int], costs: Sequence[float], limit: int, least: int
) -> Microbatches:
    """Divide a rank's texts into the fewest microbatches, of nearly equal cost, that fit."""
    total = sum(lengths[i] for i in share)
    num = max(least, -(-total // limit))
    while True:
        parts = partition([costs[i] for i in share], num) if num else []
        found = [[share[place] for place in part] for part in parts]
        if all(sum(lengths[i] for i in part) <= limit for part in found):
            return sorted(found, key=lambda part: -sum(costs[i] for i in part))
        num += 1
