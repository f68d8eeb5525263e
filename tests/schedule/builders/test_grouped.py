from itertools import product
from math import gcd

import pytest

from lightning_pipeoffload.schedule import Costs, ScheduleError, build, simulate
from tests.support.pairs import pairs, slow
from tests.support.plans import plan

UNIT = Costs.unit()
RANKS = (1, 2, 4, 8, 16)
GROUPS = [(p, g) for p in RANKS for g in sorted({-(-p // 2), -(-5 * p // 8), p})]


def extra_slots(timeline, m, v):
    """Slots in which the pipeline does not compute, at F = B = W = 1."""
    return timeline.makespan - 3 * m * v


def bubble_formula(p, v, g):
    return 2 * (p - 1) + (p - g) * (v - 1)


def test_gis_is_interleaved_1f1b_with_a_shorter_warm_up():
    assert build("gis", num_ranks=2, num_microbatches=2) == plan("""
        0F0 0F1 2F0 2F1 2B0 2W0 2B1 2W1 0B0 0W0 0B1 0W1
        1F0 1F1 3F0 3B0 3W0 3F1 3B1 3W1 1B0 1W0 1B1 1W1
    """)


def test_uniform_repeats_its_block_for_every_microbatch():
    assert build("uniform", num_ranks=2, num_microbatches=2) == plan("""
        0F0 2F0 0F1 2B0 2W0 2F1 0B0 0W0 2B1 2W1 0B1 0W1
        1F0 3F0 3B0 3W0 1F1 1B0 1W0 3F1 3B1 3W1 1B1 1W1
    """)


@pytest.mark.parametrize(("group", "v"), pairs(GROUPS, [2, 3, 4]))
def test_closed_forms_of_full_groups(group, v):
    p, g = group
    for m in (g, 3 * g, 4 * g):
        timeline = simulate(build("grouped", p, m, v, group_size=g), UNIT)
        assert extra_slots(timeline, m, v) == bubble_formula(p, v, g)
        assert timeline.peak_memory == tuple(min(m * v, g * (v - 1) + p - i) for i in range(p))


@pytest.mark.parametrize(
    ("p", "g"),
    [
        *((p, g) for p in (3, 4, 5) for g in range(-(-p // 2), p + 1)),
        (8, 5),
        *map(slow, [(8, 4), (8, 6), (8, 7), (8, 8), (16, 8), (16, 13)]),
    ],
)
def test_groups_that_do_not_divide_cost_at_most_12_slots_and_no_memory(p, g):
    for m, v in product([p, p + 1, p + 2, 2 * p - 1, 4 * p, 4 * p + 1], [2, 3, 4]):
        timeline = simulate(build("grouped", p, m, v, group_size=g), UNIT)
        assert extra_slots(timeline, m, v) <= bubble_formula(p, v, g) + 12
        assert max(timeline.peak_memory) <= g * (v - 1) + p


@pytest.mark.parametrize(("p", "m", "v"), [(4, 3, 2), (8, 1, 4), (8, 3, 4), (16, 7, 2)])
def test_few_microbatches_take_hardly_longer_than_the_way_down_and_back(p, m, v):
    makespan = simulate(build("gis", p, m, v), UNIT).makespan
    assert 2 * p * v + m <= makespan <= 2 * p * v + 3 * m


@pytest.mark.parametrize(("name", "g"), [("gis", 8), ("gis_h", 4)])
def test_gis_and_gis_h_are_groups(name, g):
    assert build(name, 8, 20, 3) == build("grouped", 8, 20, 3, group_size=g)


@pytest.mark.parametrize(
    ("p", "v", "peak", "extra"),
    [
        (4, 2, 7, 9),
        (4, 4, 11, 18),
        (8, 2, 13, 23),
        (8, 3, 16, 34),
        (8, 4, 23, 41),
        (8, 5, 24, 56),
        (8, 8, 39, 87),
        (16, 2, 25, 51),
        (16, 4, 43, 93),
    ],
)
def test_uniform_without_offload(p, v, peak, extra):
    timeline = simulate(build("uniform", p, 4 * p, v), UNIT)
    assert max(timeline.peak_memory) <= peak
    assert extra_slots(timeline, 4 * p, v) <= extra


@pytest.mark.parametrize(("p", "v"), [(2, 5), (3, 2), (5, 3), (7, 4), (8, 4), (9, 5)])
def test_uniform_keeps_at_most_a_block_and_what_waits_in_it(p, v):
    half = -(-p // 2)
    for m in (p, 2 * p + 1, 4 * p + 3):
        timeline = simulate(build("uniform", p, m, v), UNIT)
        peak = half * (v - 1) + (v - 1) * gcd(v, half) // v + p
        assert max(timeline.peak_memory) <= peak
        assert extra_slots(timeline, m, v) <= 3 * v * (p - 1)


@pytest.mark.parametrize("limit", range(12, 18))
def test_grouped_takes_the_largest_groups_that_the_limit_allows(limit):
    schedule = build("grouped", 8, 32, memory_limit=limit)
    assert schedule == build("grouped", 8, 32, group_size=min(8, limit - 8))


def test_the_limit_is_in_the_unit_of_the_costs():
    schedule = build("grouped", 8, 32, costs=Costs(1, 1, 1, activation=10), memory_limit=135)
    assert schedule == build("grouped", 8, 32, group_size=5)


def test_a_limit_that_no_group_meets_is_refused_with_the_least():
    with pytest.raises(ScheduleError, match=r"memory_limit \(11\) is less than the 12"):
        build("grouped", 8, 32, memory_limit=11)


@pytest.mark.parametrize("group_size", [3, 9, 4.5])
def test_a_group_size_that_cannot_be_is_refused(group_size):
    with pytest.raises(ScheduleError, match=r"group_size \(.*\) must be from 4 to 8 for 8 ranks"):
        build("grouped", 8, 16, group_size=group_size)
