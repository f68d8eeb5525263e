"""A drawing as SVG: text that any browser shows, written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from lightning_pipeoffload.pictures.drawing import Area, Box, Drawing, Words

__all__ = ["to_svg"]

FONT = "Helvetica, Arial, sans-serif"


def to_svg(drawing: Drawing) -> str:
    """Return the drawing as an SVG document."""
    return "\n".join([*_lines(drawing), ""])


def _lines(drawing: Drawing) -> Iterator[str]:
    size = f"{drawing.width:g} {drawing.height:g}"
    width, height = size.split()
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {size}" font-family="{FONT}">'
    )
    yield '<rect width="100%" height="100%" fill="#ffffff"/>'
    yield from map(_box, drawing.boxes)
    yield from map(_area, drawing.areas)
    yield from map(_words, drawing.words)
    yield "</svg>"


def _box(box: Box) -> str:
    corner = f'<rect x="{box.x:.2f}" y="{box.y:.2f}"'
    size = f'width="{box.width:.2f}" height="{box.height:.2f}" fill="{box.color}"'
    if not box.hint:
        return f"{corner} {size}/>"
    return f"{corner} {size}><title>{escape(box.hint)}</title></rect>"


def _area(area: Area) -> str:
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in area.points)
    return (
        f'<polygon points="{points}" fill="{area.color}"/>'
        f'<polyline points="{points}" fill="none" stroke="{area.outline}"/>'
    )


def _words(words: Words) -> str:
    return (
        f'<text x="{words.x:.2f}" y="{words.y:.2f}" dominant-baseline="central" '
        f'font-size="{words.size:.1f}" fill="{words.color}" text-anchor="{words.anchor}">'
        f"{escape(words.text)}</text>"
    )
