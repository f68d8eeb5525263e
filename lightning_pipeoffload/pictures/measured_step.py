"""The measured timeline of a step: when ranks computed, and which rank waited for which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pipeoffload.schedule import COMPUTE_LANE, Action, Event, Kind, Timeline
from lightning_pipeoffload.schedule.simulation import Curve

_FORWARD = (Kind.F,)
_BACKWARD = (Kind.B, Kind.BW)

Spans = Sequence[tuple[float, float]]


class RankStep(NamedTuple):
    """One rank's step.

    Attributes:
        actions: Each computing action with the spans in which it ran; between two spans it waited
            for a message.
        held: The memory of the rank's device after actions.
    """

    actions: Sequence[tuple[Action, Spans]]
    held: Sequence[tuple[Action, float]]

    def earlier_by(self, seconds: float) -> RankStep:
        """Return the step in times of a clock that is behind by the given seconds."""
        moved = [
            (action, [(start - seconds, end - seconds) for start, end in spans])
            for action, spans in self.actions
        ]
        return self._replace(actions=moved)


class Wait(NamedTuple):
    """The wait of ``rank``, within ``action``, for the result of ``awaited`` from ``sender``."""

    rank: int
    action: Action
    sender: int
    awaited: Action
    start: float
    end: float

    @property
    def label(self) -> str:
        return f"waits for {self.awaited} of rank {self.sender}"


@dataclass(frozen=True)
class MeasuredStep:
    """A step of all ranks, in seconds from the first rank's start on one clock.

    Attributes:
        timeline: Each action, from the end of its last wait.
        beginnings: Actions up to a wait.
        waits: The waits for messages.
        curves: The memory of each rank's device.
    """

    timeline: Timeline
    beginnings: tuple[Event, ...]
    waits: tuple[Wait, ...]
    curves: tuple[Curve, ...]

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time, from the first start to the last end of all."""
        timeline = self.timeline
        busy = sum(timeline.busy) + sum(event.end - event.start for event in self.beginnings)
        available = timeline.num_ranks * timeline.makespan
        return 1 - busy / available if available else 0.0


def join_rank_steps(ranks: Sequence[RankStep], num_sequence_slices: int = 1) -> MeasuredStep:
    """Join the steps of all ranks, whose times are of one clock."""
    starts = [spans[0][0] for rank in ranks for _, spans in rank.actions]
    start = min(starts, default=0.0)
    pieces = [
        [(action, [(a - start, b - start) for a, b in spans]) for action, spans in rank.actions]
        for rank in ranks
    ]
    events = tuple(
        Event(rank, COMPUTE_LANE, action, *spans[-1])
        for rank, actions in enumerate(pieces)
        for action, spans in actions
    )
    beginnings = tuple(
        Event(rank, COMPUTE_LANE, action, *span)
        for rank, actions in enumerate(pieces)
        for action, spans in actions
        for span in spans[:-1]
    )
    ends = {event.action: event.end for event in events}
    curves = tuple(_curve(rank.held, ends) for rank in ranks)
    peaks = tuple(max(memory for _, memory in curve) for curve in curves)
    timeline = Timeline(events, peaks, num_sequence_slices=num_sequence_slices)
    return MeasuredStep(timeline, beginnings, tuple(_waits(pieces)), curves)


def _waits(ranks: Sequence[Sequence[tuple[Action, Spans]]]) -> Iterator[Wait]:
    owners = {action: rank for rank, actions in enumerate(ranks) for action, _ in actions}
    for rank, actions in enumerate(ranks):
        for action, spans in actions:
            for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
                awaited = _producing_action(action, owners)
                yield Wait(rank, action, owners[awaited], awaited, end, start)


def _producing_action(action: Action, owners: dict[Action, int]) -> Action:
    """Return the action whose result is an F's input, or a B's gradient."""
    step, kinds = (-1, _FORWARD) if action.kind is Kind.F else (1, _BACKWARD)
    stage, microbatch = action.stage + step, action.microbatch
    sources = (Action(kind, stage, microbatch) for kind in kinds)
    return next(source for source in sources if source in owners)


def _curve(held: Sequence[tuple[Action, float]], ends: dict[Action, float]) -> Curve:
    """Return memory over time; copies count at the end of the last computing action before them."""
    curve = [(0.0, 0.0)]
    time = 0.0
    for action, memory in held:
        time = ends.get(action, time)
        curve.append((time, memory))
    return curve
