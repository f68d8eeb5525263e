"""When the parts of a stage and microbatch are on the device, as the simulator counts them.

On the way of F, OFFLOAD, RELOAD_B, B, OFFLOAD_W, RELOAD_W and W, say::

    FOR_B     F ======= OFFLOAD     RELOAD_B == B
    FOR_W     F ======= OFFLOAD                                   RELOAD_W == W
    GRADIENT                                    B == OFFLOAD_W    RELOAD_W == W
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..actions import Kind, Part
from .hinted_model import Hinted, HintedModel
from .pass_model import PassCopies, PassModel

__all__ = ["Stay", "stays"]


class Stay(NamedTuple):
    """What is on a device for a while.

    Attributes:
        interval: When.
        grains: How much memory it takes.
    """

    interval: Any
    grains: int


def stays(model: HintedModel, of: PassModel, copies: PassCopies) -> Iterator[Stay]:
    """Yield all stays of a stage and microbatch.

    Args:
        model: Where they are added.
        of: The stage and microbatch.
        copies: Its copies.
    """
    if of.grains(Part.FOR_B):
        yield from _stays_for_b(model, of, copies)
    if of.grains(Part.FOR_W):
        yield from _stays_for_w(model, of, copies)
    if of.grains(Part.GRADIENT):
        yield from _stays_of_gradient(model, of, copies)


def _stays_for_b(model: HintedModel, of: PassModel, copies: PassCopies) -> Iterator[Stay]:
    grains, away = of.grains(Part.FOR_B), copies.offload.flag
    end = model.where(away, copies.offload.end, _dropped_by_b(of))
    yield Stay(model.stay(of.begins[Kind.F], end), grains)
    yield Stay(model.stay(copies.reload.begin, _dropped_by_b(of), away), grains)


def _stays_for_w(model: HintedModel, of: PassModel, copies: PassCopies) -> Iterator[Stay]:
    grains, away, end = of.grains(Part.FOR_W), copies.offload.flag, of.ends[Kind.W]
    kept = model.where(copies.queue.flag, copies.queue.end, end)
    yield Stay(model.stay(of.begins[Kind.F], model.where(away, copies.offload.end, kept)), grains)
    whole = model.but_not(away, copies.in_parts)
    yield Stay(model.stay(copies.reload.begin, end, whole), grains)
    yield Stay(model.stay(copies.rest.begin, end, copies.rest.flag), grains)


def _stays_of_gradient(model: HintedModel, of: PassModel, copies: PassCopies) -> Iterator[Stay]:
    grains, queued, end = of.grains(Part.GRADIENT), copies.queue.flag, of.ends[Kind.W]
    kept = model.where(queued, copies.queue.end, end)
    yield Stay(model.stay(_dropped_by_b(of), kept), grains)
    yield Stay(model.stay(copies.rest.begin, end, queued), grains)


def _dropped_by_b(of: PassModel) -> Hinted:
    """Return when B changes what is there: at its end, unless it adds more than it drops."""
    adds = of.grains(Part.GRADIENT) > of.grains(Part.FOR_B)
    return (of.begins if adds else of.ends)[Kind.B]
