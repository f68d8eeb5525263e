"""What a text costs to train on, by its length."""

from __future__ import annotations

from collections.abc import Callable

Cost = Callable[[int], float]


def quadratic(square: float, linear: float, constant: float = 0.0) -> Cost:
    """Return the curve that fits a transformer: attention grows with the square of the length.

    Args:
        square: Cost of 32,000 tokens that see each other.
        linear: Cost of 32,000 tokens by themselves.
        constant: What every text costs besides.
    """

    def cost(length: int) -> float:
        share = length / 32000
        return square * share * share + linear * share + constant

    return cost


def tokens(length: int) -> float:
    """Return the length itself."""
    return float(length)


# The two curves are of arXiv 2601.19362, without what a forward costs however short its text is:
# texts of one microbatch pay that together.
COSTS: dict[str, Cost] = {
    "tokens": tokens,
    "1.5b": quadratic(1.982, 2.612),
    "7b": quadratic(4.348, 8.768),
}


def find_cost(cost: str | Cost) -> Cost:
    """Return a cost by its name, or the one that is given.

    Raises:
        ValueError: There is no cost of that name.
    """
    if not isinstance(cost, str):
        return cost
    if cost not in COSTS:
        raise ValueError(
            f"cost={cost!r} must be one of {', '.join(COSTS)}, or a function of a text's length"
        )
    return COSTS[cost]
