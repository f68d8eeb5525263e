import pytest

from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    ScheduleError,
    add_transfers,
    build,
    lower,
    simulate,
)
from tests.support.plans import plan

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


@pytest.mark.parametrize("name", SCHEDULES)
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
