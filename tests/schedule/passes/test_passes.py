"""Passes add transfers and reductions in their places, and leave the order as it is."""

import pytest

from lightning_pipeoffload.schedule import (
    COMPUTE,
    Costs,
    Kind,
    ScheduleError,
    add_final_actions,
    add_transfers,
    build,
    forward_only,
    keep_microbatches,
    lower,
    offload_activations,
    peak_memory,
    postpone_weight_gradients,
    serialize_microbatches,
    split_fused_backward,
    steady_period,
    tails,
    validate,
)
from tests.support.plans import SHAPES, plan

BUILT = [build("1f1b", 1, 8), *(build(name, 4, 8) for name in SHAPES)]
OF_TWO = "0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1"

ROWS = {
    "transfers; a backward is split where another rank waits": (
        lower,
        OF_TWO,
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0BW0 0RECV_B1 0BW1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1W0 1RECV_F1 1F1 1B1 1SEND_B1 1W1",
    ),
    "a backward is split only there": (
        split_fused_backward,
        "0F0 3F0 3BW0 0BW0\n1F0 2F0 2BW0 1BW0",
        "0F0 3F0 3B0 3W0 0BW0\n1F0 2F0 2BW0 1B0 1W0",
    ),
    "no transfer between stages of one rank": (lower, "0F0 1F0 1BW0 0BW0", "0F0 1F0 1BW0 0BW0"),
    "a message is received after those that were sent before it": (
        add_transfers,
        "0F0 0F1 2F0 2F1\n1F0 3F0 1F1 3F1",
        "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1\n"
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 3RECV_F0 3F0 1F1 1SEND_F1 3RECV_F1 3F1",
    ),
    "copies stay where they are": (
        lower,
        "0F0 0OFFLOAD0 0FREE0 0RELOAD0 0BW0\n1F0 1BW0",
        "0F0 0SEND_F0 0OFFLOAD0 0FREE0 0RELOAD0 0RECV_B0 0BW0\n1RECV_F0 1F0 1B0 1SEND_B0 1W0",
    ),
    "a reduction is after the last gradient of its stage": (
        add_final_actions,
        "0F0 0F1 0B0 0B1 0W1 0W0\n1F0 1F1 1BW0 1BW1",
        "0F0 0F1 0B0 0B1 0W1 0W0 0REDUCE0\n1F0 1F1 1BW0 1BW1 1REDUCE1",
    ),
    "the last weights of a rank are grouped by stage": (
        lambda plan: postpone_weight_gradients(plan, 1),
        "0F0 1F0 1B0 0B0 1W0 0W0 0F1 1F1 1B1 0B1 1W1 0W1",
        "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 1W0 1W1 0W0 0W1",
    ),
    "forwards only": (lambda plan: forward_only(lower(plan)), OF_TWO, "0F0 0F1\n1F0 1F1"),
    "fewer microbatches": (lambda plan: keep_microbatches(plan, 1), OF_TWO, "0F0 0BW0\n1F0 1BW0"),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_pass_gives(row):
    function, before, after = ROWS[row]
    assert str(function(plan(before))) == after


@pytest.mark.parametrize("schedule", BUILT, ids=repr)
def test_passes_give_valid_plans_in_the_same_order_and_whichever_is_first(schedule):
    lowered = lower(schedule)
    for made in (lowered, lower(forward_only(schedule)), keep_microbatches(lowered, 3)):
        validate(made)
    computed = [[a for a in rank if a.kind in COMPUTE] for rank in lowered]
    before = [[a for a in rank if a.kind in COMPUTE] for rank in split_fused_backward(schedule)]
    assert computed == before
    reduced = add_final_actions(lowered)
    validate(reduced)
    assert [tuple(a for a in rank if a.kind is not Kind.REDUCE) for rank in reduced] == [*lowered]
    assert reduced == lower(add_final_actions(schedule))
    assert reduced.name == schedule.name
    fewer = keep_microbatches(schedule, 3)
    assert keep_microbatches(add_final_actions(schedule), 3) == add_final_actions(fewer)
    assert forward_only(reduced).final_kind is None
    alone = serialize_microbatches(schedule)
    validate(alone)
    assert max(peak_memory(alone, Costs.unit())) == alone.num_chunks


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("0F0 0BW0 0REDUCE0", [""]),
        ("0F0 0B0 0W0 0REDUCE0", ["0W0"]),
        ("0F0 0F1 0B0 0W0 0B1 0W1 0REDUCE1", ["0W1"]),
        ("0F0 0F1 0B0 0B1 0W1 0W0 0REDUCE0", ["0W1 0W0"]),
        ("0F0 0F1 0B0 0BW1 0W0 0REDUCE0", ["0W0"]),
        ("0W0 1W0 0W1 0REDUCE1 1W1 1REDUCE1", ["0W1", "1W1"]),
        ("0W0 0W1 1W0 0REDUCE1 1W1 1REDUCE1", ["", "1W1"]),
        ("0W0 0RELOAD_W1 0W1 0REDUCE1", ["0W1"]),
        ("0W0 0W1", []),
    ],
)
def test_a_tail_is_the_unbroken_run_of_the_stages_own_weight_gradients(text, weights):
    (actions,) = plan(text)
    assert [" ".join(map(str, tail.weights)) for tail in tails(actions)] == weights
    reductions = [action for action in actions if action.kind is Kind.REDUCE]
    assert [tail.final for tail in tails(actions)] == reductions


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda plan: lower(lower(plan)), "has transfers already; lower it only once"),
        (
            lambda plan: add_final_actions(add_final_actions(plan)),
            "REDUCE already; add REDUCE once",
        ),
        (
            lambda plan: add_final_actions(forward_only(plan)),
            "no backward, so there are no gradients for REDUCE",
        ),
        (
            lambda plan: offload_activations(add_final_actions(plan), Costs.unit()),
            "has REDUCE already; offload before it is",
        ),
        (lambda plan: keep_microbatches(plan, 0), r"count \(0\) of microbatches to keep"),
    ],
)
def test_passes_that_cannot_be_are_refused(function, message):
    with pytest.raises(ScheduleError, match=message):
        function(build("1f1b", 2, 2))


def test_what_is_not_valid_is_not_lowered():
    with pytest.raises(ScheduleError, match="stage 1 has nothing for microbatch 1"):
        add_transfers(plan("0F0 0F1 0BW0 0BW1\n1F0 1BW0"))


@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
@pytest.mark.parametrize("count", [0, 2, 4])
def test_postponed_weights_take_memory_and_no_time(name, count):
    schedule, costs = build(name, 4, 8), Costs.unit()
    postponed = postpone_weight_gradients(schedule, count)
    validate(postponed)
    per_rank = count * schedule.num_chunks
    assert steady_period(postponed, costs, False) == steady_period(schedule, costs, False)
    assert max(peak_memory(postponed, costs)) <= max(peak_memory(schedule, costs)) + per_rank
    for rank, before in zip(postponed, schedule, strict=True):
        for stage in {action.stage for action in rank}:
            own = [a.microbatch for a in rank if (a.kind, a.stage) == (Kind.W, stage)]
            assert own == [a.microbatch for a in before if (a.kind, a.stage) == (Kind.W, stage)]
    lengths = [len(tail.weights) for rank in add_final_actions(postponed) for tail in tails(rank)]
    assert min(lengths) >= count
