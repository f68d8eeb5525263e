"""The period of a steady step is that of many steps, one after the other."""

import pytest

from lightning_pipeoffload.schedule import (
    COMPUTE,
    Costs,
    add_final_actions,
    build,
    lower,
    offload_activations,
    period_bubble,
    simulate,
    simulate_steps,
    steady_period,
)

UNIT = Costs.unit()
UNEQUAL = Costs([1.0, 3.0, 2.0, 1.0], [2.0, 2.5, 1.0, 1.0], 1.0, communication=0.25)
COPIED = Costs(1, 1, 1, offload=0.4, reload=0.4)


def over_many(plan, costs, has_barrier, num_steps=60):
    """Return the mean of what a step adds, late in many."""
    few, many = (
        simulate_steps(plan, costs, count, has_barrier).makespan for count in (num_steps, 20)
    )
    return (few - many) / (num_steps - 20)


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("1f1b", UNIT),
        ("zb_h1", UNEQUAL),
        ("zb_h2", UNEQUAL),
        ("zb_2p", Costs(1, 1, 1, communication=0.5)),
        ("zb_v", UNIT),
        ("uniform", COPIED),
    ],
)
@pytest.mark.parametrize("has_barrier", [False, True])
def test_it_is_what_each_of_many_steps_adds(name, costs, has_barrier):
    plan = build(name, 4, 8)
    if costs is COPIED:
        plan, _ = offload_activations(plan, costs, "half")
    period = steady_period(plan, costs, has_barrier)
    assert period == pytest.approx(over_many(plan, costs, has_barrier), rel=1e-6)
    timeline = simulate(plan, costs)
    assert max(timeline.busy) <= period * (1 + 1e-9) <= timeline.makespan * (1 + 2e-9)
    if has_barrier:
        assert period == pytest.approx(timeline.makespan)


def test_without_a_barrier_the_papers_schedule_has_no_bubble():
    plan = build("zb_h2", 4, 8)
    period = steady_period(plan, UNIT, has_barrier=False)
    assert (period, simulate(plan, UNIT).makespan) == (24, 27)
    assert period_bubble(simulate(plan, UNIT), period) == 0


def test_a_lowered_plan_takes_as_long():
    plan = build("zb_2p", 3, 6)
    costs = Costs(1, 1, 1, communication=0.5)
    assert steady_period(lower(plan), costs, False) == steady_period(plan, costs, False)


def test_a_rank_waits_for_its_own_reduction():
    costs = Costs(1, 1, 1, reduce=5.0)
    plan = add_final_actions(build("zb_h2", 2, 4))
    assert steady_period(plan, costs, False) > steady_period(plan, Costs.unit(), False)


def test_ranks_that_settle_late_or_take_turns_are_told_by_their_mean():
    """The second rank is the slowest by a hair: the first runs ahead of it for many steps."""
    plan = build("1f1b", 2, 4)
    costs = Costs([1.0, 1.001], [1.0, 1.001], [1.0, 1.001])
    assert steady_period(plan, costs, False) == pytest.approx(
        over_many(plan, costs, False), rel=1e-3
    )


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


def test_one_rank_has_its_work_for_a_period():
    assert steady_period(build("1f1b", 1, 3), UNIT, has_barrier=False) == 9
