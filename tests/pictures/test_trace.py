"""A trace for Perfetto has all that a timeline has."""

import json
from dataclasses import replace

from lightning_pipeoffload.pictures.trace import to_trace
from lightning_pipeoffload.schedule import Costs, add_final_actions, simulate
from tests.support.plans import plan

COSTS = Costs(0.5, 1, 2)


def trace_events(phase):
    trace = to_trace(simulate(plan("0F0 0BW0\n1F0 1BW0"), COSTS), COSTS)
    return [event for event in json.loads(json.dumps(trace))["traceEvents"] if event["ph"] == phase]


def test_seconds_become_microseconds():
    spans = {e["name"]: (e["ts"], e["dur"], e["pid"]) for e in trace_events("X")}
    assert spans == {
        "0F0": (0, 0.5e6, 0),
        "1F0": (0.5e6, 0.5e6, 1),
        "1BW0": (1e6, 3e6, 1),
        "0BW0": (4e6, 3e6, 0),
    }


def test_memory_is_a_counter_and_ranks_and_lanes_have_names():
    names = [(e["name"], e["pid"], e["args"]["name"]) for e in trace_events("M")]
    assert {("process_name", 1, "rank 1"), ("thread_name", 1, "compute")} <= {*names}
    steps = [(e["ts"], e["args"]["memory"]) for e in trace_events("C") if e["pid"] == 0]
    assert steps == [(0, 1), (7e6, 0)]


def test_reductions_have_a_lane():
    reduced = add_final_actions(plan("0F0 0BW0\n1F0 1BW0"))
    costs = replace(COSTS, reduce=4)
    events = to_trace(simulate(reduced, costs), costs)["traceEvents"]
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    [reduction] = [e for e in events if e["name"] == "1REDUCE0"]
    assert reduction["tid"] == threads["reduce"]
    assert (reduction["ts"], reduction["dur"], reduction["cat"]) == (4e6, 4e6, "REDUCE")
