import pytest

from lightning_pipeoffload.schedule import (
    COMPUTE,
    Costs,
    Kind,
    ScheduleError,
    add_transfers,
    build,
    forward_only,
    keep_microbatches,
    lower,
    one_at_a_time,
    peak_memory,
    split_fused_backward,
    validate,
)
from tests.support.plans import SHAPES, plan

BUILT = [build("1f1b", 1, 8), *(build(name, 4, 8) for name in SHAPES)]


def test_lowering_1f1b():
    assert lower(build("1f1b", num_ranks=2, num_microbatches=2)) == plan("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0BW0 0RECV_B1 0BW1
        1RECV_F0 1F0 1B0 1SEND_B0 1W0 1RECV_F1 1F1 1B1 1SEND_B1 1W1
    """)


def test_a_backward_is_split_only_where_another_rank_waits():
    schedule = plan("""
        0F0 3F0 3BW0 0BW0
        1F0 2F0 2BW0 1BW0
    """)
    assert split_fused_backward(schedule) == plan("""
        0F0 3F0 3B0 3W0 0BW0
        1F0 2F0 2BW0 1B0 1W0
    """)


def test_no_transfer_between_stages_of_one_rank():
    lowered = lower(plan("0F0 1F0 1BW0 0BW0"))
    assert lowered == plan("0F0 1F0 1BW0 0BW0")


def test_a_message_is_received_after_those_that_were_sent_before_it():
    lowered = add_transfers(
        plan("""
            0F0 0F1 2F0 2F1
            1F0 3F0 1F1 3F1
        """)
    )
    assert [str(a) for a in lowered[0] if a.kind is Kind.SEND_F] == [
        "0SEND_F0",
        "0SEND_F1",
        "2SEND_F0",
        "2SEND_F1",
    ]
    received = "1RECV_F0 1F0 1SEND_F0 1RECV_F1 3RECV_F0 3F0 1F1 1SEND_F1 3RECV_F1 3F1"
    assert " ".join(map(str, lowered[1])) == received


@pytest.mark.parametrize("schedule", BUILT, ids=repr)
def test_every_lowered_plan_is_valid(schedule):
    validate(lower(schedule))
    validate(lower(forward_only(schedule)))
    validate(lower(keep_microbatches(schedule, 3)))
    validate(keep_microbatches(lower(schedule), 3))


@pytest.mark.parametrize("schedule", BUILT, ids=repr)
def test_lowering_keeps_the_order_and_the_name(schedule):
    lowered = lower(schedule)
    computed = [[a for a in rank if a.kind in COMPUTE] for rank in lowered]
    before = [[a for a in rank if a.kind in COMPUTE] for rank in split_fused_backward(schedule)]
    assert computed == before
    assert lowered.name == schedule.name


def test_a_plan_is_lowered_only_once():
    lowered = lower(build("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match="1f1b has transfers already; lower it only once"):
        lower(lowered)


def test_what_is_not_valid_is_not_lowered():
    with pytest.raises(ScheduleError, match="stage 1 has nothing for microbatch 1"):
        add_transfers(plan("0F0 0F1 0BW0 0BW1\n1F0 1BW0"))


def test_forward_only_keeps_forwards_only():
    lowered = lower(build("1f1b", 2, 2))
    assert forward_only(lowered) == plan("0F0 0F1\n1F0 1F1")


def test_microbatches_beyond_the_count_are_dropped():
    schedule = build("1f1b", 2, 3)
    assert keep_microbatches(schedule, 1) == plan("0F0 0BW0\n1F0 1BW0")
    assert keep_microbatches(schedule, 3) == schedule


def test_at_least_one_microbatch_is_kept():
    with pytest.raises(ScheduleError, match=r"count \(0\) of microbatches to keep"):
        keep_microbatches(build("1f1b", 2, 3), 0)


@pytest.mark.parametrize("name", SHAPES)
def test_no_order_needs_less_memory_than_one_microbatch_at_a_time(name):
    schedule = one_at_a_time(build(name, 4, 8))
    validate(schedule)
    assert max(peak_memory(schedule, Costs.unit())) == schedule.num_chunks
