from dataclasses import replace

import pytest

from lightning_pipeoffload.schedule import (
    Costs,
    ScheduleError,
    build,
    check_schedule,
    families,
    simulate,
    steady_period,
)
from lightning_pipeoffload.schedule.solver import PlanProblem, best_of_families, optpipe, plan_model

COSTS = Costs(30.0, 29.0, 20.0, 1.0, 17.0, 16.0, 20.0, 20.0, copy_lanes=2)


def solve(costs, limit, folder, seconds, num_ranks=2, num_microbatches=4, num_chunks=None):
    sizes, options = (num_ranks, num_microbatches, num_chunks), {"plan_cache": folder}
    plan = build("optpipe", *sizes, costs, limit, solver_seconds=seconds, **options)
    check_schedule(plan, costs, limit)
    return plan


def of_families(costs, limit, num_ranks=2, num_microbatches=4, num_chunks=1):
    placement = optpipe.optpipe_placement(num_ranks, num_chunks)
    return best_of_families(PlanProblem(num_microbatches, placement, costs, limit))


def refuse_to_solve(*arguments):
    raise AssertionError("solved")


def test_a_plan_is_shorter_than_that_of_any_family(tmp_path):
    plan = solve(COSTS, 34.0, tmp_path, 4, num_ranks=3, num_microbatches=6)
    family = of_families(COSTS, 34.0, num_ranks=3, num_microbatches=6)
    assert simulate(plan, COSTS).makespan < simulate(family, COSTS).makespan
    assert plan.name == "optpipe"


def test_where_ranks_do_not_wait_between_steps_the_period_becomes_shorter():
    costs = replace(COSTS, copy_lanes=1)
    problem = PlanProblem(6, (0, 1, 2), costs, 34.0, has_barrier=False)
    family = best_of_families(problem)
    better = []
    improvement = optpipe.PlanImprover(problem, family, better.append)
    improvement.improve(2.0)
    check_schedule(improvement.plan, costs, 34.0)
    periods = [steady_period(plan, costs, has_barrier=False) for plan in (family, *better)]
    assert periods == sorted(periods, reverse=True)
    assert improvement.seconds == periods[-1] < 0.99 * periods[0]


VARIANTS = {
    "one lane": (replace(COSTS, copy_lanes=1), 34.0, 1),
    "parts for W": (replace(COSTS, weight_input=6.0), 25.0, 1),
    "B adds memory": (replace(COSTS, weight_residue=25.0), 44.0, 1),
    "uneven stages": (replace(COSTS, forward=(30.0, 45.5), activation=(17.5, 20.25)), 41.0, 1),
    "seconds and bytes": (Costs(3.1e-3, 2.9e-3, 2e-3, 1e-4, 3e9, 2e9, 2e-3, 2e-3), 6e9, 1),
    "free F": (replace(COSTS, forward=0.0), 20.0, 1),
    "free W": (replace(COSTS, backward_weight=0.0), 34.0, 1),
    "a V": (COSTS, 70.0, 2),
    "three chunks": (COSTS, 90.0, 3),
}


@pytest.mark.parametrize(("costs", "limit", "num_chunks"), VARIANTS.values(), ids=VARIANTS)
def test_every_plan_is_valid_and_keeps_its_limit(costs, limit, num_chunks, tmp_path):
    plan = solve(costs, limit, tmp_path, 0.7, num_microbatches=4, num_chunks=num_chunks)
    family = of_families(costs, limit, num_chunks=num_chunks)
    assert simulate(plan, costs).makespan <= simulate(family, costs).makespan


def test_the_second_time_it_is_read_and_not_solved(tmp_path, monkeypatch):
    first = solve(COSTS, 34.0, tmp_path, 0.5, num_ranks=3, num_microbatches=12)
    build_once = families._build_once
    build_once.cache_clear()
    monkeypatch.setattr(optpipe.PlanImprover, "improve", refuse_to_solve)
    assert solve(COSTS, 34.0, tmp_path, 0.5, num_ranks=3, num_microbatches=12) == first
    build_once.cache_clear()
    with pytest.raises(AssertionError, match="solved"):  # more time may find more
        solve(COSTS, 34.0, tmp_path, 5.0, num_ranks=3, num_microbatches=12)


def test_where_a_family_is_at_the_bound_nothing_is_solved(tmp_path, monkeypatch):
    monkeypatch.setattr(optpipe.PlanImprover, "improve", refuse_to_solve)
    plan = solve(COSTS, None, tmp_path, 60, num_ranks=4, num_microbatches=8)
    assert simulate(plan, COSTS).makespan == 725
    assert not list(tmp_path.iterdir())


def test_a_near_plan_is_a_start(tmp_path, monkeypatch):
    near = solve(COSTS, 34.0, tmp_path, 4, num_ranks=3, num_microbatches=6)
    monkeypatch.setattr(optpipe, "PlanModel", refuse_to_solve)
    costs = replace(COSTS, forward=32.0)
    plan = solve(costs, 34.0, tmp_path, 0.0, num_ranks=3, num_microbatches=6)
    assert simulate(plan, costs).makespan <= simulate(near, costs).makespan


@pytest.mark.parametrize(
    ("limit", "seconds", "message"),
    [
        (16.0, 1, r"memory_limit \(16\) is less than .* at least 17"),
        *(
            (34.0, seconds, "solver_seconds .* must be a number from 0 on")
            for seconds in (-1, float("inf"), "60", True)
        ),
    ],
)
def test_what_cannot_be_is_refused(limit, seconds, message, tmp_path):
    with pytest.raises(ScheduleError, match=message):
        solve(COSTS, limit, tmp_path, seconds)


def test_without_the_extra_it_is_refused_with_the_line_for_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_model, "find_spec", lambda name: None)
    with pytest.raises(ScheduleError, match=r"pip install 'lightning-pipeoffload\[solver\]'"):
        solve(COSTS, 34.0, tmp_path, 1)


FIGURES = [(4, 8, 2, 0.5, 795), (4, 8, 1, 0.5, 797), (8, 16, 2, 0.25, 1670)]


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m", "lanes", "share", "most"), FIGURES)
def test_a_minute_gains_what_it_should(p, m, lanes, share, most, tmp_path):
    costs = replace(COSTS, copy_lanes=lanes)
    plan = solve(costs, share * 17 * p, tmp_path, 60, num_ranks=p, num_microbatches=m)
    assert simulate(plan, costs).makespan <= most


@pytest.mark.slow
def test_long_steps_are_solved_in_windows(tmp_path):
    limit = 0.25 * 17 * 8
    plan = solve(COSTS, limit, tmp_path, 40, num_ranks=8, num_microbatches=32)
    family = of_families(COSTS, limit, num_ranks=8, num_microbatches=32)
    assert simulate(plan, COSTS).makespan < simulate(family, COSTS).makespan
