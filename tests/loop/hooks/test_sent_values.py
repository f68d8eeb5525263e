"""What hooks get of other ranks: values as they were, or placeholders that raise when used."""

import copy
import pickle
from collections import deque
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pipeoffload.loop.hooks import RemoteOutputs, numbers_in, refuse_different_callbacks
from lightning_pipeoffload.loop.hooks.sent_values import UnsendableError, pack, unpack
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.users_code import RemoteValue

CPU = torch.device("cpu")


def test_values_arrive_without_graph():
    weight = torch.arange(6.0).view(2, 3).requires_grad_()
    value = {
        "list": [weight * 2, weight.T[1:], torch.empty(0, 3), torch.tensor(True)],
        "deque": deque([torch.ones(2, dtype=torch.bfloat16), None], maxlen=2),
        "parameter": nn.Parameter(torch.ones(1)),
        "number": (1.5, "text"),
    }
    found = unpack(pack(value), CPU)
    assert found["list"][0].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert found["list"][1].tolist() == [[1, 4], [2, 5]]
    assert [tuple(each.shape) for each in found["list"][2:]] == [(0, 3), ()]
    assert not any(each.requires_grad for each in found["list"])
    assert (found["deque"][0].dtype, found["deque"].maxlen) == (torch.bfloat16, 2)
    assert (found["number"], float(found["parameter"])) == ((1.5, "text"), 1)
    assert len(pack(torch.ones(100_000)[:2])) < 1000  # a view does not bring its storage


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: 1, "cannot be pickled"),
        (torch.ones(1000), "more than 256 MiB"),
        ("x" * 4000, "more than 256 MiB"),
        ([ShapeOnly(torch.ones(2, device="meta"), CPU, frozenset())], "several stages"),
    ],
)
def test_what_cannot_be_sent_says_why(value, reason):
    with pytest.raises(UnsendableError, match=reason):
        pack(value, room=2000)


USES = [
    lambda value: value.append(1),
    lambda value: "logits" in value,
    lambda value: [*value],
    lambda value: len(value),
    lambda value: float(value),
    lambda value: value + 1,
    lambda value: sum([value]),
    lambda value: value.detach(),
    lambda value: torch.stack([torch.ones(()), value]),
    lambda value: torch.ones(()) * value,
    lambda value: sorted([value, value]),
    lambda value: f"{value}",
]


@pytest.mark.parametrize("use", [*USES, lambda value: value[0], lambda value: 1 if value else 2])
def test_any_use_of_an_attribute_raises(use):
    with pytest.raises(RuntimeError, match="self.outs is elsewhere"):
        use(RemoteValue("self.outs is elsewhere", []))


def test_an_attributes_placeholder_may_be_copied_pickled_and_shown():
    value = RemoteValue("self.outs is elsewhere", [1])
    for copied in (copy.deepcopy(value), copy.copy(value), pickle.loads(pickle.dumps(value))):
        assert repr(copied) == "<self.outs is elsewhere>"
        assert copied.local_value == [1]


@pytest.fixture
def outputs():
    return RemoteOutputs("training_step", 3, lambda: {"loss": 2.0})


def test_numbers_of_outputs_come_from_where_they_are(outputs):
    assert isinstance(outputs, dict)
    assert (outputs["loss"], outputs.get("loss"), bool(outputs)) == (2.0, 2.0, True)
    tensor = torch.tensor(1.0)
    assert numbers_in(tensor) == {"loss": tensor}
    several = {"a": 1, "b": torch.ones(2), "c": "text", "d": tensor}
    assert numbers_in(several) == {"a": 1, "d": tensor}
    assert numbers_in(None) == {}


OF_OUTPUTS = [
    lambda outputs: outputs["logits"],
    lambda outputs: outputs.get("logits"),
    lambda outputs: outputs.items(),
    lambda outputs: dict(outputs),
    pickle.dumps,
    copy.copy,
]


@pytest.mark.parametrize("use", [*USES, *OF_OUTPUTS])
def test_any_other_use_of_outputs_raises(outputs, use):
    with pytest.raises(RuntimeError, match="of what training_step returns, only numbers.*rank 3"):
        use(outputs)


class Module(L.LightningModule):
    def on_test_end(self):
        self.passed = True


class Keeps(L.Callback):
    def on_validation_epoch_end(self, trainer, module):
        module.kept = trainer


@pytest.mark.parametrize(
    ("callbacks", "names", "is_refused"),
    [([], ["Keeps"], True), ([Keeps(), Keeps()], ["Keeps"], True), ([L.Callback()], [], False)],
)
def test_callbacks_that_global_rank_0_does_not_have_are_refused(callbacks, names, is_refused):
    strategy = SimpleNamespace(broadcast=lambda mine: ["Module", *names])
    trainer = SimpleNamespace(
        lightning_module=Module(), callbacks=callbacks, strategy=strategy, global_rank=1
    )
    if not is_refused:  # hooks that are at no end
        return refuse_different_callbacks(trainer)
    with pytest.raises(ValueError, match="Module, Keeps on global rank 0, of Module"):
        return refuse_different_callbacks(trainer)
