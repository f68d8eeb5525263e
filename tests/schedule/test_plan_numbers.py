import json

import pytest

from lightning_pipeoffload.schedule import Costs, build, lower, offload_activations
from lightning_pipeoffload.schedule.schedule import from_numbers, to_numbers


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "po_f"])
def test_a_plan_comes_back_through_json_as_it_was(name):
    plan = build(name, 3, 6)
    read = from_numbers(json.loads(json.dumps(to_numbers(plan))), name)
    assert read == plan
    assert read[0][0].kind is plan[0][0].kind


def test_so_do_copies_and_messages():
    costs = Costs(1, 1, 1, offload=0.5, reload=0.5, weight_input=0.3)
    plan = lower(offload_activations(build("zb_h1", 2, 4), costs, "full")[0])
    assert from_numbers(to_numbers(plan), plan.name) == plan


def test_numbers_that_are_not_three_for_each_action_are_refused():
    with pytest.raises(ValueError, match="zip"):
        from_numbers([[0, 0, 0, 1]], "cut off")
