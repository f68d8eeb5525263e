"""What the colours of a timeline mean, in words, in as many lines as there is width for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightning_pipeoffload.pictures.drawing import FONT_SIZE, LINE, Box, Drawing, lighter
from lightning_pipeoffload.schedule.actions import Kind

__all__ = ["LETTER", "LegendEntry", "arrange", "color_of", "draw_legend", "entries_for"]

LETTER = 0.58
"""Width of a digit as a share of the font size."""

_COLORS = {
    Kind.F: "#2f6fc4",
    Kind.B: "#1497ad",
    Kind.W: "#5d9e1f",
    Kind.BW: "#d9822b",
    Kind.REDUCE: "#e0b416",
    Kind.OFFLOAD: "#8e5bb5",
    Kind.OFFLOAD_W: "#6b4aa8",
    Kind.RELOAD: "#c2557f",
    Kind.RELOAD_B: "#d6455d",
    Kind.RELOAD_W: "#a03c4a",
}
_OTHER_COLOR = "#777777"
_LIGHTEST = 0.7
_WORDS = {
    Kind.F: "F: forward",
    Kind.B: "B: gradient of the input",
    Kind.W: "W: gradient of the weights",
    Kind.BW: "BW: both gradients",
    Kind.REDUCE: "gradients over the replicas",
    Kind.OFFLOAD: "activations go to the host",
    Kind.OFFLOAD_W: "what waits for W goes to the host",
    Kind.RELOAD: "activations come back",
    Kind.RELOAD_B: "what B needs comes back",
    Kind.RELOAD_W: "what W needs comes back",
}
_BOX, _SPACE = 14.0, 18.0


class LegendEntry(NamedTuple):
    """A line of words with the colours that it explains, one for each chunk."""

    colors: tuple[str, ...]
    words: str

    @property
    def width(self) -> float:
        """The pixels that it takes."""
        return _BOX * len(self.colors) + 3 + FONT_SIZE * LETTER * len(self.words) + _SPACE


def color_of(kind: Kind, chunk: int, num_chunks: int) -> str:
    """Return the colour of an action of a rank's chunk: later chunks are lighter."""
    return lighter(_COLORS.get(kind, _OTHER_COLOR), _LIGHTEST * chunk / num_chunks)


def _shades(kind: Kind, num_chunks: int) -> tuple[str, ...]:
    return tuple(color_of(kind, chunk, num_chunks) for chunk in range(num_chunks))


def entries_for(kinds: Iterable[Kind], num_chunks: int) -> list[LegendEntry]:
    """Return what is to be explained where these kinds are drawn."""
    there = set(kinds)
    entries = [
        LegendEntry(_shades(kind, num_chunks), _words_for(kind)) for kind in Kind if kind in there
    ]
    if num_chunks > 1:
        entries.append(LegendEntry((), f"(chunks 0 to {num_chunks - 1} of a rank, dark to light)"))
    return entries


def arrange(entries: Iterable[LegendEntry], width: float) -> list[list[LegendEntry]]:
    """Return the entries line by line, none wider than ``width`` unless one alone is."""
    lines: list[list[LegendEntry]] = [[]]
    for entry in entries:
        if lines[-1] and sum(e.width for e in (*lines[-1], entry)) > width:
            lines.append([])
        lines[-1].append(entry)
    return lines


def draw_legend(
    drawing: Drawing, left: float, top: float, lines: Iterable[Iterable[LegendEntry]]
) -> None:
    """Draw the lines of a legend below each other."""
    for number, line in enumerate(lines):
        x, y = left, top + number * LINE
        for entry in line:
            for place, color in enumerate(entry.colors):
                drawing.boxes.append(Box(x + _BOX * place, y + 3, 13, 13, color))
            drawing.write(x + _BOX * len(entry.colors) + 3, y + LINE / 2, entry.words)
            x += entry.width


def _words_for(kind: Kind) -> str:
    return _WORDS.get(kind, kind.value)
