"""One minibatch as a picture: what each rank computes when, with collectives and on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

from lightning_pipeoffload.odc.balance import Balance, Timing
from lightning_pipeoffload.pictures.figures import SMALL, new_figure
from lightning_pipeoffload.schedule.quantities import share_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#5b8fd6", "#9dbdea")  # in turns, so that neighbours can be told apart
_IDLE = "#eeeeee"


def draw_balances(balances: Sequence[Balance]) -> Figure:
    """Draw the first minibatch of several ways below each other, at one scale."""
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
