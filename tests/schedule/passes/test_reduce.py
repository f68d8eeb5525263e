"""REDUCE: once for each stage, behind the last of its gradients."""

import pytest

from lightning_pipeoffload.schedule import (
    Costs,
    Kind,
    ScheduleError,
    add_reductions,
    build,
    forward_only,
    keep_microbatches,
    lower,
    offload_activations,
    tails,
    validate,
)
from tests.support.plans import SHAPES, plan

PLANS = [lower(build("1f1b", 1, 8)), *(lower(build(name, 4, 8)) for name in SHAPES)]


@pytest.mark.parametrize("lowered", PLANS, ids=repr)
def test_every_stage_has_one_behind_the_last_of_its_gradients(lowered):
    reduced = add_reductions(lowered)
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
    reduced = add_reductions(lower(build("zb_h1", 2, 3)))
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
    assert [tail.reduction for tail in tails(actions)] == reductions


def test_it_is_added_once():
    with pytest.raises(ScheduleError, match="1f1b has REDUCE already; add it only once"):
        add_reductions(add_reductions(lower(build("1f1b", 2, 2))))


def test_forwards_alone_have_no_gradients():
    with pytest.raises(ScheduleError, match="1f1b has no backward, so there are no gradients"):
        add_reductions(forward_only(build("1f1b", 2, 2)))


def test_evaluation_has_none():
    assert not forward_only(add_reductions(build("1f1b", 2, 2))).has_reductions


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "gis"])
def test_passes_come_in_any_order(name):
    schedule = build(name, 2, 4)
    assert lower(add_reductions(schedule)) == add_reductions(lower(schedule))
    fewer = add_reductions(keep_microbatches(schedule, 3))
    assert keep_microbatches(add_reductions(schedule), 3) == fewer


def test_copies_are_planned_before():
    schedule = add_reductions(build("uniform", 2, 4))
    with pytest.raises(ScheduleError, match="uniform has REDUCE already; offload before it is"):
        offload_activations(schedule, Costs.unit())
