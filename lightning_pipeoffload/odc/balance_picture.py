"""One minibatch as a picture: what each rank computes when, with collectives and on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest

from lightning_pipeoffload.odc.balance import Balance, Timing
from lightning_pipeoffload.pictures.drawing import LINE, Box, Drawing, stack

_WIDTH = 640.0
_MARGIN = 60.0
_COLORS = ("#5b8fd6", "#9dbdea")  # in turns, so that neighbours can be told apart
_IDLE = "#eeeeee"


def balance_drawing(balances: Sequence[Balance]) -> Drawing:
    """Draw the first minibatch of several ways below each other, at one scale."""
    spans = [list(_spans(b.communication, b.first)) for b in balances]
    longest = max(end for ranks in spans for rank in ranks for _, end in rank)
    pairs = zip(balances, spans, strict=True)
    return stack([_one(balance, ranks, _WIDTH / longest) for balance, ranks in pairs])


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


def _one(balance: Balance, ranks: list[Spans], scale: float) -> Drawing:
    drawing = Drawing(_MARGIN + _WIDTH + LINE, (len(ranks) + 2) * LINE)
    title = f"{balance.communication}, {balance.mode}: idle {balance.idle:.1%} of all minibatches"
    drawing.write(_MARGIN, LINE / 2, title)
    end = max((span[1] for spans in ranks for span in spans), default=0.0)
    for row, spans in enumerate(ranks, start=1):
        y = row * LINE
        drawing.write(_MARGIN - 6, y + LINE / 2, f"rank {row - 1}", anchor="end")
        drawing.boxes.append(Box(_MARGIN, y + 1, end * scale, LINE - 2, _IDLE, "idle"))
        for number, (start, stop) in enumerate(spans):
            box = Box(_MARGIN + start * scale, y + 1, (stop - start) * scale, LINE - 2, "")
            hint = f"rank {row - 1}, microbatch {number}: {stop - start:.3g}"
            drawing.boxes.append(box._replace(color=_COLORS[number % 2], hint=hint))
    return drawing
