import pytest

from lightning_pipeoffload.schedule import Costs, build, simulate
from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.building_block import BuildingBlock, OrderTiming
from lightning_pipeoffload.schedule.search.squeeze import squeeze

PER_STAGE = Costs(
    forward=(3, 2, 4, 1),
    backward_input=(4, 3, 5, 2),
    backward_weight=(2, 1, 3, 1),
    communication=(0.5, 0.25, 1, 9),
)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("placement", [v(2), loop(4, 1), loop(2, 2)])
def test_the_longest_span_is_that_of_the_simulator(placement, is_fused):
    timing = OrderTiming(placement, PER_STAGE, is_fused)
    order = BuildingBlock(tuple(range(8)), 6).repeat(placement, 5)
    order = squeeze(order, timing, memory=10)
    timeline = simulate(timing.as_schedule(order), PER_STAGE)
    assert timing.longest_span(order) == pytest.approx(max(timeline.span))


def test_an_order_of_one_stage_per_rank_becomes_a_schedule():
    timing = OrderTiming(loop(2, 1), Costs.unit(), is_fused=True)
    order = [[(0, 0), (3, 0)], [(1, 0), (2, 0)]]
    assert timing.as_schedule(order) == build("1f1b", 2, 1)
