"""``schedule="auto"`` takes what the best hand would: the fastest plan of all that fit."""

from dataclasses import replace
from math import inf

import pytest

from lightning_pipeoffload.schedule import (
    FAMILIES,
    Costs,
    MemoryLimitError,
    PlanOption,
    PlanRequest,
    ScheduleError,
    as_executed,
    best_candidate,
    build,
    build_from_recipe,
    make_plan,
    offload_activations,
    options,
    peak_memory,
    simulate,
    split_fused_backward,
    steady_period,
    validate,
)
from lightning_pipeoffload.schedule.solver import PlanProblem, best_of_families, span_lower_bound
from tests.support.pairs import first, slow
from tests.support.plans import WHOLE

SIZES = (2, 6)


def planned(*arguments, **more):
    return make_plan(PlanRequest(*arguments, **more))


def costs_by_chunk(**more):
    """Return what makes the stages of a rank share its 30 of F, 29 of B and 20 of W."""

    def costs_of(option):
        n = option.num_chunks
        times = {"forward": 30 / n, "backward_input": 29 / n, "backward_weight": 20 / n}
        copies = {name: more.get(name, 20) / n for name in ("offload", "reload")}
        rest = {"communication": 1, "activation": 17 / n, "weight_residue": 16 / n}
        return Costs(**times, **copies, **rest, copy_lanes=more.get("copy_lanes", 2))

    return costs_of


def by_hand(costs_of, limit):
    """Yield the time of every plan that fits, made one by one."""
    for option in options([SIZES[1]]):
        costs = costs_of(option)
        sizes = (*SIZES, option.num_chunks, costs)
        for copies in (False, True):
            try:
                plan = build(option.schedule, *sizes, None if copies else limit)
                if copies:
                    plan, _ = offload_activations(plan, costs, "auto", limit)
            except ScheduleError:
                continue
            yield simulate(split_fused_backward(plan), costs).makespan


@pytest.mark.parametrize(
    ("share", "links"),
    first(1, [(0.5, {}), (1.5, {}), (0.5, {"offload": 60, "reload": 60, "copy_lanes": 1})]),
    ids=["tight", "loose", "slow links"],
)
def test_no_hand_finds_a_plan_that_is_a_percent_faster(share, links):
    limit, costs_of = share * SIZES[0] * 17, costs_by_chunk(**links)
    asked = SIZES[0], options([SIZES[1]]), costs_of, limit
    best = planned(*asked, has_barrier=lambda option: True).best
    assert best.makespan <= 1.01 * min(by_hand(costs_of, limit))
    validate(best.schedule)
    assert max(peak_memory(best.schedule, costs_of(best.option))) <= limit * (1 + 1e-9)


def test_every_family_is_among_the_candidates_and_says_why_it_was_not_taken():
    choice = planned(SIZES[0], options([SIZES[1]]), costs_by_chunk(), 17)
    assert {c.option.schedule for c in choice.candidates} == {*WHOLE}
    assert [c for c in choice.candidates if not c.reason] == [choice.best]
    assert choice.best == best_candidate(choice.candidates)


@pytest.mark.parametrize("weight_share", [0, 0.01])
def test_a_frozen_base_with_adapters_gets_a_plan_of_several_stages_per_rank(weight_share):
    def costs_of(option):
        seconds = 1 / option.num_chunks
        return Costs(seconds, seconds, seconds * weight_share)

    best = planned(4, options([16], most_chunks=2), costs_of).best
    naive = 4 * 16 * (2 + weight_share)  # where one rank computes at a time
    assert naive / best.period >= 3.65  # 1F1B has 3.37
    assert best.option.num_chunks == 2


@pytest.mark.parametrize(("p", "m", "most"), [(2, 6, 714), (4, 8, 1074)])
def test_a_limit_of_one_activation_is_kept_by_waiting_for_copies(p, m, most):
    """And what a solver starts from is what ``auto`` takes: there is one list of plans."""
    costs = costs_by_chunk()(PlanOption("1f1b", 1, m))
    wanted = options([m], num_chunks=1)
    barrier = {"has_barrier": lambda option: True}
    choice = planned(p, wanted, lambda option: costs, 17, **barrier)
    assert choice.best.offload == "paged"
    assert choice.best.makespan <= most
    assert max(peak_memory(choice.best.schedule, costs)) <= 17
    start = best_of_families(PlanProblem(m, tuple(range(p)), costs, 17))
    assert simulate(start, costs).makespan == choice.best.makespan


@pytest.mark.parametrize(("share", "is_bound"), [(0.5, True), (1.5, True), (40, False)])
def test_a_limit_binds_where_it_excludes_a_plan(share, is_bound):
    asked = SIZES[0], options([SIZES[1]]), costs_by_chunk()
    limited = planned(*asked, share * SIZES[0] * 17, omits_above=inf)
    assert limited.is_limited_by_memory is is_bound
    if not is_bound:
        assert limited.best.period <= planned(*asked, omits_above=inf).best.period


def test_what_b_adds_counts_against_the_limit_of_every_plan():
    costs = Costs(30, 29, 20, 1, 17, 25, 20, 20, copy_lanes=2)
    choice = planned(4, options([8], num_chunks=1), lambda option: costs, 34)
    for candidate in choice.candidates:
        if candidate.fits:
            plan = split_fused_backward(candidate.schedule)
            assert max(peak_memory(plan, costs)) <= 34 * (1 + 1e-9)


def test_of_about_equal_plans_that_which_copies_nothing_and_needs_less_is_taken():
    candidates = planned(2, options([8]), lambda option: Costs.unit()).candidates
    assert best_candidate(candidates).offload == "none"
    fastest = min(c.period for c in candidates if c.fits)
    least = min(c.peak_memory for c in candidates if c.fits and c.period == fastest)
    assert best_candidate(candidates).peak_memory == least


def test_a_limit_that_nothing_keeps_is_refused_with_the_least():
    with pytest.raises(MemoryLimitError, match=r"any of \d+ plans needs; use at least 1"):
        planned(2, options([4], num_chunks=1), lambda option: Costs.unit(), 0.1)


def test_what_cannot_be_cut_is_left_out():
    def costs_of(option):
        if option.num_chunks > 1:
            raise ScheduleError("there are too few blocks")
        return Costs.unit()

    choice = planned(2, options([4], 2), costs_of)
    assert choice.best.option.num_chunks == 1
    refused = [c.reason for c in choice.candidates if c.option.num_chunks == 2]
    assert {*refused} == {
        "there are too few blocks",
        "not searched for: it is for tight limits, and there is none",
    }


def test_hosts_without_room_get_a_plan_without_copies():
    asked = SIZES[0], options([SIZES[1]]), costs_by_chunk(), 17
    choice = planned(*asked, describe_host_shortage=lambda schedule, costs: "no room")
    assert not choice.best.schedule.has_copies


def test_a_share_is_offloaded_by_every_candidate():
    wanted = [PlanOption("1f1b", 1, 4), PlanOption("po_h", 2, 4)]
    costs_of = costs_by_chunk(offload=1, reload=1)
    choice = planned(2, wanted, costs_of, offload="half")
    assert choice.best.schedule.has_copies
    assert "has copies of its own" in choice.candidates[1].reason


@pytest.mark.parametrize(
    ("p", "wanted", "has_barrier", "name", "times"),
    [
        (4, [("zb_h1", 1), ("zb_h2", 1)], False, "zb_h2", (24, 27)),
        (4, [("zb_h1", 1), ("zb_h2", 1)], True, "zb_h1", (27, 27)),
        (3, [("gis", 4), ("zb_v", 2)], False, "zb_v", (24, 25)),  # which takes longer alone
        (3, [("gis", 4), ("zb_v", 2)], True, "gis", (24.5, 24.5)),
    ],
)
def test_the_period_decides_where_no_rank_waits_between_steps(p, wanted, has_barrier, name, times):
    wanted = [PlanOption(*each, 8) for each in wanted]
    barrier = {"has_barrier": lambda option: has_barrier}
    best = planned(p, wanted, lambda o: Costs(*[1 / o.num_chunks] * 3), **barrier).best
    assert best.option.schedule == name
    assert (best.period, best.makespan) == pytest.approx(times)


@pytest.mark.parametrize("has_barrier", [True, False])
@pytest.mark.parametrize("limit", [17, 34])
def test_a_solver_starts_no_slower_than_the_best_of_all_cuts(limit, has_barrier):
    asked = SIZES[0], options([SIZES[1]]), costs_by_chunk(offload=7, reload=7), limit
    choice = planned(*asked, has_barrier=lambda option: has_barrier)
    given = choice.schedule.placement, choice.costs, limit, has_barrier
    problem = PlanProblem(SIZES[1], *given)
    assert problem.seconds(best_of_families(problem)) <= choice.best.period * (1 + 1e-9)


@pytest.mark.parametrize(
    ("longer", "limit"), [(1.5, None), *map(slow, [(1.0, None), (1.5, 51.0), (1.0, 27.2)])]
)
def test_what_bounds_leave_out_is_never_the_best(longer, limit):
    def costs_of(option):
        chunks, num_stages = option.num_chunks, 4 * option.num_chunks
        again = {"none": 1.0, "cheap": 1.1, "full": 1.3}[option.recompute]
        seconds = [(longer if s == num_stages // 2 else 1.0) / chunks for s in range(num_stages)]
        forward, backward, weight = ([n * each for each in seconds] for n in (30, 29 * again, 20))
        kept = {"none": 17.0, "cheap": 12.0, "full": 3.0}[option.recompute] / chunks
        sizes = {"activation": kept, "weight_residue": kept * 0.9}
        return Costs(
            forward, backward, weight, 1.0, **sizes, offload=20 / chunks, reload=20 / chunks
        )

    wanted = options([4, 8], recompute=("none", "cheap", "full"))
    table, fewer = (
        make_plan(PlanRequest(4, wanted, costs_of, limit, omits_above=above))
        for above in (None, inf)
    )
    assert (fewer.best, fewer.schedule) == (table.best, table.schedule)
    assert {c.option for c in fewer.candidates} == {*wanted}
    assert sum(c.fits for c in fewer.candidates) < sum(c.fits for c in table.candidates)


def test_what_needs_least_memory_shows_that_others_need_not_be_built(monkeypatch):
    built = []

    def build_one(*arguments, **more):
        built.append(arguments)
        return build_from_recipe(*arguments, **more)

    monkeypatch.setitem(make_plan.__globals__, "build_from_recipe", build_one)
    kept = {"none": 17.0, "cheap": 12.0, "full": 3.0}

    def costs_of(option):
        costs, size = costs_by_chunk()(option), kept[option.recompute] / option.num_chunks
        return replace(costs, activation=size, weight_residue=size)

    wanted = options([4, 8], recompute=kept)
    found = planned(2, wanted, costs_of, 10.0, omits_above=inf)
    assert found.best.option.recompute == "full"
    assert len(built) < 0.6 * len(wanted)


@pytest.mark.parametrize("offload", ["none", 0.0])
def test_where_nothing_is_offloaded_weight_gradients_are_postponed(offload):
    costs, wanted = Costs(1, 1, 1, step=4.0), [PlanOption("zb_h1", 1, 4)]
    more = {"offload": offload, "steps_early": True}
    choice = planned(2, wanted, lambda option: costs, **more)
    assert [c.postponed for c in choice.candidates] == [0, 0, 1, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_few_microbatches_bound_the_period_of_every_family(count):
    costs = Costs(1.0, 1.5, 0.5, communication=0.2)
    bounds = {}
    for option in options([count], 2):
        recipe = FAMILIES[option.schedule]
        try:
            schedule = build_from_recipe(recipe, option.schedule, (4, count, None), costs)
        except ScheduleError:
            continue
        placement = schedule.placement
        seconds, latencies = costs.seconds_by_kind(len(placement)), costs.latencies(placement)
        bounds[option.schedule] = span_lower_bound(seconds, latencies, placement, count)
        period = steady_period(as_executed(schedule, costs, False), costs, has_barrier=False)
        assert bounds[option.schedule] <= period * (1 + 1e-9), option.schedule
    # A single microbatch: the first rank waits for all F's and the B's of the other ranks.
    if count == 1:
        assert bounds["1f1b"] == pytest.approx(4 * 1.0 + 4 * 1.5 + 6 * 0.2 + 0.5)
