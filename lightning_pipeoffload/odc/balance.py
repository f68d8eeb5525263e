"""Times and draws minibatches of given lengths: with collectives at every layer, and on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

from lightning_pipeoffload.odc.packing import Cost, Microbatches, check_packing, pack
from lightning_pipeoffload.pictures.figures import SMALL, new_figure
from lightning_pipeoffload.schedule.quantities import share_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WAYS = (
    ("collective", "local_sort"),
    ("collective", "lb_micro"),
    ("on demand", "local_sort"),
    ("on demand", "lb_micro"),
    ("on demand", "lb_mini"),
)
"""How ranks communicate, and how texts are packed."""
REFERENCE = ("collective", "lb_micro")
"""The throughput of the others is relative to this one's."""

Timing = list[list[float]]
"""The cost of each microbatch of each rank in a minibatch."""


@dataclass(frozen=True)
class Balance:
    """The time that ranks take for given texts in one way.

    Attributes:
        communication: "collective": ranks wait for each other at every layer; "on demand": once per
            minibatch.
        mode: The packing.
        time: The time of all minibatches, in the unit of the cost.
        idle: The share of the ranks' time in which they wait.
        speedup: Throughput relative to ``REFERENCE``.
        first: The first minibatch.
    """

    communication: str
    mode: str
    time: float
    idle: float
    speedup: float
    first: Timing


def balances(
    lengths: Sequence[int], num_ranks: int, samples_per_rank: int, max_tokens: int, cost: Cost
) -> list[Balance]:
    """Compare ``WAYS`` to train on texts in the given order.

    Args:
        lengths: The tokens of each text; texts behind the last whole minibatch are left out.
        num_ranks: The number of ranks that share a minibatch.
        samples_per_rank: Texts of a minibatch, divided by the ranks.
        max_tokens: The largest number of tokens of a microbatch.
        cost: The cost of a text, from its length.

    Raises:
        ValueError: A text does not fit into a microbatch, or there is no whole minibatch.
    """
    size = num_ranks * samples_per_rank
    check_packing(lengths, max_tokens, REFERENCE[1])
    if len(lengths) < size:
        raise ValueError(
            f"{len(lengths)} texts make no minibatch of {num_ranks} ranks with {samples_per_rank} "
            f"each; give at least {size}"
        )
    starts = range(0, len(lengths) - size + 1, size)
    minibatches = [lengths[start : start + size] for start in starts]
    timings = {
        mode: [_timed(texts, num_ranks, max_tokens, cost, mode) for texts in minibatches]
        for mode in {mode for _, mode in WAYS}
    }
    reference = _total(REFERENCE[0], timings[REFERENCE[1]])
    return [_balance(way, mode, timings[mode], reference) for way, mode in WAYS]


def _timed(texts: Sequence[int], num_ranks: int, max_tokens: int, cost: Cost, mode: str) -> Timing:
    shares = pack(texts, num_ranks, max_tokens, cost, mode)
    return [_costs_of(share, texts, cost) for share in shares]


def _costs_of(share: Microbatches, texts: Sequence[int], cost: Cost) -> list[float]:
    return [sum(cost(texts[i]) for i in microbatch) for microbatch in share]


def _balance(way: str, mode: str, timings: list[Timing], reference: float) -> Balance:
    time = _total(way, timings)
    work = sum(sum(map(sum, timing)) for timing in timings)
    idle = 1 - work / (len(timings[0]) * time)
    return Balance(way, mode, time, max(0.0, idle), reference / time, timings[0])


def _total(way: str, timings: list[Timing]) -> float:
    return sum(_minibatch_time(way, timing) for timing in timings)


def _minibatch_time(way: str, timing: Timing) -> float:
    """Return the time of a minibatch; with collectives each microbatch takes its longest rank's."""
    if way == "collective":
        return sum(map(max, zip_longest(*timing, fillvalue=0.0)))
    return max(map(sum, timing))


_COLORS = ("#5b8fd6", "#9dbdea")  # of neighbours, in turn
_IDLE = "#eeeeee"


def draw_balances(balances: Sequence[Balance]) -> Figure:
    """Draw the first minibatch of several ways, one below the other, on one time axis."""
    num_ranks = len(balances[0].first)
    figure = new_figure(760, len(balances) * (20 * num_ranks + 50))
    all_axes = figure.subplots(len(balances), sharex=True, squeeze=False)[:, 0]
    for axes, balance in zip(all_axes, balances, strict=True):
        _draw(axes, balance, list(_spans(balance.communication, balance.first)))
    figure.tight_layout()
    return figure


Spans = list[tuple[float, float]]


def _spans(communication: str, timing: Timing) -> Iterator[Spans]:
    """Yield when each rank computes each of its microbatches."""
    if communication == "collective":
        slots = [max(slot) for slot in zip_longest(*timing, fillvalue=0.0)]
        starts = list(accumulate(slots, initial=0.0))
        for rank in timing:
            yield [(start, start + cost) for start, cost in zip(starts, rank, strict=False)]
        return
    for rank in timing:
        ends = list(accumulate(rank))
        yield [(end - cost, end) for end, cost in zip(ends, rank, strict=True)]


def _draw(axes: Axes, balance: Balance, ranks: list[Spans]) -> None:
    idle = share_text(balance.idle)
    title = f"{balance.communication}, {balance.mode}: idle {idle} of all minibatches"
    axes.set_title(title, loc="left", fontsize=1.2 * SMALL)
    end = max((span[1] for spans in ranks for span in spans), default=0.0)
    for rank, spans in enumerate(ranks):
        axes.broken_barh([(0, end)], (rank - 0.45, 0.9), facecolor=_IDLE)
        bars = [(start, stop - start) for start, stop in spans]
        colors = [_COLORS[number % 2] for number in range(len(bars))]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colors)
    names = [f"rank {rank}" for rank in range(len(ranks))]
    axes.set_yticks(range(len(ranks)), names, fontsize=SMALL)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=SMALL)
