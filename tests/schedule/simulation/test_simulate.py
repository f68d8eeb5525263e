from dataclasses import replace

import pytest

from lightning_pipeoffload.schedule import (
    Costs,
    ScheduleError,
    add_final_actions,
    add_transfers,
    build,
    lower,
    simulate,
)
from tests.support.plans import SHAPES, plan

UNIT = Costs.unit()
UNEQUAL = Costs(3, 4, 2, communication=0.5, activation=10, weight_residue=7)


def times(timeline):
    return {str(e.action): (e.start, e.end) for e in timeline.events}


def test_a_hop_between_ranks_takes_the_communication_time():
    timeline = simulate(plan("0F0 0BW0\n1F0 1BW0"), Costs(1, 2, 4, communication=0.5))
    assert times(timeline) == {
        "0F0": (0, 1),
        "1F0": (1.5, 2.5),
        "1BW0": (2.5, 8.5),
        "0BW0": (9, 15),
    }


def test_a_hop_on_one_rank_takes_no_time():
    timeline = simulate(plan("0F0 1F0 1B0 0B0 1W0 0W0"), Costs(1, 1, 1, communication=9))
    assert timeline.makespan == 6


def test_the_sender_is_not_held_up():
    timeline = simulate(plan("0F0 0F1\n1F0 1F1"), Costs(1, 1, 1, communication=9))
    assert times(timeline)["0F1"] == (1, 2)


def test_the_neighbour_does_not_wait_for_a_weight_gradient_once_lowered():
    timeline = simulate(lower(plan("0F0 0BW0\n1F0 1BW0")), Costs(1, 2, 4, communication=0.5))
    assert times(timeline)["1B0"] == (2.5, 4.5)
    assert times(timeline)["0BW0"] == (5, 11)


def test_every_stage_has_its_own_costs():
    costs = Costs([1, 2], [3, 4], 5, communication=[0.5, 99])
    timeline = simulate(plan("0F0 0B0 0W0\n1F0 1B0 1W0"), costs)
    assert times(timeline)["1F0"] == (1.5, 3.5)
    assert times(timeline)["0B0"] == (8, 11)


@pytest.mark.parametrize("name", SHAPES)
def test_spelling_the_transfers_out_changes_nothing(name):
    schedule = build(name, 4, 8)
    assert simulate(add_transfers(schedule), UNEQUAL) == simulate(schedule, UNEQUAL)


def test_figures():
    timeline = simulate(plan("0F0 0F1\n1F0 1F1"), Costs([1, 2], 1, 1))
    assert timeline.makespan == 5
    assert timeline.busy == (2, 4)
    assert timeline.span == (2, 4)
    assert timeline.bubble == pytest.approx(1 - 6 / 10)
    assert timeline.bubble_unsynchronized == 0


def test_waiting_for_a_message_is_idle_time():
    timeline = simulate(add_transfers(plan("0F0 1F0\n2F0 3F0")), Costs.unit())
    assert timeline.busy == (2, 2)
    assert [event.lane for event in timeline.events] == ["compute"] * 4


def test_no_time_at_all_has_no_bubble():
    timeline = simulate(plan("0F0"), Costs(0, 0, 0))
    assert (timeline.bubble, timeline.bubble_unsynchronized) == (0, 0)


@pytest.mark.parametrize(
    ("actions", "residue", "peak"),
    [
        ("0F0 0BW0", 7, 10),
        ("0F0 0F1 0B0 0B1 0W0 0W1", 7, 20),
        ("0F0 0F1 0B0 0B1 0W0 0W1", 12, 24),  # B adds 2 at its start
        ("0F0 0B0 0F1 0W0 0B1 0W1", 7, 17),
        ("0F0 0B0 0W0 0F1 0B1 0W1", 0, 10),
    ],
)
def test_peak_memory(actions, residue, peak):
    costs = Costs(1, 1, 1, activation=10, weight_residue=residue)
    assert simulate(plan(actions), costs).peak_memory == (peak,)


def test_the_residue_is_as_large_as_the_activation_by_default():
    costs = Costs(1, 1, 1, activation=[10, 20])
    timeline = simulate(plan("0F0 0B0 0W0 0F1 0B1 0W1\n1F0 1B0 1F1 1B1 1W0 1W1"), costs)
    assert timeline.peak_memory == (10, 40)


def test_a_deadlock_is_not_timed():
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(plan("0BW0 0F0"), Costs.unit())


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1}, r"costs.forward \(-1\) must be a number from 0 on"),
        ({"forward": "fast"}, r"costs.forward \(fast\) must be a number"),
        ({"reload": float("nan")}, r"costs.reload \(nan\) must be a number"),
        ({"reduce": [1, 2]}, "costs.reduce has 2 values, and the schedule 4 stages"),
        ({"activation": [1, -2]}, r"costs.activation \(\[1, -2\]\) must be a number"),
        ({"forward": [1, 2, 3]}, "costs.forward has 3 values, and the schedule 4 stages"),
    ],
)
def test_costs_that_cannot_be(costs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(build("1f1b", 4, 4), Costs(**{**vars(Costs.unit()), **costs}))


def test_costs_are_hashable():
    assert hash(Costs([1, 2], 1, 1)) == hash(Costs((1, 2), 1, 1))


WITH_COPIES = "0F0 0OFFLOAD0 0F1 0FREE0 0F2 0B2 0W2 0RELOAD0 0B1 0W1 0B0 0W0"


def spans(timeline):
    return {(e.lane, str(e.action)): (e.start, e.end) for e in timeline.events}


def test_free_waits_for_its_copy_and_b_for_its_reload():
    timeline = simulate(plan(WITH_COPIES), Costs(1, 1, 1, offload=5, reload=4))
    found = spans(timeline)
    assert found["d2h", "0OFFLOAD0"] == (1, 6)
    assert found["compute", "0F2"] == (6, 7)
    assert found["h2d", "0RELOAD0"] == (9, 13)
    assert found["compute", "0B0"] == (13, 14)
    assert (timeline.peak_memory, timeline.peak_host_memory) == ((2,), (1,))


@pytest.mark.parametrize(("lanes", "start"), [(1, 12), (2, 8)])
def test_directions_take_turns_on_one_lane(lanes, start):
    text = "0F0 0OFFLOAD0 0FREE0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0W0 0FREE1 0RELOAD1 0B1 0W1 0B2 0W2"
    costs = Costs(1, 1, 1, offload=5, reload=4, copy_lanes=lanes)
    assert spans(simulate(plan(text), costs))["h2d", "0RELOAD0"][0] == start


def test_a_reload_waits_for_its_own_offload_on_the_lane():
    costs = Costs(1, 1, 1, offload=5, reload=4, copy_lanes=2)
    found = spans(simulate(plan("0F0 0OFFLOAD0 0FREE0 0RELOAD0 0BW0"), costs))
    assert found["h2d", "0RELOAD0"] == (6, 10)


def test_a_part_takes_its_share_of_the_copy():
    text = "0F0 0OFFLOAD0 0FREE0 0RELOAD_B0 0B0 0OFFLOAD_W0 0FREE_W0 0RELOAD_W0 0W0"
    costs = Costs(1, 1, 1, activation=10, weight_input=4, offload=10, reload=10)
    found = spans(simulate(plan(text), costs))
    assert found["h2d", "0RELOAD_B0"] == (11, 17)
    assert found["d2h", "0OFFLOAD_W0"] == (18, 24)  # the gradients; the inputs are there still
    assert found["h2d", "0RELOAD_W0"] == (24, 34)


@pytest.mark.parametrize(
    ("backward", "expected"),
    [("0B0 0W0", {"0B0": (17, 18), "0W0": (21, 22)}), ("0BW0", {"0BW0": (21, 23)})],
)
def test_b_waits_for_its_part_of_a_reload_and_w_for_all_of_it(backward, expected):
    costs = Costs(1, 1, 1, activation=10, weight_input=4, offload=10, reload=10)
    found = spans(simulate(plan(f"0F0 0OFFLOAD0 0FREE0 0RELOAD0 {backward}"), costs))
    assert found["h2d", "0RELOAD0"] == (11, 21)
    assert {name: found["compute", name] for name in expected} == expected


def test_what_w_needs_is_part_of_the_activation():
    with pytest.raises(
        ScheduleError, match=r"costs.weight_input \(2\) is part of activation \(1\)"
    ):
        simulate(plan("0F0 0BW0"), Costs(1, 1, 1, weight_input=2))


@pytest.mark.parametrize(("ranks_per_link", "second"), [(1, (2, 5)), (2, (4, 7))])
def test_ranks_of_one_link_copy_in_one_direction_one_after_the_other(ranks_per_link, second):
    costs = Costs(1, 1, 1, offload=3, reload=1, ranks_per_link=ranks_per_link)
    text = "0F0 0OFFLOAD0 0FREE0 0RELOAD0 0BW0\n1F0 1OFFLOAD0 1FREE0 1RELOAD0 1BW0"
    found = spans(simulate(plan(text), costs))
    assert found["d2h", "0OFFLOAD0"] == (1, 4)
    assert found["d2h", "1OFFLOAD0"] == second


def reduced(text, reduce, costs=UNIT):
    """Return when each REDUCE of a plan runs, by its stage."""
    timeline = simulate(plan(text), replace(costs, reduce=reduce))
    events = [event for event in timeline.events if event.lane == "reduce"]
    return {event.action.stage: (event.start, event.end) for event in events}


@pytest.mark.parametrize(
    ("seconds", "first", "second"),
    [(2, (9.125, 11.125), (8.25, 10.25)), (6, (9.125, 15.125), (8.25, 14.25))],
)
def test_a_reduction_runs_in_eight_shares_beside_its_tail(seconds, first, second):
    """Rank 0 ends with one W, from 9 to 10; rank 1 with two, from 8 to 10."""
    plan_of_two = str(add_final_actions(lower(build("zb_h1", 2, 3))))
    assert reduced(plan_of_two, seconds) == {0: first, 1: second}
    stepped = simulate(plan(plan_of_two.replace("REDUCE", "STEP")), replace(UNIT, step=seconds))
    spans = [(e.start, e.end) for e in stepped.events if e.lane == "host"]
    assert sorted(spans) == sorted([first, second])


def test_a_short_reduction_ends_one_share_after_its_tail():
    text = "0F0 0F1 0F2 0B0 0B1 0B2 0W0 0W1 0W2 0REDUCE2"
    assert reduced(text, 1.6, Costs(0, 0, 2)) == {0: (0.75, 6.2)}
    assert reduced(text, 12, Costs(0, 0, 2)) == {0: (0.75, 12.75)}


def test_a_reduction_of_1f1b_follows_its_last_backward():
    """Stage 0 ends BW at 6, or W; stage 1, which another rank waits for, ends W at 5."""
    lowered = add_final_actions(lower(build("1f1b", 2, 1)))
    assert reduced(str(lowered), [3, 4]) == {0: (5, 8), 1: (3.125, 7.125)}


def test_reductions_of_one_rank_take_turns():
    text = "0F0 1F0 1B0 0B0 1W0 1REDUCE0 0W0 0REDUCE0"
    assert reduced(text, [1, 5]) == {1: (4.125, 9.125), 0: (9.125, 10.125)}
    assert reduced(text, [3, 0.5]) == {1: (4.125, 5.0625), 0: (5.125, 8.125)}


def test_one_that_stands_further_behind_starts_when_its_rank_comes_to_it():
    assert reduced("0F0 1F0 1B0 0B0 1W0 0W0 1REDUCE0 0REDUCE0", 1) == {1: (6, 7), 0: (7, 8)}


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_waits_for_a_reduction(name):
    lowered, costs = lower(build(name, 4, 8)), replace(UNEQUAL, reduce=100)
    without, timeline = simulate(lowered, costs), simulate(add_final_actions(lowered), costs)
    others = [event for event in timeline.events if event.lane != "reduce"]
    assert others == list(without.events)
    assert (timeline.busy, timeline.peak_memory) == (without.busy, without.peak_memory)
    assert timeline.makespan > without.makespan
    assert timeline.bubble > without.bubble


def test_a_reduction_is_the_end_of_a_rank_and_no_work():
    timeline = simulate(plan("0F0 0BW0 0REDUCE0\n1F0 1BW0 1REDUCE0"), Costs(1, 1, 0, reduce=[6, 3]))
    assert (timeline.makespan, timeline.busy, timeline.span) == (10, (2, 2), (10, 5))
    assert timeline.bubble == pytest.approx(1 - 4 / 20)
    assert timeline.bubble_unsynchronized == pytest.approx(1 - 2 / 10)


def test_a_schedule_without_replicas_has_no_lane_for_them():
    timeline = simulate(lower(build("zb_h1", 2, 4)), replace(UNIT, reduce=5))
    assert {event.lane for event in timeline.events} == {"compute"}
