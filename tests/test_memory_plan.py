"""What is planned before anything has run, and by what was measured."""

import pytest

from lightning_pipeoffload.memory_plan import plan_before_measuring, plan_by_costs
from lightning_pipeoffload.schedule import Costs, ScheduleError, peak_memory
from lightning_pipeoffload.settings import PipelineSettings

MIB = 1 << 20
COSTS = Costs(0.01, 0.01, 0.01, activation=float(MIB), offload=0.01, reload=0.01)


def measured(costs=COSTS, num_ranks=4, **options):
    return plan_by_costs(PipelineSettings(**options), num_ranks, 8, costs)


def test_without_a_wish_nothing_is_offloaded():
    schedule, report = plan_before_measuring(PipelineSettings(), 4, 8)
    assert not schedule.has_copies
    assert report is None


@pytest.mark.parametrize("offload", ["half", "full", 1.0, 0.5])
def test_what_is_asked_for_is_offloaded_from_the_first_step(offload):
    settings = PipelineSettings(schedule="gis", offload=offload)
    schedule, report = plan_before_measuring(settings, 4, 8)
    assert schedule.has_copies
    assert sum(report.offloaded) > 0


def test_under_a_limit_the_first_steps_offload_all_they_can():
    schedule, _ = plan_before_measuring(PipelineSettings("auto", memory_limit="1GiB"), 4, 8)
    assert schedule.has_copies


def test_a_limit_that_is_kept_anyway_costs_no_copies():
    schedule, report = measured(memory_limit="1GiB")
    assert not schedule.has_copies
    assert report is None


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "uniform"])
def test_a_tight_limit_is_met_by_offload(name):
    plain, _ = measured(schedule=name)
    limit = int(max(peak_memory(plain, COSTS))) - MIB
    schedule, report = measured(schedule=name, memory_limit=limit)
    assert schedule.has_copies
    assert max(report.peak_memory) <= limit


def test_a_schedule_that_keeps_a_limit_by_its_order_does_so_first():
    schedule, _ = measured(schedule="v", memory_limit=6 * MIB)
    assert not schedule.has_copies
    assert max(peak_memory(schedule, COSTS)) <= 6 * MIB


@pytest.mark.parametrize("offload", ["auto", "none", "full"])
def test_a_limit_that_nothing_meets_is_refused(offload):
    with pytest.raises(ScheduleError, match=r"memory_limit \(1\) is less than"):
        measured(schedule="1f1b", offload=offload, memory_limit=1)
