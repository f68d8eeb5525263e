"""Building blocks: their peak, their repetition, and the order that squeezing makes of them."""

import pytest

from lightning_pipeoffload.schedule import Costs, build, simulate, validate
from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.block_search import (
    SearchSetting,
    best_schedule,
    simpler_times,
)
from lightning_pipeoffload.schedule.search.building_block import BuildingBlock, v_block
from lightning_pipeoffload.schedule.search.problem import Operations
from lightning_pipeoffload.schedule.search.squeeze import POLICIES, Policy, squeeze

# Two stages on two ranks: F, F, B, B, a slot each.
BLOCK = BuildingBlock(slots=(0, 1, 2, 3), interval=3)


def test_repeat_orders_each_rank_by_slot():
    assert BLOCK.repeat(loop(2, 1), num_microbatches=2) == [
        [(0, 0), (0, 1), (3, 0), (3, 1)],
        [(1, 0), (2, 0), (1, 1), (2, 1)],
    ]


@pytest.mark.parametrize(("interval", "peak"), [(1, 5), (2, 3), (3, 2), (4, 2), (5, 1)])
def test_peak_is_the_lifespan_over_the_interval(interval, peak):
    assert BuildingBlock((0, 1, 2, 3), interval).peak(loop(2, 1)) == peak


PER_STAGE = Costs(
    forward=(3, 2, 4, 1),
    backward_input=(4, 3, 5, 2),
    backward_weight=(2, 1, 3, 1),
    communication=(0.5, 0.25, 1, 9),
)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("placement", [v(2), loop(4, 1), loop(2, 2)])
def test_the_longest_span_is_that_of_the_simulator(placement, is_fused):
    operations = Operations(placement, PER_STAGE, is_fused)
    order = BuildingBlock(tuple(range(8)), 6).repeat(placement, 5)
    order = squeeze(order, operations, memory=10)
    timeline = simulate(operations.as_schedule(order), PER_STAGE)
    assert operations.longest_span(order) == pytest.approx(max(timeline.span))


def test_an_order_of_one_stage_per_rank_becomes_a_schedule():
    operations = Operations(loop(2, 1), Costs.unit(), is_fused=True)
    assert operations.as_schedule([[(0, 0), (3, 0)], [(1, 0), (2, 0)]]) == build("1f1b", 2, 1)


COSTS = Costs(14.4, 14.3, 9.7, communication=1.6, activation=1, weight_residue=0.6)


def squeezed(memory, policy=POLICIES[0], costs=COSTS):
    operations = Operations(v(4), costs)
    order = v_block([1] * 3, turns=(1, 1, 1)).repeat(v(4), 9)
    return operations.as_schedule(squeeze(order, operations, memory, costs.weight_residue, policy))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("memory", [4, 5.5, 8])
def test_every_policy_gives_a_schedule_within_the_memory(policy, memory):
    schedule = squeezed(memory, policy)
    validate(schedule)
    assert max(simulate(schedule, COSTS).peak_memory) <= memory


def test_more_memory_warms_up_with_more_forwards():
    warm_ups = [str(squeezed(memory)).split("F0")[1].count("0F") for memory in (4, 6, 8)]
    assert warm_ups == sorted(warm_ups)
    assert warm_ups[0] < warm_ups[-1]


def test_keeping_room_lets_the_second_chunk_in_earlier():
    def forwards_of_first_chunk(policy):
        kinds = [(a.kind.value, a.stage) for a in squeezed(6, policy, Costs.unit())[2]]
        return kinds[: kinds.index(("B", 5))].count(("F", 2))

    assert forwards_of_first_chunk(Policy(keeps_room=True)) < forwards_of_first_chunk(Policy())


def test_weights_first_runs_w_right_after_b():
    kinds = [a.kind.value for a in squeezed(8, Policy(weights_first=True))[0]]
    assert kinds[kinds.index("B") + 1] == "W"


def test_w_fills_what_would_be_idle():
    operations = Operations(loop(2, 1), Costs.unit())
    order = squeeze(BLOCK.repeat(loop(2, 1), 3), operations, memory=2)
    last = str(operations.as_schedule(order)).splitlines()[1]
    assert last == "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2"


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
    shallow, steep = v_block([1] * 3, turns=(1, 1, 1)), v_block([5] * 3, turns=(4, 1, 3))

    def span(*blocks):
        return max(simulate(best_schedule(blocks, setting, 16), Costs.unit()).span)

    assert span(shallow, steep) == span(steep, shallow) == min(span(shallow), span(steep))
    assert span(shallow) != span(steep)
