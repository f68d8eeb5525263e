"""Memory limits that differ from rank to rank."""

from dataclasses import replace

import pytest

from lightning_pipeoffload.planning.plan_options import options_of
from lightning_pipeoffload.schedule import (
    Costs,
    MemoryLimitError,
    PlanRequest,
    RankLimits,
    device_indices,
    make_plan,
    peak_memory,
)
from lightning_pipeoffload.schedule.passes import as_executed
from lightning_pipeoffload.schedule.solver import PlanProblem, best_of_families

COSTS = Costs(30.0, 29.0, 20.0, 1.0, 17.0, 16.0, 10.0, 10.0, copy_lanes=2)
NAMES = ("big", "middle", "small")
FAST_FIRST = 90.0, 60.0, 30.0


def request(memory, schedule="auto", num_ranks=3, **options):
    return PlanRequest(
        num_ranks,
        options_of(schedule, [9], None),
        lambda option: COSTS if option.num_chunks == 1 else halved(option),
        memory,
        device_names=NAMES,
        omits_above=float("inf"),
        **options,
    )


def halved(option):
    share = 1 / option.num_chunks
    names = (
        *("forward", "backward_input", "backward_weight"),
        *("activation", "weight_residue", "offload", "reload"),
    )
    return replace(COSTS, **{name: share * getattr(COSTS, name) for name in names})


@pytest.mark.parametrize("offload", ["auto", "none"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb", "zb_v", "interleaved_1f1b", "auto"])
@pytest.mark.parametrize("memory", [FAST_FIRST, (34.0, 52.0, 70.0)])
def test_each_rank_keeps_its_own_limit(memory, schedule, offload):
    asked = request(memory, schedule, offload=offload)
    too_much = dict.fromkeys(("1f1b", "interleaved_1f1b"), memory == FAST_FIRST)
    if offload == "none" and too_much.get(schedule):
        with pytest.raises(MemoryLimitError, match=r"of rank \d, on device \d"):
            make_plan(asked)
        return
    plan = make_plan(asked)
    peaks = peak_memory(as_executed(plan.schedule, plan.costs, False), plan.costs)
    places = device_indices(plan.schedule.placement)
    limits = [memory[place] for place in places]
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, limits, strict=True))
    assert max(peaks) == pytest.approx(plan.best.peak_memory)
    if plan.report is not None:
        assert max(plan.report.peak_memory) <= max(memory) * (1 + 1e-9)


def test_a_plan_for_unlike_limits_is_no_slower_than_one_for_the_smallest():
    for schedule in ("zb", "zb_v", "1f1b"):
        own = make_plan(request((90.0, 60.0, 30.0), schedule)).best.period
        assert own <= make_plan(request(30.0, schedule)).best.period * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["zb", "auto", "1f1b"])
def test_equal_limits_are_one_limit(schedule):
    one, three = make_plan(request(40.0, schedule)), make_plan(request((40.0,) * 3, schedule))
    assert (one.schedule, one.costs, one.best) == (three.schedule, three.costs, three.best)


@pytest.mark.parametrize(
    ("schedule", "least"), [("1f1b", "at least 17"), ("auto", r"at least 4\.25")]
)
def test_what_fits_no_rank_names_that_rank_and_its_device(schedule, least):
    with pytest.raises(MemoryLimitError, match=least) as refused:
        make_plan(request((90.0, 90.0, 3.0), schedule))
    assert "memory_limit (3) of rank " in str(refused.value)
    assert "on device 2 (small), is less than" in str(refused.value)


def test_what_the_solver_refuses_names_the_rank_with_its_own_numbers():
    limits = RankLimits((60.0, 60.0, 10.0), (0, 1, 2))
    with pytest.raises(MemoryLimitError) as refused:
        best_of_families(
            PlanProblem(8, (0, 1, 2), limits.scale_to_common_limit(COSTS), limits.common_limit)
        )
    error = limits.error_of_tightest_rank(refused.value, COSTS)
    assert str(error).startswith("memory_limit (10) of rank 2, on device 0, is less than any of ")
    assert str(error).endswith("use at least 17")


def test_the_solver_starts_within_each_ranks_limit():
    limits = RankLimits((60.0, 60.0, 20.0), (0, 1, 2))
    problem = PlanProblem(8, (0, 1, 2), limits.scale_to_common_limit(COSTS), limits.common_limit)
    peaks = peak_memory(best_of_families(problem), COSTS)
    assert all(peak <= limit for peak, limit in zip(peaks, limits.limits, strict=True))
