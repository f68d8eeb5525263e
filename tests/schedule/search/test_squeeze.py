import pytest

from lightning_pipeoffload.schedule import Costs, simulate, validate
from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.building_block import BuildingBlock, OrderTiming, v_block
from lightning_pipeoffload.schedule.search.squeeze import POLICIES, Policy, squeeze

BLOCK = v_block([1] * 3, turns=(1, 1, 1))
COSTS = Costs(14.4, 14.3, 9.7, communication=1.6, activation=1, weight_residue=0.6)


def squeezed(memory, policy=POLICIES[0], costs=COSTS, m=9):
    timing = OrderTiming(v(4), costs)
    order = squeeze(BLOCK.repeat(v(4), m), timing, memory, costs.weight_residue, policy)
    return timing.as_schedule(order)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("memory", [4, 5, 5.5, 8])
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
        rank = squeezed(6, policy, Costs.unit())[2]
        kinds = [(a.kind.value, a.stage) for a in rank]
        return kinds.index(("F", 5)), kinds[: kinds.index(("B", 5))].count(("F", 2))

    assert (
        forwards_of_first_chunk(Policy(keeps_room=True))[1] < (forwards_of_first_chunk(Policy())[1])
    )


def test_weights_first_runs_w_right_after_b():
    rank = squeezed(8, Policy(weights_first=True))[0]
    first_b = [a.kind.value for a in rank].index("B")
    assert [a.kind.value for a in rank[first_b : first_b + 2]] == ["B", "W"]


def test_w_fills_what_would_be_idle():
    timing = OrderTiming(loop(2, 1), Costs.unit())
    order = BuildingBlock((0, 1, 2, 3), 3).repeat(loop(2, 1), 3)
    printed = str(timing.as_schedule(squeeze(order, timing, memory=2)))
    assert printed.splitlines()[1] == "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2"
