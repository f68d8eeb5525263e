"""Time and memory of every family, by the formula of its paper or docstring."""

import random
from itertools import product
from math import gcd

import pytest

from lightning_pipeoffload.schedule import (
    Action,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    build,
    lower,
    simulate,
    validate,
)
from lightning_pipeoffload.schedule.builders.zb_v import lengthen
from tests.support.pairs import first, pairs, slow

UNIT = Costs.unit()
PROFILED = Costs(14.407, 14.380, 9.676, communication=1.610)


def run(name, p, m, v=None, costs=UNIT, **options):
    return simulate(build(name, p, m, v, costs, **options), costs)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (4, 2), (4, 8), (8, 24)])
def test_gpipe_and_1f1b_idle_for_p_minus_1_microbatches(p, m):
    for name, peaks in (("gpipe", [m] * p), ("1f1b", [min(m, p - rank) for rank in range(p)])):
        timeline = run(name, p, m, costs=Costs(3, 4, 2))
        assert timeline.makespan == (m + p - 1) * (3 + 4 + 2)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.peak_memory == (*peaks,)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 16, 3), (8, 32, 4)])
def test_interleaved_1f1b_idles_for_a_vth_of_that(p, m, v):
    timeline = run("interleaved_1f1b", p, m, v, Costs(3, 4, 2, communication=0.25))
    assert timeline.makespan == m * v * 9 + (p - 1) * 9 + 2 * (p * v - 1) * 0.25
    assert timeline.peak_memory[0] == p * v + p - 1


@pytest.mark.parametrize(("name", "depth"), [("zb_h1", 1), ("zb_h2", 2)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 12), (8, 24)])
def test_zb_h1_and_zb_h2(name, depth, p, m):
    hop = (depth - 1) / 2
    costs = Costs(5, 6, 4, communication=hop, activation=34, weight_residue=32)
    timeline = run(name, p, m, costs=costs)
    expected = m * 15 + (p - 1) * (5 + 6 - depth * 4 + 2 * hop)
    assert (max(timeline.span) if depth == 2 else timeline.makespan) == expected
    kept = [((depth * (p - 1 - i) + 1) * 34 + depth * i * 32) for i in range(p)]
    assert timeline.peak_memory == (*kept,)
    assert (run(name, p, m).bubble_unsynchronized == 0) == (depth == 2)


@pytest.mark.parametrize(
    ("name", "longest_of_1f1b"),
    [("zb_h1", UNIT), ("zb_h2", UNIT), ("zb_1p", UNIT), ("zb_v", Costs(2, 2, 2))],
)
def test_few_microbatches_take_no_longer_than_1f1b(name, longest_of_1f1b):
    for m in range(1, 8):
        assert run(name, 4, m).makespan <= run("1f1b", 4, m, costs=longest_of_1f1b).makespan


def random_costs(seed, num_stages):
    draw = random.Random(seed)
    names = ("forward", "backward_input", "backward_weight", "activation", "weight_residue")
    return Costs(
        communication=draw.random(),
        **{name: [draw.uniform(0.5, 2) for _ in range(num_stages)] for name in names},
    )


@pytest.mark.parametrize(
    ("name", "chunks", "limits"), [("zb", 1, (2.0, 2.3, 3.7, 9.0)), ("zb_v", 2, (5.5, 7.1, 12.0))]
)
@pytest.mark.parametrize("seed", range(8))
def test_no_rank_exceeds_any_limit_whatever_the_costs(name, chunks, limits, seed):
    p, m = random.Random(seed).choice([(2, 5), (4, 4), (4, 13), (5, 3)])
    costs = random_costs(seed, chunks * p)
    for limit in limits:
        peaks = run(name, p, m, costs=costs, memory_limit=limit).peak_memory
        assert max(peaks) <= limit * (1 + 1e-12)


@pytest.mark.parametrize(("activation", "residue"), [(0.1, 0.1), (0.3, 0.1), (0.1, 0.3)])
@pytest.mark.parametrize(("name", "chunks"), [("zb", 1), ("zb_v", 2)])
def test_the_smallest_limit_is_met_exactly(name, chunks, activation, residue):
    costs = Costs(1, 1, 1, activation=activation, weight_residue=residue)
    smallest = (chunks - 1) * activation + max(activation, residue)
    assert build(name, 4, 8, costs=costs, memory_limit=smallest * (1 + 1e-12))
    with pytest.raises(ScheduleError, match=rf"use at least 0\.\d+ for {name}"):
        build(name, 4, 8, costs=costs, memory_limit=smallest * 0.99)


def test_a_larger_limit_is_never_slower():
    costs = Costs(5, 6, 4, communication=0.3)
    limits = [1, 2, 3, 4, 6, 8, 10, 12]
    spans = [max(run("zb", 4, 12, costs=costs, memory_limit=limit).span) for limit in limits]
    assert spans == sorted(spans, reverse=True)
    assert build("zb", 4, 12) == build("zb_2p", 4, 12)


def test_stages_that_differ():
    slow_stage = Costs(*[[1, 3, 1, 1]] * 3)
    timeline = run("zb_2p", 4, 12, costs=slow_stage)
    assert timeline.busy[1] / timeline.span[1] > 0.97
    large_stage = Costs(1, 1, 1, activation=[1, 9])
    assert max(run("zb_1p", 2, 4, costs=large_stage).peak_memory) == 9


# Stages in a V


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8), (4, 16), (16, 32)])
def test_zb_v_has_no_bubble_at_equal_times_and_the_memory_of_1f1b(p, m):
    timeline = run("zb_v", p, m)
    assert timeline.bubble_unsynchronized == pytest.approx(0)
    assert timeline.peak_memory == (2 * p,) * p


def test_costs_and_memory_shorten_the_hand_made_zb_v():
    costs = Costs(14.407, 14.380, 9.676, communication=1.610, activation=1, weight_residue=0.4)
    searched, hand_made = build("zb_v", 16, 48, costs=costs), build("zb_v", 16, 48)
    assert max(simulate(searched, costs).span) < max(simulate(hand_made, costs).span)
    limited = run("zb_v", 8, 24, costs=costs, memory_limit=32)
    assert limited.bubble_unsynchronized < 0.005


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("m", [12, 13, 40])
def test_a_lengthened_plan_has_no_more_bubble_and_memory(name, m):
    few = build(name, 4, 12)
    many = lengthen(few, m)
    validate(many)
    assert many.num_microbatches == m
    before, after = simulate(few, UNIT), simulate(many, UNIT)
    assert max(after.span) - max(after.busy) == max(before.span) - max(before.busy)
    assert after.peak_memory == before.peak_memory


def test_a_plan_that_repeats_two_microbatches_does_not_become_one_longer():
    actions = [Action(kind, 0, index) for kind in (Kind.F, Kind.B, Kind.W) for index in range(2)]
    assert lengthen(Schedule.of([actions]), 3) is None
    assert lengthen(Schedule.of([actions]), 4).num_microbatches == 4


@pytest.mark.parametrize(
    ("name", "p", "peak", "extra"),
    [
        *(("v_half", p, p + 2, 3 * p - 7) for p in (4, 8, 16)),
        *(("v_min", p, peak, 4 * p - 5) for p, peak in [(4, 4), (8, 8), (9, 8), (16, 12)]),
        *(("1f1b_v", 4, 6, 15), ("1f1b_v", 8, 12, 34), ("1f1b_v", 16, 22, 75)),
    ],
)
def test_memory_and_bubble_of_other_vs(name, p, peak, extra):
    timeline = run(name, p, 4 * p)
    assert max(timeline.peak_memory) == peak
    assert (
        max(span - busy for span, busy in zip(timeline.span, timeline.busy, strict=True)) <= extra
    )
    if name == "1f1b_v":  # as it runs, the gradient is handed on before W
        lowered = simulate(lower(build(name, p, 2 * p)), UNIT)
        assert max(lowered.span) - 12 * p <= 0.6 * {4: 15, 8: 33, 16: 75}[p]


LIMITS = [(4, 4), (4, 6), (6, 6), (3, 4), (5, 6), (7, 7)]
MORE_LIMITS = [(4, 8), (6, 12), (8, 15), (4, 5), (4, 7), (6, 9), (3, 6), (5, 9)]


@pytest.mark.parametrize(("p", "k"), [*LIMITS, *map(slow, MORE_LIMITS)])
def test_v_comes_within_one_slot_of_the_lower_bound(p, k):
    timeline = run("v", p, 4 * p, memory_limit=k)
    assert max(timeline.span) - 24 * p <= 6 * p - 3 * k
    assert max(timeline.peak_memory) <= k


@pytest.mark.slow  # long searches; the table of golden plans has smaller ones
@pytest.mark.parametrize(
    ("name", "options", "costs", "rate"),
    [
        *(
            ("v", {"memory_limit": k}, PROFILED, rate)
            for k, rate in [(8, 0.2523), (10, 0.1274), (12, 0.1029), (16, 0.0515)]
        ),
        ("v_min", {}, Costs(3, 4, 2), 0.3263),
        ("v_half", {}, Costs(3, 4, 2), 0.1233),
        ("v_min", {}, Costs(1, 1.3, 0.6), 0.3331),
        ("v_half", {}, Costs(1, 1.3, 0.6), 0.1266),
    ],
)
def test_unequal_times_do_better_than_the_papers_search(name, options, costs, rate):
    assert run(name, 8, 32, costs=costs, **options).bubble_unsynchronized <= rate


@pytest.mark.parametrize(
    ("size", "limit", "residue"),
    first(3, pairs([(1, 1), (2, 3), (4, 5), (4, 16), (8, 9)], [26, 26, 37, 80], [4, 13, 10, 4])),
)
def test_v_keeps_its_limit(size, limit, residue):
    costs = Costs(3, 4, 2, communication=0.3, activation=10, weight_residue=residue)
    schedule = build("v", *size, costs=costs, memory_limit=limit)
    validate(lower(schedule))
    assert max(simulate(schedule, costs).peak_memory) <= limit


def test_limits_of_v():
    assert run("v", 4, 16).peak_memory == (8,) * 4
    uneven = Costs((1, 2, 3, 4), 2, (3, 1, 1, 2), activation=(4, 3, 2, 1), weight_residue=2)
    assert max(run("v", 2, 8, costs=uneven, memory_limit=12).peak_memory) <= 12
    costs = Costs(1, 1, 1, activation=10)
    with pytest.raises(ScheduleError, match=r"memory_limit \(19\) must be at least 20 for v"):
        build("v", 4, 8, costs=costs, memory_limit=19)
    assert build("v", 4, 8, costs=costs, memory_limit=20)


# Groups of microbatches

GROUPS = [(p, g) for p in (1, 2, 4, 8, 16) for g in sorted({-(-p // 2), -(-5 * p // 8), p})]


def idle_slots(timeline, m, v):
    return timeline.makespan - 3 * m * v


def bubble_formula(p, v, g):
    return 2 * (p - 1) + (p - g) * (v - 1)


@pytest.mark.parametrize(("group", "v"), pairs(GROUPS, [2, 3, 4]))
def test_closed_forms_of_full_groups(group, v):
    p, g = group
    for m in (g, 3 * g, 4 * g):
        timeline = run("grouped", p, m, v, group_size=g)
        assert idle_slots(timeline, m, v) == bubble_formula(p, v, g)
        assert timeline.peak_memory == tuple(min(m * v, g * (v - 1) + p - i) for i in range(p))


@pytest.mark.parametrize(
    ("p", "g"),
    [
        *((p, g) for p in (3, 4, 5) for g in range(-(-p // 2), p + 1)),
        *((8, 5), *map(slow, [(8, 4), (8, 6), (8, 7), (8, 8), (16, 8), (16, 13)])),
    ],
)
def test_groups_that_do_not_divide_cost_at_most_12_slots_and_no_memory(p, g):
    for m, v in product([p, p + 1, p + 2, 2 * p - 1, 4 * p, 4 * p + 1], [2, 3, 4]):
        timeline = run("grouped", p, m, v, group_size=g)
        assert idle_slots(timeline, m, v) <= bubble_formula(p, v, g) + 12
        assert max(timeline.peak_memory) <= g * (v - 1) + p


@pytest.mark.parametrize(("p", "v"), [(2, 5), (3, 2), (5, 3), (7, 4), (9, 5)])
def test_uniform_keeps_at_most_a_block_and_what_waits_in_it(p, v):
    half = -(-p // 2)
    for m in (p, 2 * p + 1, 4 * p + 3):
        timeline = run("uniform", p, m, v)
        assert max(timeline.peak_memory) <= half * (v - 1) + (v - 1) * gcd(v, half) // v + p
        assert idle_slots(timeline, m, v) <= 3 * v * (p - 1)


def test_the_limit_decides_the_size_of_groups():
    for limit in range(12, 18):
        group_size = min(8, limit - 8)
        by_size = build("grouped", 8, 32, group_size=group_size)
        assert build("grouped", 8, 32, memory_limit=limit) == by_size
        costs = Costs(1, 1, 1, activation=10)
        assert build("grouped", 8, 32, costs=costs, memory_limit=limit * 10 + 5) == by_size
    for name, group_size in (("gis", 8), ("gis_h", 4)):
        assert build(name, 8, 20, 3) == build("grouped", 8, 20, 3, group_size=group_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 11}, r"memory_limit \(11\) is less than the 12"),
        *(
            ({"group_size": size}, r"group_size \(.*\) must be from 4 to 8 for 8 ranks")
            for size in (3, 9, 4.5)
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(options, message):
    with pytest.raises(ScheduleError, match=message):
        build("grouped", 8, 32, **options)
