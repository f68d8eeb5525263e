"""Timelines in the Chrome trace event format, which https://ui.perfetto.dev opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_pipeoffload.schedule.actions import COMPUTE_LANE
from lightning_pipeoffload.schedule.costs import Costs
from lightning_pipeoffload.schedule.simulation.memory import Curve, memory_curves
from lightning_pipeoffload.schedule.timeline import Event, Timeline

from .measured_step import MeasuredStep, Wait

__all__ = ["to_measured_trace", "to_trace"]

MICROSECONDS = 1e6

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

    entries = _entries(measured.timeline, measured.curves, "rank {} measured", above)
    entries += [_complete(event, 0, above(event.rank)) for event in measured.beginnings]
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
    return [
        *(entry for rank, pid in ranks for entry in _names(name.format(rank), pid, threads)),
        *(_complete(e, threads[e.lane], process_of(e.rank)) for e in timeline.events),
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


def _complete(event: Event, thread: int, pid: int) -> dict[str, Any]:
    action = event.action
    args = {"stage": action.stage, "microbatch": action.microbatch}
    return _span(str(action), action.kind.value, event.start, event.end, args) | {
        "pid": pid,
        "tid": thread,
    }


def _waiting(wait: Wait, pid: int) -> dict[str, Any]:
    args = {"rank": wait.sender, "action": str(wait.awaited)}
    return _span(wait.words, "wait", wait.start, wait.end, args) | {"pid": pid, "tid": 0}


def _span(name: str, kind: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
        "args": args,
    }
