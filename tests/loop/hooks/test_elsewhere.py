"""Placeholders raise whatever is done with them; numbers of outputs are fetched."""

import copy
import pickle

import pytest
import torch

from lightning_pipeoffload.loop.hooks.sent_values import OutputsElsewhere, numbers_in
from lightning_pipeoffload.runtime.users_code.attributes import Elsewhere

USES = [
    lambda value: value.append(1),
    lambda value: value[0],
    lambda value: "logits" in value,
    lambda value: [*value],
    lambda value: len(value),
    lambda value: float(value),
    lambda value: value + 1,
    lambda value: sum([value]),
    lambda value: value.detach(),
    lambda value: torch.stack(value),
    lambda value: torch.stack([torch.ones(()), value]),
    lambda value: torch.ones(()) * value,
    lambda value: sorted([value, value]),
    lambda value: f"{value}",
]


@pytest.mark.parametrize("use", [*USES, lambda value: 1 if value else 2])
def test_any_use_of_an_attribute_raises(use):
    with pytest.raises(RuntimeError, match="self.outs is elsewhere"):
        use(Elsewhere("self.outs is elsewhere", []))


def test_an_attributes_placeholder_may_be_copied_pickled_and_shown():
    value = Elsewhere("self.outs is elsewhere", [1])
    for copied in (copy.deepcopy(value), copy.copy(value), pickle.loads(pickle.dumps(value))):
        assert repr(copied) == "<self.outs is elsewhere>"
        assert copied.own == [1]


@pytest.fixture
def outputs():
    return OutputsElsewhere("training_step", 3, lambda: {"loss": 2.0})


def test_numbers_of_outputs_come_from_where_they_are(outputs):
    assert isinstance(outputs, dict)
    assert (outputs["loss"], outputs.get("loss"), bool(outputs)) == (2.0, 2.0, True)


OF_OUTPUTS = [
    lambda outputs: outputs["logits"],
    lambda outputs: outputs.get("logits"),
    lambda outputs: outputs.items(),
    lambda outputs: dict(outputs),
    pickle.dumps,
    copy.copy,
]


@pytest.mark.parametrize("use", [*(use for use in USES if use is not USES[1]), *OF_OUTPUTS])
def test_any_other_use_of_outputs_raises(outputs, use):
    with pytest.raises(RuntimeError, match="of what training_step returns, only numbers.*rank 3"):
        use(outputs)


def test_numbers_in_outputs():
    tensor = torch.tensor(1.0)
    assert numbers_in(tensor) == {"loss": tensor}
    assert numbers_in({"a": 1, "b": torch.ones(2), "c": "text", "d": tensor}) == {
        "a": 1,
        "d": tensor,
    }
    assert numbers_in(None) == {}
