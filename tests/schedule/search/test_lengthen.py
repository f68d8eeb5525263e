import pytest

from lightning_pipeoffload.schedule import (
    Action,
    Costs,
    Kind,
    Schedule,
    build,
    simulate,
    validate,
)
from lightning_pipeoffload.schedule.builders.zb_v import lengthen

STEADY = ["1f1b", "zb_h1", "zb_v"]


def idle(schedule):
    timeline = simulate(schedule, Costs.unit())
    return max(timeline.span) - max(timeline.busy)


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("m", [12, 13, 40])
def test_more_microbatches_add_neither_bubble_nor_memory(name, m):
    few = build(name, 4, 12)
    many = lengthen(few, m)
    validate(many)
    assert many.num_microbatches == m
    assert idle(many) == pytest.approx(idle(few))
    assert simulate(many, Costs.unit()).peak_memory == simulate(few, Costs.unit()).peak_memory


def test_rounds_of_two_microbatches_do_not_make_one_more():
    f, b, w = ([Action(kind, 0, index) for index in range(2)] for kind in (Kind.F, Kind.B, Kind.W))
    in_pairs = Schedule.of([[*f, *b, *w]])
    assert lengthen(in_pairs, 3) is None
    assert lengthen(in_pairs, 4).num_microbatches == 4
