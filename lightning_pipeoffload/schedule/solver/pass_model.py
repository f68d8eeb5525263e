"""What a solver decides of one stage and microbatch: when its actions run, and what is copied.

When the parts are on the device, on the way of F, OFFLOAD, RELOAD_B, B, OFFLOAD_W, RELOAD_W and W::

    FOR_B     F ======= OFFLOAD     RELOAD_B == B
    FOR_W     F ======= OFFLOAD                                   RELOAD_W == W
    GRADIENT                                    B == OFFLOAD_W    RELOAD_W == W
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..actions import ACTIVATION, RELOADS, WAITING, Action, Kind, Part
from .hinted_model import Hinted, HintedModel
from .whole_costs import StartTimes, WholeCosts

__all__ = ["CopyModel", "PassCopies", "PassModel", "Stay", "stays"]


class CopyModel(NamedTuple):
    """A copy that may be made.

    Attributes:
        flag: Whether it is.
        begin: When its rank comes to it.
        start: When it starts.
        end: When it ends.
        interval: From start to end.
    """

    flag: Hinted
    begin: Hinted
    start: Hinted
    end: Hinted
    interval: Any


class PassCopies(NamedTuple):
    """All copies that one stage and microbatch may have.

    Attributes:
        offload: OFFLOAD.
        reload: RELOAD, or RELOAD_B.
        queue: OFFLOAD_W.
        rest: RELOAD_W.
        in_parts: Whether it is RELOAD_B, and RELOAD_W brings the rest.
    """

    offload: CopyModel
    reload: CopyModel
    queue: CopyModel
    rest: CopyModel
    in_parts: Hinted


class PassModel:
    """F, B, W and the copies of one stage and microbatch.

    Args:
        model: Where they are added.
        whole: What they take.
        place: Stage and microbatch.
        hint: The plan to start from.
        earliest: The earliest starts of F, B and W.
        copies: Whether anything may be copied.

    Attributes:
        begins: When F, B and W start.
        ends: When they end.
        copies: Its copies; None where nothing may be copied.
    """

    def __init__(
        self,
        model: HintedModel,
        whole: WholeCosts,
        place: tuple[int, int],
        hint: StartTimes,
        earliest: dict[Kind, int],
        copies: bool,
    ) -> None:
        self._model, self._whole, self.place, self._hint = model, whole, place, hint
        self.begins = {
            kind: model.number(hint.begins[self.action(kind)], low)
            for kind, low in earliest.items()
        }
        self.ends = {
            kind: begin.plus(whole.seconds[kind][place[0]]) for kind, begin in self.begins.items()
        }
        model.after(self.begins[Kind.B], self.ends[Kind.F])
        model.after(self.begins[Kind.W], self.ends[Kind.B])
        self.copies = self._make_copies() if copies else None

    def action(self, kind: Kind) -> Action:
        """Return an action of this stage and microbatch."""
        return Action(kind, *self.place)

    @property
    def lanes(self) -> Iterator[tuple[bool, CopyModel]]:
        """All copies, and whether they go back to the device."""
        if self.copies is not None:
            offload, reload, queue, rest, _ = self.copies
            yield from ((False, offload), (True, reload), (False, queue), (True, rest))

    def work(self) -> Iterator[Any]:
        """Yield what keeps the rank busy; what takes memory between two actions is a moment."""
        for kind, begin in self.begins.items():
            yield self._model.work(begin, self._whole.seconds[kind][self.place[0]])
        for back, copy in self.lanes:
            if back:
                yield self._model.work(copy.begin, 0, copy.flag)

    def _make_copies(self) -> PassCopies:
        model, has, (begins, ends) = self._model, self._has, (self.begins, self.ends)
        away, queued = model.flag(has(Kind.OFFLOAD)), model.flag(has(Kind.OFFLOAD_W))
        in_parts = whole_queue = model.both(away, queued)
        back = queued
        if self.grains(Part.FOR_W):
            in_parts = model.both(away, model.flag(has(Kind.RELOAD_B)))
            model.model.add_implication(whole_queue.now, in_parts.now)
            back = model.either(in_parts, queued)
        there, here = self._whole.offload[self.place[0]], self._whole.reload[self.place[0]]
        offload = self._copy(Kind.OFFLOAD, away, ends[Kind.F], (there[ACTIVATION],) * 2)
        kind = Kind.RELOAD_B if has(Kind.RELOAD_B) else Kind.RELOAD
        ticks = here[ACTIVATION], here[Part.FOR_B]
        reload = self._copy(kind, away, offload.end, ticks, in_parts)
        ticks = there[WAITING], there[Part.GRADIENT]
        queue = self._copy(Kind.OFFLOAD_W, queued, ends[Kind.B], ticks, away)
        ticks = here[Part.FOR_W], here[WAITING]
        rest = self._copy(Kind.RELOAD_W, back, ends[Kind.B], ticks, queued)
        # B waits for its own part alone, which comes back first.
        model.after(begins[Kind.B], reload.start.plus(here[Part.FOR_B]), away)
        model.after(begins[Kind.W], reload.end, away)
        model.after(rest.begin, queue.end, queued)
        model.after(begins[Kind.W], rest.end, back)
        return PassCopies(offload, reload, queue, rest, in_parts)

    def _has(self, kind: Kind) -> bool:
        return kind in self._hint.kinds.get(self.place, ())

    def grains(self, part: Part) -> int:
        """Return the memory of one of its parts."""
        return self._whole.sizes[self.place[0]][part]

    def _copy(
        self,
        kind: Kind,
        flag: Hinted,
        ready: Hinted,
        ticks: tuple[int, int],
        other: Hinted | None = None,
    ) -> CopyModel:
        """Add a copy.

        Args:
            kind: What it is in the plan to start from.
            flag: Whether it is made.
            ready: When it can start.
            ticks: What it takes, without and with the other flag.
            other: That flag.
        """
        model, action = self._model, self.action(kind)
        start = begin = model.number(self._hint.copies.get(action, ready.hint))
        if kind in RELOADS:
            begin = model.number(self._hint.begins.get(action, start.hint))
            model.after(start, begin, flag)
        model.after(begin, ready, flag)
        less, more = ticks
        if less == more or other is None:
            return CopyModel(flag, begin, start, start.plus(less), model.work(start, less, flag))
        end = model.number(start.hint + (more if other.hint else less))
        size = less + (more - less) * other.now
        optional = model.model.new_optional_interval_var
        return CopyModel(flag, begin, start, end, optional(start.now, size, end.now, flag.now, ""))


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
