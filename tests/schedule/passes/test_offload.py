"""Offload leaves less on the device, and hides its copies where there is time."""

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


def makespan(schedule, times):
    return simulate(schedule, times).makespan


def offloaded(p, v, k, amount, name="uniform", slowdown=1.03):
    """Return the largest peak of a rank with 4p microbatches, and check the time."""
    schedule = build(name, p, 4 * p, v)
    plan, report = offload_activations(schedule, costs(k), amount)
    timeline = simulate(plan, costs(k))
    assert timeline.makespan <= slowdown * makespan(schedule, costs(k))
    assert timeline.peak_memory == report.peak_memory
    return max(timeline.peak_memory)


@pytest.mark.parametrize(
    ("amount", "k", "p", "v", "peak"),
    [
        # All: a constant number is left.
        *(("full", 0.5, p, v, 3) for p, v in [(4, 2), (8, 2), (12, 3)]),
        *(("full", 0.7, p, v, 4) for p, v in [(6, 2), (8, 4)]),
        # Half: a quarter, and less than a third of many stages.
        *(("half", k, 8, v, peak) for v, peak in [(2, 6), (4, 9), (8, 13)] for k in (0.7, 1.0)),
        ("half", 0.7, 8, 16, 21),
        # Of an odd number of stages the larger half; half of the middle one would leave two more.
        *(("half", 1.0, p, v, peak) for p, v, peak in [(4, 3, 4), (8, 3, 5), (8, 5, 8), (8, 7, 9)]),
    ],
)
def test_offload_leaves(amount, k, p, v, peak):
    is_hidden = v % 2 and amount == "half"
    assert offloaded(p, v, k, amount, slowdown=1.0 if is_hidden else 1.03) <= peak


@pytest.mark.parametrize(("v", "k"), first(1, [(3, 1.2), (5, 1.4)]))
def test_half_is_the_half_that_leaves_the_smaller_peak(v, k):
    halves = [(v + 1) / 2 / v, 0.5, "half"]
    larger, exact, half = (offloaded(8, v, k, amount, "gis_h") for amount in halves)
    assert half == min(larger, exact)


@pytest.mark.parametrize("k", [1.4, 2.0])
def test_where_copies_are_late_as_many_go_as_make_the_peak_smallest(k):
    schedule = build("uniform", 8, 32, 4)
    plans = [offload_activations(schedule, costs(k), amount)[1] for amount in (0, "half", "full")]
    full = plans[-1]
    assert max(full.peak_memory) <= min(max(plan.peak_memory) for plan in plans)
    assert full.slowdown <= 1.03
    assert sum(full.wanted) == sum(full.offloaded) + sum(full.kept)
    assert "there is no time for more copies" in full.reason


@pytest.mark.parametrize("name", ["po_f", "zb_h1"])
@pytest.mark.parametrize(
    "seconds", [(0, 0, 0), (0, 1, 0), (1, 1, 0), (1e-9, 1e-9, 1e-9), (1e90, 1, 1)]
)
@pytest.mark.parametrize("copy", [0, 0.5])
def test_costs_of_any_size_make_a_plan(name, seconds, copy):
    """Where nothing takes time, too: copies still go to their places in the order."""
    times = Costs(*seconds, offload=copy, reload=copy)
    schedule = build(name, 2, 4, costs=times)
    if not schedule.has_copies:
        schedule, report = offload_activations(schedule, times, "full")
        assert report.slowdown <= 1.03
    validate(lower(schedule))


@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_what_waits_for_w_goes_to_the_host_where_that_is_long(name):
    """Half of the peak is in the queue, which whole activations do not touch."""
    times = costs(0.5, activation=65, weight_input=28)
    schedule = build(name, 8, 16)
    plan, report = offload_activations(schedule, times, "full")
    validate(plan)
    assert max(report.peak_memory) < max(peak_memory(schedule, times)) / 2
    assert report.slowdown <= 1.03
    assert sum(report.queued) > 0
    half, _ = offload_activations(build("zb_v", 4, 16), times, "half")
    assert {Kind.RELOAD_B, Kind.RELOAD_W} <= {action.kind for rank in half for action in rank}


@pytest.mark.parametrize(("name", "copies"), pairs([*SCHEDULES], [(0.0, 1), (1.8, 2), (1.8, 1)]))
def test_any_schedule_keeps_its_order_and_needs_no_more(name, copies):
    k, lanes = copies
    schedule, times = build(name, 4, 8), costs(k, copy_lanes=lanes)
    computed = Schedule.of([a for a in rank if a.kind not in COPIES] for rank in schedule)
    assert offload_activations(computed, times, "none")[0] == computed
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
    assert not plans[-1].is_paged
    if name == "1f1b":  # whose later ranks keep the limit
        assert plans[-1].offloaded[0] > 0 == sum(plans[-1].offloaded[2:])


@pytest.mark.parametrize(("name", "v"), [("uniform", 4), ("1f1b", 1), ("zb_v", 2)])
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("auto", 0.5), r"memory_limit \(0\.5\) .* use at least 1;? ?"),
        *(
            ((amount,), "must be none, half, full, auto, or a share")
            for amount in ("some", 1.5, -0.1)
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        offload_activations(build("uniform", 8, 32, 4), costs(0.7), *arguments)
