"""A timeline in the Chrome trace event format, which https://ui.perfetto.dev opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_pipeoffload.schedule.costs import Costs
from lightning_pipeoffload.schedule.simulation.memory_curve import memory_curves
from lightning_pipeoffload.schedule.timeline import Event, Timeline

__all__ = ["to_trace"]

MICROSECONDS = 1e6


def to_trace(timeline: Timeline, costs: Costs) -> dict[str, Any]:
    """Return a trace: a process for each rank, a thread for each lane, and the memory as counter.

    A second of the costs is a second of the trace.
    """
    return {"displayTimeUnit": "ms", "traceEvents": list(_trace_events(timeline, costs))}


def _trace_events(timeline: Timeline, costs: Costs) -> Iterator[dict[str, Any]]:
    lanes = {lane: n for n, lane in enumerate(dict.fromkeys(e.lane for e in timeline.events))}
    for rank in range(timeline.num_ranks):
        yield _name("process_name", f"rank {rank}", pid=rank)
        for lane, thread in lanes.items():
            yield _name("thread_name", lane, pid=rank, tid=thread)
    yield from (_complete(event, lanes[event.lane]) for event in timeline.events)
    for rank, curve in enumerate(memory_curves(timeline, costs)):
        for time, memory in curve:
            counter = {"name": "memory", "ph": "C", "pid": rank, "args": {"memory": memory}}
            yield counter | {"ts": time * MICROSECONDS}


def _name(what: str, name: str, **where: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", **where, "args": {"name": name}}


def _complete(event: Event, thread: int) -> dict[str, Any]:
    action = event.action
    return {
        "name": str(action),
        "cat": action.kind.value,
        "ph": "X",
        "ts": event.start * MICROSECONDS,
        "dur": (event.end - event.start) * MICROSECONDS,
        "pid": event.rank,
        "tid": thread,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }
