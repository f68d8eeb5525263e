import pytest

from lightning_pipeoffload.schedule import (
    COPIES,
    SCHEDULES,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    build,
    lower,
    offload_activations,
    peak_memory,
    simulate,
    validate,
)
from tests.support.pairs import first, pairs


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


@pytest.mark.parametrize(
    ("ratio", "size"), pairs([(0.5, 3), (0.7, 4)], [(4, 2), (6, 2), (8, 2), (8, 4), (12, 3)])
)
def test_full_offload_leaves_a_constant_number(ratio, size):
    (k, peak), (p, v) = ratio, size
    assert offloaded(p, v, k, "full") <= peak


@pytest.mark.parametrize("k", [0.7, 1.0])
@pytest.mark.parametrize(("p", "v", "peak"), [(8, 2, 6), (8, 4, 9), (8, 8, 13)])
def test_half_offload_leaves_a_quarter(p, v, peak, k):
    assert offloaded(p, v, k, "half") <= peak


@pytest.mark.parametrize(
    ("p", "v", "peak"), [(4, 3, 4), (4, 5, 5), (8, 3, 5), (8, 5, 8), (8, 7, 9)]
)
def test_half_of_an_odd_number_of_stages_is_the_larger_half(p, v, peak):
    """At k = 1; half of the stage in the middle would leave two activations more with 8 ranks."""
    schedule = build("uniform", p, 4 * p, v)
    plan, report = offload_activations(schedule, costs(1.0), "half")
    timeline = simulate(plan, costs(1.0))
    assert max(timeline.peak_memory) == max(report.peak_memory) <= peak
    assert timeline.makespan == makespan(schedule, costs(1.0))


@pytest.mark.parametrize(("v", "k"), first(1, [(3, 1.2), (5, 1.0), (5, 1.4)]))
def test_half_is_the_half_that_leaves_the_smaller_peak(v, k):
    halves = [(v + 1) / 2 / v, 0.5, "half"]
    larger, exact, half = (offloaded(8, v, k, amount, "gis_h") for amount in halves)
    assert half == min(larger, exact)


def test_half_of_many_stages_leaves_less_than_a_third():
    assert offloaded(8, 16, 0.7, "half") <= 21


@pytest.mark.parametrize("k", [1.4, 2.0])
def test_where_copies_are_late_as_many_go_as_make_the_peak_smallest(k):
    schedule = build("uniform", 8, 32, 4)
    plans = [offload_activations(schedule, costs(k), amount)[1] for amount in (0, "half", "full")]
    full = plans[-1]
    assert max(full.peak_memory) <= min(max(plan.peak_memory) for plan in plans)
    assert full.slowdown <= 1.03
    assert sum(full.wanted) == sum(full.offloaded) + sum(full.kept)
    assert "there is no time for more copies" in full.reason


@pytest.mark.parametrize("name", ["po_h", "po_f", "zb_h1"])
@pytest.mark.parametrize(
    "seconds", [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1e-9, 1e-9, 1e-9), (1e90, 1, 1)]
)
@pytest.mark.parametrize("copy", [0, 1])
def test_costs_of_any_size_make_a_plan(name, seconds, copy):
    """Where nothing takes time, too: copies still go to their places in the order."""
    times = Costs(*seconds, offload=copy, reload=copy)
    schedule = build(name, 2, 4, costs=times)
    if not schedule.has_copies:
        schedule, report = offload_activations(schedule, times, "full")
        assert report.slowdown <= 1.03
    validate(lower(schedule))


def test_half_of_a_single_stage_is_every_other_microbatch():
    plan, report = offload_activations(build("1f1b", 8, 32), costs(0.5), "half")
    away = [a.microbatch for a in plan[0] if a.kind is Kind.OFFLOAD]
    assert away == list(range(1, 32, 2))
    assert report.peak_memory[0] <= 6


@pytest.mark.parametrize("name", ["zb_h1", "zb_2p", "zb_v"])
def test_what_waits_for_w_goes_to_the_host_where_that_is_long(name):
    """Half of the peak is in the queue, which whole activations do not touch."""
    times = costs(0.5, activation=65, weight_input=28)
    schedule = build(name, 8, 16)
    plan, report = offload_activations(schedule, times, "full")
    validate(plan)
    assert max(report.peak_memory) < max(peak_memory(schedule, times)) / 2
    assert report.slowdown <= 1.03
    assert sum(report.queued) > 0


def test_what_only_w_needs_comes_back_for_w():
    plan, report = offload_activations(
        build("zb_v", 4, 16), costs(0.7, activation=65, weight_input=28), "half"
    )
    kinds = {action.kind for rank in plan for action in rank}
    assert {Kind.RELOAD_B, Kind.RELOAD_W} <= kinds


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("name", "v"), [("uniform", 4), ("zb_2p", 1)])
def test_ranks_that_share_a_link_take_turns(name, v, lanes):
    schedule = build(name, 4, 16, v)
    times = costs(0.9, copy_lanes=lanes, ranks_per_link=2)
    _, report = offload_activations(schedule, times, "full")
    unaware, _ = offload_activations(schedule, costs(0.9, copy_lanes=lanes), "full")
    assert report.slowdown <= 1.03 < makespan(unaware, times) / makespan(schedule, times)
    assert max(report.peak_memory) <= max(peak_memory(schedule, times))


def makespan(schedule, times):
    return simulate(schedule, times).makespan


@pytest.mark.parametrize(("name", "copies"), pairs([*SCHEDULES], [(0.0, 1), (1.8, 2), (1.8, 1)]))
def test_any_schedule_keeps_its_order_and_needs_no_more(name, copies):
    k, lanes = copies
    schedule, times = build(name, 4, 8), costs(k, copy_lanes=lanes)
    computed = Schedule.of([a for a in rank if a.kind not in COPIES] for rank in schedule)
    plan, report = offload_activations(computed, times, "full")
    validate(plan)
    lower(plan)
    assert computed == Schedule.of([a for a in rank if a.kind not in COPIES] for rank in plan)
    assert max(report.peak_memory) <= max(simulate(computed, times).peak_memory)


@pytest.mark.parametrize(("name", "least"), [("uniform", 4), ("zb_2p", 12), ("1f1b", 6)])
def test_auto_offloads_as_little_as_the_limit_asks_for(name, least):
    schedule, times = build(name, 8, 16), costs(0.7)
    limits = [max(peak_memory(schedule, times)), least + 1, least]
    plans = [offload_activations(schedule, times, "auto", limit)[1] for limit in limits]
    assert all(max(p.peak_memory) <= limit for p, limit in zip(plans, limits, strict=True))
    counts = [sum(plan.offloaded) + sum(plan.queued) for plan in plans]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert plans[-1].slowdown <= 1.03


def test_a_rank_that_keeps_the_limit_offloads_nothing():
    _, report = offload_activations(build("1f1b", 8, 16), costs(0.7), "auto", 6)
    assert report.offloaded[0] > 0
    assert not any(report.offloaded[2:])


def test_a_limit_that_cannot_be_met_is_refused_with_the_smallest_that_can():
    schedule = build("uniform", 8, 32, 4)
    with pytest.raises(ScheduleError, match=r"memory_limit \(0\.5\) .* use at least 1;? ?"):
        offload_activations(schedule, costs(0.7), "auto", 0.5)


@pytest.mark.parametrize(("name", "v"), [("uniform", 4), ("1f1b", 1), ("zb_v", 2), ("gpipe", 1)])
@pytest.mark.parametrize("sizes", [{}, {"weight_input": 0.3, "weight_residue": 0.8}])
def test_where_hidden_copies_do_not_keep_a_limit_ranks_wait_for_them(name, v, sizes):
    schedule, times = build(name, 4, 8, v), costs(0.7, **sizes)
    plan, report = offload_activations(schedule, times, "auto", 1)
    validate(lower(plan))
    timeline = simulate(plan, times)
    assert report.is_paged
    assert max(timeline.peak_memory) <= 1 + 1e-9
    assert report.peak_memory == timeline.peak_memory
    assert report.slowdown == makespan(plan, times) / makespan(schedule, times) > 1.03
    kinds = [{action.kind for action in rank} for rank in plan]
    assert [Kind.OFFLOAD in k for k in kinds] == [n > 0 for n in report.offloaded]


def test_a_limit_that_hidden_copies_keep_is_not_paged():
    _, report = offload_activations(build("uniform", 4, 16, 4), costs(0.7), "auto", 5)
    assert not report.is_paged
    assert report.slowdown <= 1.03


@pytest.mark.parametrize("amount", ["some", 1.5, -0.1])
def test_an_amount_that_is_none_is_refused(amount):
    with pytest.raises(ScheduleError, match="must be none, half, full, auto, or a share"):
        offload_activations(build("uniform", 2, 2), costs(1), amount)


def test_no_offload_changes_nothing():
    schedule = build("uniform", 2, 4)
    assert offload_activations(schedule, costs(1), "none")[0] == schedule


def test_what_takes_no_time_is_done_all_the_same():
    times = Costs(1, 1, 0, offload=0.5, reload=0.5)
    plan, _ = offload_activations(build("zb_h1", 2, 4), times, "full")
    validate(plan)
