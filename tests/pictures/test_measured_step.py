"""A step of two ranks as it was measured: who waits for whom, what is idle, what is kept."""

import json

import pytest
from matplotlib.colors import to_hex

from lightning_pipeoffload.pictures import (
    RankStep,
    draw_measured,
    join_rank_steps,
    to_measured_trace,
)
from lightning_pipeoffload.schedule import Action, Costs, Kind, simulate
from tests.support.plans import plan

F0, F1 = (Action(Kind.F, stage, 0) for stage in range(2))
B0, BW1 = Action(Kind.B, 0, 0), Action(Kind.BW, 1, 0)
W0 = Action(Kind.W, 0, 0)
PLAN = plan("0F0 0B0 0W0\n1F0 1BW0")
WAIT, OF_B = "#f2b8b0", "#1497ad"
COSTS = Costs(1.0, 1.0, 1.0, activation=2**20)


@pytest.fixture
def measured():
    first = RankStep(
        [(F0, [(10.0, 11.0)]), (B0, [(11.0, 11.5), (15.0, 16.0)]), (W0, [(16.0, 17.0)])],
        [(F0, 4.0), (Action(Kind.OFFLOAD, 0, 0), 5.0), (B0, 2.0), (W0, 0.0)],
    )
    second = RankStep(
        [(F1, [(109.5, 110.0), (112.0, 113.0)]), (BW1, [(113.0, 115.0)])], [(F1, 3.0), (BW1, 0.0)]
    )
    return join_rank_steps([first, second.earlier_by(100.0)])


def test_a_wait_names_what_it_is_for(measured):
    waits = {(w.rank, w.action): (w.sender, w.awaited, w.start, w.end) for w in measured.waits}
    assert waits == {(0, B0): (1, BW1, 2.0, 5.5), (1, F1): (0, F0, 0.5, 2.5)}


def test_all_ranks_are_on_one_clock_and_a_wait_is_idle_time(measured):
    spans = {event.action: (event.start, event.end) for event in measured.timeline.events}
    assert (spans[F0], spans[F1], spans[BW1]) == ((0.5, 1.5), (2.5, 3.5), (3.5, 5.5))
    assert measured.timeline.makespan == 7.5
    assert measured.bubble == pytest.approx(1 - (3.5 + 3.5) / (2 * 7.5))
    assert measured.curves[0] == [(0, 0), (1.5, 4), (1.5, 5), (6.5, 2), (7.5, 0)]
    assert measured.timeline.peak_memory == (5.0, 3.0)


def test_the_picture_has_waits_and_the_plan_below(measured):
    figure = draw_measured(measured, simulate(PLAN, COSTS), COSTS, ("measured", "planned"))
    above, below = figure.axes
    assert (above.get_title(loc="left"), below.get_title(loc="left")) == ("measured", "planned")
    assert above.get_position().y0 > below.get_position().y1
    spans = {
        to_hex(bars.get_facecolor()[0]): [
            (path.get_extents().x0, path.get_extents().x1) for path in bars.get_paths()
        ]
        for bars in above.collections
        if to_hex(bars.get_facecolor()[0]) in (WAIT, OF_B)
    }
    assert spans[WAIT] == [(500, 2500)]  # the last of the ranks
    assert spans[OF_B] == [(1500, 2000), (5500, 6500)]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend.count("waits for another rank") == 1


def test_the_trace_has_a_process_for_each_rank_and_its_plan(measured):
    trace = to_measured_trace(measured, simulate(PLAN, COSTS), COSTS)
    entries = json.loads(json.dumps(trace))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    assert list(names.values()) == [
        *("rank 0 measured", "rank 1 measured"),
        *("rank 0 planned", "rank 1 planned"),
    ]
    assert sorted(names) == [0, 1, 2, 3]
    [wait] = [e for e in entries if e.get("cat") == "wait" and e["pid"] == 0]
    assert (wait["name"], wait["ts"], wait["dur"]) == ("waits for 1BW0 of rank 1", 2e6, 3.5e6)


def test_a_step_without_actions_is_drawn():
    nothing = join_rank_steps([RankStep([], [])])
    assert nothing.bubble == 0
    assert draw_measured(nothing, simulate(plan("0F0 0BW0"), COSTS), COSTS, ("", ""))
