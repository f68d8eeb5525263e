import pytest

from lightning_pipeoffload.schedule import Costs, ScheduleError, build, lower, simulate, validate
from lightning_pipeoffload.schedule.builders.v_adaptive import fitting_blocks
from lightning_pipeoffload.schedule.placement import v as v_placement
from lightning_pipeoffload.schedule.search.block_search import SearchSetting
from tests.support.pairs import pairs, slow

PROFILED = Costs(14.407, 14.380, 9.676, communication=1.610)
GRID = [(p, m) for p in (1, 2, 4) for m in sorted({1, p, p + 1, 4 * p})] + [(8, 9)]
# Without p activations on 3 and 5 ranks: see the docstring of v.
LIMITS = [(4, 4), (4, 6), (6, 6), (3, 4), (5, 6), (7, 7)]
MORE_LIMITS = [(4, 8), (6, 12), (8, 15), (4, 5), (4, 7), (6, 9), (3, 6), (5, 9)]


@pytest.mark.parametrize(("p", "k"), [*LIMITS, *map(slow, MORE_LIMITS)])
def test_equal_times_come_within_one_slot_of_the_lower_bound(p, k):
    timeline = simulate(build("v", p, 4 * p, memory_limit=k), Costs.unit())
    assert max(timeline.span) - 24 * p <= 6 * p - 3 * k
    assert max(timeline.peak_memory) <= k


@pytest.mark.parametrize("k", [7, 10, 12, 13])
def test_no_block_has_two_passes_of_a_rank_in_one_slot(k):
    ranks = (*v_placement(7), *reversed(v_placement(7)))
    for block in fitting_blocks(SearchSetting(v_placement(7), Costs.unit(), memory=k)):
        assert len({(rank, slot % 6) for rank, slot in zip(ranks, block.slots, strict=True)}) == 28


@pytest.mark.slow  # long searches; the table of golden plans has smaller ones
@pytest.mark.parametrize(("k", "rate"), [(8, 0.2523), (10, 0.1274), (12, 0.1029), (16, 0.0515)])
def test_profiled_times_do_better_than_the_papers_search(k, rate):
    timeline = simulate(build("v", 8, 32, costs=PROFILED, memory_limit=k), PROFILED)
    assert timeline.bubble_unsynchronized <= rate


@pytest.mark.parametrize(
    ("size", "limit", "residue"), pairs(GRID, [26, 26, 37, 80], [0.4, 1.3, 1, 0.4])
)
def test_no_rank_exceeds_the_limit(size, limit, residue):
    p, m = size
    costs = Costs(3, 4, 2, communication=0.3, activation=10, weight_residue=10 * residue)
    schedule = build("v", p, m, costs=costs, memory_limit=limit)
    validate(lower(schedule))
    assert max(simulate(schedule, costs).peak_memory) <= limit


def test_stages_that_differ_keep_to_the_limit():
    costs = Costs((1, 2, 3, 4), 2, (3, 1, 1, 2), activation=(4, 3, 2, 1), weight_residue=2)
    schedule = build("v", 2, 8, costs=costs, memory_limit=12)
    assert max(simulate(schedule, costs).peak_memory) <= 12


def test_no_limit_means_the_memory_of_1f1b():
    assert simulate(build("v", 4, 16), Costs.unit()).peak_memory == (8,) * 4


def test_a_limit_that_cannot_be_met_is_refused_with_the_smallest_that_can():
    costs = Costs(1, 1, 1, activation=10)
    with pytest.raises(ScheduleError, match=r"memory_limit \(19\) must be at least 20 for v"):
        build("v", 4, 8, costs=costs, memory_limit=19)
    assert build("v", 4, 8, costs=costs, memory_limit=20)
