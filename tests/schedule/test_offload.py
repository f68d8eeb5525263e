import pytest

from lightning_pipeoffload.schedule import (
    COPIES,
    SCHEDULES,
    Costs,
    Schedule,
    ScheduleError,
    build,
    lower,
    offload_activations,
    simulate,
    validate,
)


def costs(k, **others):
    """Equal times, and copies that take k times as long as the compute of a stage."""
    return Costs(1, 1, 1, offload=1.5 * k, reload=1.5 * k, **others)


def offloaded(p, v, k, amount, name="uniform"):
    schedule = build(name, p, 4 * p, v)
    plan, report = offload_activations(schedule, costs(k), amount)
    timeline, before = simulate(plan, costs(k)), simulate(schedule, costs(k))
    assert timeline.makespan <= 1.03 * before.makespan
    assert timeline.peak_memory == report.peak_memory
    return max(timeline.peak_memory)


@pytest.mark.parametrize(("k", "peak"), [(0.5, 3), (0.7, 4)])
@pytest.mark.parametrize(("p", "v"), [(8, 2), (8, 4)])
def test_full_offload_leaves_a_constant_number(p, v, k, peak):
    assert offloaded(p, v, k, "full") <= peak


@pytest.mark.parametrize("k", [0.7, 1.0])
@pytest.mark.parametrize(("p", "v", "peak"), [(8, 2, 6), (8, 4, 9), (8, 8, 13)])
def test_half_offload_leaves_a_quarter(p, v, peak, k):
    assert offloaded(p, v, k, "half") <= peak


def test_where_copies_are_late_fewer_are_offloaded():
    schedule = build("uniform", 8, 32, 4)
    _, report = offload_activations(schedule, costs(1.4), "full")
    assert report.num_stages < 4
    assert report.slowdown <= 1.03
    assert "instead of 4" in report.reason


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("k", [0.0, 1.8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_keeps_its_order_and_needs_no_more(name, k, lanes):
    schedule, times = build(name, 4, 8), costs(k, copy_lanes=lanes)
    computed = Schedule.of([a for a in rank if a.kind not in COPIES] for rank in schedule)
    plan, report = offload_activations(computed, times, "full")
    validate(plan)
    lower(plan)
    assert computed == Schedule.of([a for a in rank if a.kind not in COPIES] for rank in plan)
    assert max(report.peak_memory) <= max(simulate(computed, times).peak_memory)


def test_auto_offloads_what_the_limit_asks_for():
    schedule = build("uniform", 8, 32, 4)
    plans = [offload_activations(schedule, costs(0.7), "auto", limit)[1] for limit in (23, 9, 4)]
    assert [plan.num_stages for plan in plans] == [0, 2, 4]


def test_a_limit_that_cannot_be_met_is_refused_with_the_smallest_that_can():
    schedule = build("uniform", 8, 32, 4)
    with pytest.raises(ScheduleError, match=r"memory_limit \(1\) .* use at least 4"):
        offload_activations(schedule, costs(0.7), "auto", 1)


@pytest.mark.parametrize("amount", ["some", 1.5, -0.1])
def test_an_amount_that_is_none_is_refused(amount):
    with pytest.raises(ScheduleError, match="must be none, half, full, auto, or a share"):
        offload_activations(build("uniform", 2, 2), costs(1), amount)


def test_no_offload_changes_nothing():
    schedule = build("uniform", 2, 4)
    assert offload_activations(schedule, costs(1), "none")[0] == schedule
