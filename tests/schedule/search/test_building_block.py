import pytest

from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.building_block import (
    BuildingBlock,
    ranks_of_steps,
    walk,
)

# Two stages on two ranks: F, F, B, B, a slot each.
BLOCK = BuildingBlock(slots=(0, 1, 2, 3), interval=3)


def test_walk_adds_up_the_slots_between_the_steps():
    assert walk((2, 1, 1)) == (0, 2, 3, 4)


def test_a_microbatch_comes_back_the_way_it_went():
    assert ranks_of_steps(v(2)) == (0, 1, 1, 0, 0, 1, 1, 0)


def test_repeat_orders_each_rank_by_slot():
    assert BLOCK.repeat(loop(2, 1), num_microbatches=2) == [
        [(0, 0), (0, 1), (3, 0), (3, 1)],
        [(1, 0), (2, 0), (1, 1), (2, 1)],
    ]


@pytest.mark.parametrize(("interval", "peak"), [(1, 5), (2, 3), (3, 2), (4, 2), (5, 1)])
def test_peak_is_the_lifespan_over_the_interval(interval, peak):
    assert BuildingBlock((0, 1, 2, 3), interval).peak(loop(2, 1)) == peak
