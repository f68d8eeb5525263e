"""When each action of a plan runs, and what it holds until when."""

from dataclasses import replace

import pytest

from lightning_pipeoffload.schedule import (
    COMPUTE,
    Costs,
    ScheduleError,
    Timeline,
    add_final_actions,
    add_transfers,
    build,
    lower,
    offload_activations,
    period_bubble,
    simulate,
    simulate_steps,
    split_fused_backward,
    steady_period,
)
from lightning_pipeoffload.schedule.simulation import host_memory_curves, memory_curves
from lightning_pipeoffload.schedule.timeline import earliest_free_start, merge_intervals
from tests.support.plans import SHAPES, plan

UNIT = Costs.unit()
UNEQUAL = Costs(3, 4, 2, communication=0.5, activation=10, weight_residue=7)
COPIES = "0F0 0OFFLOAD0 0F1 0FREE0 0F2 0B2 0W2 0RELOAD0 0B1 0W1 0B0 0W0"
TWO_COPIES = (
    "0F0 0OFFLOAD0 0FREE0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0W0 0FREE1 0RELOAD1 0B1 0W1 0B2 0W2"
)
LINKED = "0F0 0OFFLOAD0 0FREE0 0RELOAD0 0BW0\n1F0 1OFFLOAD0 1FREE0 1RELOAD0 1BW0"
PARTS = Costs(1, 1, 1, activation=10, weight_input=4, offload=10, reload=10)

TIMES = {
    "a hop takes the communication time": (
        "0F0 0BW0\n1F0 1BW0",
        Costs(1, 2, 4, communication=0.5),
        {"0F0": (0, 1), "1F0": (1.5, 2.5), "1BW0": (2.5, 8.5), "0BW0": (9, 15)},
    ),
    "a hop on one rank takes no time": (
        "0F0 1F0 1B0 0B0 1W0 0W0",
        Costs(1, 1, 1, communication=9),
        {"0W0": (5, 6)},
    ),
    "the sender is not held up": (
        "0F0 0F1\n1F0 1F1",
        Costs(1, 1, 1, communication=9),
        {"0F1": (1, 2)},
    ),
    "once lowered the neighbour does not wait for W": (
        str(lower(plan("0F0 0BW0\n1F0 1BW0"))),
        Costs(1, 2, 4, communication=0.5),
        {"1B0": (2.5, 4.5), "0BW0": (5, 11)},
    ),
    "every stage has its own costs": (
        "0F0 0B0 0W0\n1F0 1B0 1W0",
        Costs([1, 2], [3, 4], 5, communication=[0.5, 99]),
        {"1F0": (1.5, 3.5), "0B0": (8, 11)},
    ),
    "FREE waits for its copy and B for its reload": (
        COPIES,
        Costs(1, 1, 1, offload=5, reload=4),
        {"0OFFLOAD0": (1, 6), "0F2": (6, 7), "0RELOAD0": (9, 13), "0B0": (13, 14)},
    ),
    "directions take turns on one lane": (
        TWO_COPIES,
        Costs(1, 1, 1, offload=5, reload=4),
        {"0RELOAD0": (12, 16)},
    ),
    "and not on two": (
        TWO_COPIES,
        Costs(1, 1, 1, offload=5, reload=4, copy_lanes=2),
        {"0RELOAD0": (8, 12)},
    ),
    "a reload waits for its own offload": (
        "0F0 0OFFLOAD0 0FREE0 0RELOAD0 0BW0",
        Costs(1, 1, 1, offload=5, reload=4, copy_lanes=2),
        {"0RELOAD0": (6, 10)},
    ),
    "a part takes its share of the copy": (  # the gradients; the inputs are there still
        "0F0 0OFFLOAD0 0FREE0 0RELOAD_B0 0B0 0OFFLOAD_W0 0FREE_W0 0RELOAD_W0 0W0",
        PARTS,
        {"0RELOAD_B0": (11, 17), "0OFFLOAD_W0": (18, 24), "0RELOAD_W0": (24, 34)},
    ),
    "B waits for its part of a reload and W for all of it": (
        "0F0 0OFFLOAD0 0FREE0 0RELOAD0 0B0 0W0",
        PARTS,
        {"0RELOAD0": (11, 21), "0B0": (17, 18), "0W0": (21, 22)},
    ),
    "BW waits for all of it": ("0F0 0OFFLOAD0 0FREE0 0RELOAD0 0BW0", PARTS, {"0BW0": (21, 23)}),
    "ranks copy at the same time": (
        LINKED,
        Costs(1, 1, 1, offload=3, reload=1),
        {"0OFFLOAD0": (1, 4), "1OFFLOAD0": (2, 5)},
    ),
}


@pytest.mark.parametrize("row", TIMES)
def test_actions_run_when_what_they_need_is_there(row):
    text, costs, expected = TIMES[row]
    found = {str(e.action): (e.start, e.end) for e in simulate(plan(text), costs).events}
    assert {name: found[name] for name in expected} == expected


def test_figures():
    timeline = simulate(plan("0F0 0F1\n1F0 1F1"), Costs([1, 2], 1, 1))
    assert (timeline.makespan, timeline.busy, timeline.span) == (5, (2, 4), (2, 4))
    assert timeline.bubble == pytest.approx(1 - 6 / 10)
    assert timeline.bubble_unsynchronized == 0
    nothing = simulate(plan("0F0"), Costs(0, 0, 0))
    assert (nothing.bubble, nothing.bubble_unsynchronized) == (0, 0)


@pytest.mark.parametrize("name", SHAPES)
def test_transfers_change_no_time_and_nothing_waits_for_a_reduction(name):
    schedule = build(name, 4, 8)
    assert simulate(add_transfers(schedule), UNEQUAL) == simulate(schedule, UNEQUAL)
    lowered, costs = lower(schedule), replace(UNEQUAL, reduce=100)
    without, timeline = simulate(lowered, costs), simulate(add_final_actions(lowered), costs)
    others = [event for event in timeline.events if event.lane != "reduce"]
    assert others == list(without.events)
    assert {event.lane for event in without.events} <= {"compute", "d2h", "h2d"}
    assert (timeline.busy, timeline.peak_memory) == (without.busy, without.peak_memory)
    assert timeline.makespan > without.makespan
    assert timeline.bubble > without.bubble


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1}, r"costs.forward \(-1\) must be a number from 0 on"),
        ({"forward": "fast"}, r"costs.forward \(fast\) must be a number"),
        ({"reload": float("nan")}, r"costs.reload \(nan\) must be a number"),
        ({"reduce": [1, 2]}, "costs.reduce has 2 values, and the schedule 4 stages"),
        ({"activation": [1, -2]}, r"costs.activation \(\[1, -2\]\) must be a number"),
        ({"weight_input": 2}, r"costs.weight_input \(2\) is part of activation \(1\)"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(build("1f1b", 4, 4), Costs(**{**vars(Costs.unit()), **costs}))


def test_a_deadlock_is_not_timed():
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(plan("0BW0 0F0"), UNIT)


# Memory


@pytest.mark.parametrize(
    ("actions", "residue", "peak"),
    [
        ("0F0 0BW0", 7, 10),
        ("0F0 0F1 0B0 0B1 0W0 0W1", 7, 20),
        ("0F0 0F1 0B0 0B1 0W0 0W1", 12, 24),  # B adds 2 at its start
        ("0F0 0B0 0F1 0W0 0B1 0W1", 7, 17),
        ("0F0 0B0 0F1 0B1 0W0 0W1", None, 20),  # the activation stays until W
        ("0F0 0B0 0W0 0F1 0B1 0W1", 0, 10),
    ],
)
def test_peak_memory(actions, residue, peak):
    costs = Costs(1, 1, 1, activation=10, weight_residue=residue)
    assert simulate(plan(actions), costs).peak_memory == (peak,)


@pytest.mark.parametrize(
    ("text", "costs", "curve"),
    [
        ("0F0 0B0 0W0", Costs(1, 2, 3), [(0, 1), (3, 1), (6, 0)]),
        ("0F0 0B0 0W0", Costs(1, 2, 3, activation=4, weight_residue=1), [(0, 4), (3, 1), (6, 0)]),
        ("0F0 0B0 0W0", Costs(1, 2, 3, activation=4, weight_residue=5), [(0, 4), (1, 5), (6, 0)]),
        (
            "0F0 0OFFLOAD0 1F0 0FREE0 1BW0 0RELOAD0 0BW0",
            Costs(1, [2, 3], 3, offload=2, reload=1),
            [(0, 1), (1, 2), (3, 1), (9, 1), (15, 0)],
        ),
    ],
)
def test_memory_over_time(text, costs, curve):
    assert memory_curves(simulate(plan(text), costs), costs) == [curve]


def test_the_host_has_a_copy_from_the_start_of_offload_to_the_end_of_w():
    costs = Costs(1, 1, 1, activation=4, weight_input=1, offload=2, reload=1)
    timeline = simulate(plan("0F0 0OFFLOAD0 0FREE0 0RELOAD0 0B0 0W0"), costs)
    expected = [[(0.0, 0.0), (1.0, 4.0), (4.75, 1.0), (5.75, 0.0)]]
    assert host_memory_curves(timeline, costs) == expected
    assert timeline.peak_host_memory == (4,)


@pytest.mark.parametrize("name", SHAPES)
def test_the_highest_point_is_the_peak(name):
    timeline = simulate(build(name, 4, 8), UNIT)
    highest = tuple(max(m for _, m in curve) for curve in memory_curves(timeline, UNIT))
    assert highest == timeline.peak_memory
    assert memory_curves(Timeline((), (0.0,)), UNIT) == [[(0, 0)]]


# Reductions


@pytest.mark.parametrize(
    ("text", "costs", "seconds", "expected"),
    [
        # Rank 0 ends with one W, from 9 to 10; rank 1 with two, from 8 to 10. A reduction runs in
        # eight shares during its tail, and a short one ends a share after it.
        ("zb_h1 2 3", UNIT, 2, {0: (9.125, 11.125), 1: (8.25, 10.25)}),
        ("zb_h1 2 3", UNIT, 6, {0: (9.125, 15.125), 1: (8.25, 14.25)}),
        ("0F0 0F1 0F2 0B0 0B1 0B2 0W0 0W1 0W2 0REDUCE2", Costs(0, 0, 2), 1.6, {0: (0.75, 6.2)}),
        ("0F0 0F1 0F2 0B0 0B1 0B2 0W0 0W1 0W2 0REDUCE2", Costs(0, 0, 2), 12, {0: (0.75, 12.75)}),
        # Stage 0 ends BW at 6, or W; stage 1, which another rank waits for, ends W at 5.
        ("1f1b 2 1", UNIT, [3, 4], {0: (5, 8), 1: (3.125, 7.125)}),
        # Those of one rank take turns, and start when their rank comes to them.
        (
            "0F0 1F0 1B0 0B0 1W0 1REDUCE0 0W0 0REDUCE0",
            *(UNIT, [1, 5], {1: (4.125, 9.125), 0: (9.125, 10.125)}),
        ),
        (
            "0F0 1F0 1B0 0B0 1W0 1REDUCE0 0W0 0REDUCE0",
            *(UNIT, [3, 0.5], {1: (4.125, 5.0625), 0: (5.125, 8.125)}),
        ),
        ("0F0 1F0 1B0 0B0 1W0 0W0 1REDUCE0 0REDUCE0", UNIT, 1, {1: (6, 7), 0: (7, 8)}),
    ],
)
def test_reductions(text, costs, seconds, expected):
    if text[0] != "0":
        name, *sizes = text.split()
        text = str(add_final_actions(lower(build(name, *map(int, sizes)))))
    timeline = simulate(plan(text), replace(costs, reduce=seconds))
    events = [event for event in timeline.events if event.lane == "reduce"]
    assert {event.action.stage: (event.start, event.end) for event in events} == expected
    stepped = simulate(plan(text.replace("REDUCE", "STEP")), replace(costs, step=seconds))
    spans = [(event.start, event.end) for event in stepped.events if event.lane == "host"]
    assert sorted(spans) == sorted(expected.values())


def test_a_reduction_is_the_end_of_a_rank_and_no_work():
    timeline = simulate(plan("0F0 0BW0 0REDUCE0\n1F0 1BW0 1REDUCE0"), Costs(1, 1, 0, reduce=[6, 3]))
    assert (timeline.makespan, timeline.busy, timeline.span) == (10, (2, 2), (10, 5))
    assert timeline.bubble == pytest.approx(1 - 4 / 20)
    assert timeline.bubble_unsynchronized == pytest.approx(1 - 2 / 10)


# The period of a steady step is that of many steps, one after the other

UNEVEN = Costs([1.0, 3.0, 2.0, 1.0], [2.0, 2.5, 1.0, 1.0], 1.0, communication=0.25)
COPIED = Costs(1, 1, 1, offload=0.4, reload=0.4)


def over_many(plan, costs, has_barrier):
    """Return the mean of what a step adds, late in many."""
    many, few = (simulate_steps(plan, costs, n, has_barrier).makespan for n in (60, 20))
    return (many - few) / 40


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        *(("1f1b", UNIT), ("zb_h1", UNEVEN), ("zb_h2", UNEVEN), ("zb_v", UNIT)),
        *(("zb_2p", Costs(1, 1, 1, communication=0.5)), ("uniform", COPIED)),
    ],
)
@pytest.mark.parametrize("has_barrier", [False, True])
def test_the_period_is_what_each_of_many_steps_adds(name, costs, has_barrier):
    plan = build(name, 4, 8)
    if costs is COPIED:
        plan, _ = offload_activations(plan, costs, "half")
    period = steady_period(plan, costs, has_barrier)
    assert period == pytest.approx(over_many(plan, costs, has_barrier), rel=1e-6)
    split = split_fused_backward(plan)
    assert steady_period(lower(plan), costs, has_barrier) == steady_period(
        split, costs, has_barrier
    )
    timeline = simulate(plan, costs)
    assert max(timeline.busy) <= period * (1 + 1e-9) <= timeline.makespan * (1 + 2e-9)
    if has_barrier:
        assert period == pytest.approx(timeline.makespan)


def test_without_a_barrier_the_papers_schedule_has_no_bubble():
    plan = build("zb_h2", 4, 8)
    period = steady_period(plan, UNIT, has_barrier=False)
    assert (period, simulate(plan, UNIT).makespan) == (24, 27)
    assert period_bubble(simulate(plan, UNIT), period) == 0


def test_a_rank_waits_for_its_own_reduction():
    plan = add_final_actions(build("zb_h2", 2, 4))
    costs = replace(UNIT, reduce=5.0)
    assert steady_period(plan, costs, False) > steady_period(plan, UNIT, False)


def test_a_period_that_is_steady_late_is_a_mean():
    """The second rank is the slowest by a hair: the first runs ahead of it for many steps."""
    plan, costs = build("1f1b", 2, 4), Costs(*[[1.0, 1.001]] * 3)
    mean = over_many(plan, costs, False)
    assert steady_period(plan, costs, False) == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("has_barrier", [False, True])
def test_steps_follow_each_other_and_their_microbatches_are_numbered_on(has_barrier):
    plan = build("zb_h2", 3, 6)
    steps = simulate_steps(plan, UNIT, 3, has_barrier)
    assert steps.peak_memory == simulate(plan, UNIT).peak_memory
    for rank in range(3):
        events = [e for e in steps.events if e.rank == rank]
        assert all(a.end <= b.start for a, b in zip(events, events[1:], strict=False))
        ran = [e.action for e in events if e.action.kind in COMPUTE]
        again = [a._replace(microbatch=a.microbatch + 6 * n) for n in range(3) for a in plan[rank]]
        assert ran == again
    starts = [min(e.start for e in steps.events if e.action.microbatch == 6 * n) for n in range(3)]
    assert starts[1] == (simulate(plan, UNIT).makespan if has_barrier else 18)


# Free time on a lane

TAKEN = [(2.0, 3.0), (5.0, 8.0)]


def test_times_that_are_free_for_so_long():
    expected = {(0, 2): 0, (0, 3): 8, (1.5, 1): 3, (2.5, 2): 3, (4, 2): 8, (9, 1): 9}
    assert {given: earliest_free_start(*given, TAKEN) for given in expected} == expected
    assert earliest_free_start(1, 5, []) == 1
    assert merge_intervals([(5, 6), (0, 2), (1, 3), (3, 4), (5.5, 5.7)]) == [(0, 4), (5, 6)]
