"""REDUCE and STEP: once for each stage, behind the last of its gradients; W's that wait."""

import pytest

from lightning_pipeoffload.schedule import (
    Costs,
    Kind,
    ScheduleError,
    add_final_actions,
    build,
    forward_only,
    keep_microbatches,
    lower,
    offload_activations,
    postpone_weights,
    steady_period,
    tails,
    validate,
)
from lightning_pipeoffload.schedule.simulation.memory import peak_memory
from tests.support.plans import SHAPES, plan

PLANS = [lower(build("1f1b", 1, 8)), *(lower(build(name, 4, 8)) for name in SHAPES)]


@pytest.mark.parametrize("lowered", PLANS, ids=repr)
def test_every_stage_has_one_behind_the_last_of_its_gradients(lowered):
    reduced = add_final_actions(lowered)
    validate(reduced)
    assert reduced.name == lowered.name
    rest = [tuple(a for a in rank if a.kind is not Kind.REDUCE) for rank in reduced]
    assert rest == list(lowered)
    for rank in reduced:
        for place, action in enumerate(rank):
            if action.kind is Kind.REDUCE:
                assert rank[place - 1].kind in (Kind.W, Kind.BW)
                assert rank[place - 1] == action._replace(kind=rank[place - 1].kind)


def test_the_plan_of_zb_h1_and_its_tails():
    reduced = add_final_actions(lower(build("zb_h1", 2, 3)))
    assert reduced == plan("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0W0 0F2 0SEND_F2 0RECV_B1 0B1 0W1 0RECV_B2 0B2 0W2 0REDUCE2
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1W0 1RECV_F2 1F2 1B2 1SEND_B2 1W1 1W2 1REDUCE2
    """)  # fmt: skip  # noqa: E501
    assert [[" ".join(map(str, t.weights)) for t in tails(rank)] for rank in reduced] == [
        ["0W2"],
        ["1W1 1W2"],
    ]


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
        ("0REDUCE7", [""]),
    ],
)
def test_a_tail_is_the_unbroken_run_of_the_stages_own_weight_gradients(text, weights):
    (actions,) = plan(text)
    assert [" ".join(map(str, tail.weights)) for tail in tails(actions)] == weights
    reductions = [action for action in actions if action.kind is Kind.REDUCE]
    assert [tail.final for tail in tails(actions)] == reductions


def test_it_is_added_once():
    with pytest.raises(ScheduleError, match="1f1b has REDUCE already; add REDUCE once"):
        add_final_actions(add_final_actions(lower(build("1f1b", 2, 2))))


def test_forwards_alone_have_no_gradients():
    with pytest.raises(ScheduleError, match="no backward, so there are no gradients for REDUCE"):
        add_final_actions(forward_only(build("1f1b", 2, 2)))


def test_evaluation_has_none():
    assert forward_only(add_final_actions(build("1f1b", 2, 2))).final_kind is None


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "gis"])
def test_passes_come_in_any_order(name):
    schedule = build(name, 2, 4)
    assert lower(add_final_actions(schedule)) == add_final_actions(lower(schedule))
    fewer = add_final_actions(keep_microbatches(schedule, 3))
    assert keep_microbatches(add_final_actions(schedule), 3) == fewer


def test_copies_are_planned_before():
    schedule = add_final_actions(build("uniform", 2, 4))
    with pytest.raises(ScheduleError, match="uniform has REDUCE already; offload before it is"):
        offload_activations(schedule, Costs.unit())


@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
@pytest.mark.parametrize("count", [0, 2, 4])
def test_postponed_weights_take_memory_and_no_time(name, count):
    schedule, costs = build(name, 4, 8), Costs.unit()
    postponed = postpone_weights(schedule, count)
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


def test_the_last_weights_of_a_rank_are_grouped_by_stage():
    alternate = plan("0F0 1F0 1B0 0B0 1W0 0W0 0F1 1F1 1B1 0B1 1W1 0W1")
    grouped = plan("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 1W0 1W1 0W0 0W1")
    assert postpone_weights(alternate, 1) == grouped
