"""Timelines as a file: a picture or a trace, by the ending of its name.

Traces are in Chrome's format for trace events, which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_pipeoffload.schedule import COMPUTE_LANE, Costs, Event, ScheduleError, Timeline
from lightning_pipeoffload.schedule.simulation import Curve, memory_curves

from .figures import picture_path_error, save_figure
from .measured_step import MeasuredStep, Wait
from .timelines import TimelinePanel, Window, draw_timelines

MICROSECONDS = 1e6
ENDINGS = (".svg", ".png", ".json")

_Entries = list[dict[str, Any]]


def to_trace(timeline: Timeline, costs: Costs) -> dict[str, Any]:
    """Return a trace: a process for each rank, a thread for each lane, and the memory as counter.

    A second of the costs is a second of the trace.
    """
    return _trace(_entries(timeline, memory_curves(timeline, costs), "rank {}", lambda rank: rank))


def to_measured_trace(measured: MeasuredStep, planned: Timeline, costs: Costs) -> dict[str, Any]:
    """Return a trace of a step with its waits, each rank above its plan; costs are in seconds."""

    def above(rank: int) -> int:
        return 2 * rank

    count = measured.timeline.num_sequence_slices
    entries = _entries(measured.timeline, measured.curves, "rank {} measured", above)
    entries += [_complete(event, 0, above(event.rank), count) for event in measured.beginnings]
    entries += [_waiting(wait, above(wait.rank)) for wait in measured.waits]
    curves = memory_curves(planned, costs)
    entries += _entries(planned, curves, "rank {} planned", lambda rank: 2 * rank + 1)
    return _trace(entries)


def _trace(entries: _Entries) -> dict[str, Any]:
    return {"displayTimeUnit": "ms", "traceEvents": entries}


def _entries(
    timeline: Timeline, curves: Sequence[Curve], name: str, process_of: Callable[[int], int]
) -> _Entries:
    lanes = dict.fromkeys((COMPUTE_LANE, *(event.lane for event in timeline.events)))
    threads = {lane: number for number, lane in enumerate(lanes)}
    ranks = [(rank, process_of(rank)) for rank in range(timeline.num_ranks)]
    events, count = timeline.events, timeline.num_sequence_slices
    return [
        *(entry for rank, pid in ranks for entry in _names(name.format(rank), pid, threads)),
        *(_complete(e, threads[e.lane], process_of(e.rank), count) for e in events),
        *(entry for rank, pid in ranks for entry in _counters(curves[rank], pid)),
    ]


def _names(process: str, pid: int, threads: dict[str, int]) -> Iterator[dict[str, Any]]:
    yield _name("process_name", process, pid=pid)
    for lane, thread in threads.items():
        yield _name("thread_name", lane, pid=pid, tid=thread)


def _counters(curve: Curve, pid: int) -> Iterator[dict[str, Any]]:
    for time, memory in curve:
        counter = {"name": "memory", "ph": "C", "pid": pid, "args": {"memory": memory}}
        yield counter | {"ts": time * MICROSECONDS}


def _name(what: str, name: str, **where: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", **where, "args": {"name": name}}


def _complete(event: Event, thread: int, pid: int, num_slices: int) -> dict[str, Any]:
    action = event.action
    args = {"stage": action.stage, "microbatch": action.microbatch // num_slices}
    if num_slices > 1:
        args["slice"] = action.microbatch % num_slices
    return _span(str(action), action.kind.value, event.start, event.end, args) | {
        "pid": pid,
        "tid": thread,
    }


def _waiting(wait: Wait, pid: int) -> dict[str, Any]:
    args = {"rank": wait.sender, "action": str(wait.awaited)}
    return _span(wait.label, "wait", wait.start, wait.end, args) | {"pid": pid, "tid": 0}


def _span(name: str, kind: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
        "args": args,
    }


class TitledTimeline(NamedTuple):
    """One simulated timeline to draw, with the line above it."""

    timeline: Timeline
    costs: Costs
    title: str


@dataclass(frozen=True)
class PictureFile:
    """A file to draw to: ``.svg``, ``.png``, or ``.json``: a trace for Perfetto.

    Attributes:
        path: The file to write; its ending says what kind.
        microbatches: "0-7": only these; None: all.
        time: Start and end of what to show; None: all.
        unit: The unit of the time axis.

    Raises:
        ScheduleError: There is no such ending or folder, or matplotlib is missing for a picture.
    """

    path: Path
    microbatches: str | None = None
    time: Any = None
    unit: str = "s"

    def __post_init__(self) -> None:
        if self.path.suffix not in ENDINGS:
            raise ScheduleError(f"picture ({self.path}) must end in one of {', '.join(ENDINGS)}")
        obstacle = picture_path_error(self.path)
        if obstacle:
            raise ScheduleError(f"picture ({self.path}) cannot be written: {obstacle}")

    def write(self, drawn: Sequence[TitledTimeline]) -> None:
        """Draw timelines one above the other, at one scale.

        Raises:
            ScheduleError: It cannot be written, the window is outside of the timelines, or a trace
                is wanted of several.
        """
        if self.path.suffix == ".json":
            if len(drawn) > 1:
                raise ScheduleError(
                    f"picture ({self.path}) is a trace, which shows one schedule; leave out "
                    f"compare, or draw an .svg or .png"
                )
            trace = to_trace(drawn[0].timeline, drawn[0].costs)
            with self._writing():
                self.path.write_text(json.dumps(trace), encoding="utf-8")
        else:
            window = parse_window([d.timeline for d in drawn], self.microbatches, self.time)
            figure = draw_timelines([TimelinePanel.of(*d) for d in drawn], window, self.unit)
            with self._writing():
                save_figure(figure, self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise ScheduleError(f"picture ({self.path}) cannot be written: {reason}") from error


def parse_window(
    timelines: Sequence[Timeline], microbatches: str | None = None, time: Any = None
) -> Window:
    """Return the window that the user has asked for; by default all of the timelines.

    Args:
        timelines: The timelines to draw.
        microbatches: "0-7": their actions only, from the start of the first to the end of the last
            one in any of the timelines.
        time: Start and end.

    Raises:
        ScheduleError: Both are given, or one is no window of these timelines.
    """
    if microbatches is not None and time is not None:
        raise ScheduleError("picture.microbatches and picture.time exclude each other; use one")
    if microbatches is not None:
        return _window_of_microbatches(timelines, str(microbatches))
    return Window.of_all(timelines) if time is None else _window_of_time(timelines, time)


def _window_of_microbatches(timelines: Sequence[Timeline], microbatches: str) -> Window:
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", microbatches.strip())
    first, last = (int(n or numbers[1]) for n in numbers.groups()) if numbers else (1, 0)
    numbered = [
        (event.action.microbatch // timeline.num_sequence_slices, event)
        for timeline in timelines
        for event in timeline.events
    ]
    events = [event for number, event in numbered if first <= number <= last]
    if not events:
        most = max(number for number, _ in numbered)
        raise ScheduleError(
            f"picture.microbatches ({microbatches}) must be some of the plan's, as in 0-{most}"
        )
    start, end = min(event.start for event in events), max(event.end for event in events)
    return Window(start, end, (first, last))


def _window_of_time(timelines: Sequence[Timeline], time: Any) -> Window:
    makespan = Window.of_all(timelines).end
    is_pair = isinstance(time, Sequence) and not isinstance(time, str) and len(time) == 2
    if not is_pair or not all(isinstance(t, (int, float)) for t in time):
        raise ScheduleError(f"picture.time ({time}) must be a start and an end, as in [0,10]")
    start, end = map(float, time)
    if not 0 <= start < min(end, makespan):
        raise ScheduleError(
            f"picture.time ({time}) must start before it ends, within the {makespan:g} of the plan"
        )
    return Window(start, min(end, makespan))
