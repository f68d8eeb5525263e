from lightning_pipeoffload.schedule import Costs, simulate
from lightning_pipeoffload.schedule.placement import v
from lightning_pipeoffload.schedule.search.block_search import (
    SearchSetting,
    best_schedule,
    simpler_times,
)
from lightning_pipeoffload.schedule.search.building_block import v_block

SHALLOW = v_block([1] * 3, turns=(1, 1, 1))
STEEP = v_block([5] * 3, turns=(4, 1, 3))


def test_equal_times_need_no_simpler_ones():
    assert simpler_times(Costs.unit()) == [Costs.unit()]


def test_rounded_times_keep_the_ratios_and_the_real_ones_come_last():
    costs = Costs(14.4, 14.3, 9.6, communication=1.5)
    times = simpler_times(costs)
    rounded = times[0]
    shares = [rounded.forward, rounded.backward_input, rounded.backward_weight]
    assert [round(share / 4.8, 9) for share in shares] == [3, 3, 2]
    assert (rounded.communication, times[1].communication, times[-1]) == (0, 1.5, costs)


def test_of_two_blocks_the_faster_one_is_chosen():
    setting = SearchSetting(v(4), Costs.unit(), memory=8)

    def span(*blocks):
        return max(simulate(best_schedule(blocks, setting, 16), Costs.unit()).span)

    assert span(SHALLOW, STEEP) == span(STEEP, SHALLOW) == min(span(SHALLOW), span(STEEP))
    assert span(SHALLOW) != span(STEEP)
