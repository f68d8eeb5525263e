import random

import pytest

from lightning_pipeoffload.schedule import Costs, ScheduleError, build, simulate


def longest_over_ideal(memory_limit, p, m, times):
    costs = Costs(*times, activation=2, weight_residue=1)
    timeline = simulate(build("zb", p, m, costs=costs, memory_limit=memory_limit), costs)
    return max(timeline.span), m * sum(times)


@pytest.mark.parametrize(
    ("p", "m", "times", "limit", "expected"),
    [
        (4, 12, (5, 6, 4), 10, (193, 180)),
        (4, 12, (5, 6, 4), 14, (183, 180)),
        (4, 8, (1, 1, 1), 8, (27, 24)),
        (4, 8, (1, 1, 1), 12, (25, 24)),
        (4, 8, (1, 1, 1), 16, (24, 24)),
        (8, 16, (1, 1, 1), 16, (55, 48)),
        (8, 16, (1, 1, 1), 24, (51, 48)),
        (8, 16, (1, 1, 1), 32, (48, 48)),
    ],
)
def test_longest_span_of_the_reference_heuristic(p, m, times, limit, expected):
    assert longest_over_ideal(limit, p, m, times) == expected


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_extra_time_at_equal_times(p, m):
    costs = Costs.unit()
    spans = [max(simulate(build(name, p, m), costs).span) for name in ("zb_1p", "zb_2p")]
    assert spans == [3 * m + p - 1, 3 * m]


def test_few_microbatches_take_no_longer_than_zb_h1():
    costs = Costs(5, 6, 4)
    for m in range(1, 9):
        span = max(simulate(build("zb_1p", 8, m, costs=costs), costs).span)
        assert span <= max(simulate(build("zb_h1", 8, m), costs).span)


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
        peaks = simulate(build(name, p, m, costs=costs, memory_limit=limit), costs).peak_memory
        assert max(peaks) <= limit * (1 + 1e-12)


@pytest.mark.parametrize(("activation", "residue"), [(0.1, 0.1), (0.3, 0.1), (0.1, 0.3)])
def test_the_smallest_limit_is_met_exactly(activation, residue):
    costs = Costs(1, 1, 1, activation=activation, weight_residue=residue)
    smallest = max(activation, residue)
    assert build("zb", 4, 8, costs=costs, memory_limit=smallest)
    with pytest.raises(ScheduleError, match=rf"use at least {smallest!r} for zb"):
        build("zb", 4, 8, costs=costs, memory_limit=smallest * 0.99)


def test_a_larger_limit_is_never_slower():
    costs = Costs(5, 6, 4, communication=0.3)
    limits = [1, 2, 3, 4, 6, 8, 10, 12]
    spans = [
        max(simulate(build("zb", 4, 12, costs=costs, memory_limit=limit), costs).span)
        for limit in limits
    ]
    assert spans == sorted(spans, reverse=True)


def test_without_a_limit_zb_is_zb_2p():
    assert build("zb", 4, 8) == build("zb_2p", 4, 8)


def test_a_slow_rank_is_kept_busy():
    costs = Costs([1, 3, 1, 1], [1, 3, 1, 1], [1, 3, 1, 1])
    timeline = simulate(build("zb_2p", 4, 12, costs=costs), costs)
    assert timeline.busy[1] / timeline.span[1] > 0.97


def test_a_later_stage_that_holds_more_raises_the_limit_of_zb_1p():
    costs = Costs(1, 1, 1, activation=[1, 9])
    assert max(simulate(build("zb_1p", 2, 4, costs=costs), costs).peak_memory) == 9
