"""A step that changes its batch does so once for each microbatch, as on one device."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.runtime.microbatch import split_batch
from lightning_pipeoffload.runtime.users_code.snapshot import fingerprint, is_unchanged
from lightning_pipeoffload.runtime.users_code.step_call import copy_batch
from lightning_pipeoffload.schedule import build
from tests.support.pairs import pairs
from tests.support.small_modules import Regression, call_step, linear_blocks

PIPELINES = [("zb_v", 1), ("interleaved_1f1b", 2), ("zb_h1", 3), ("zb_h1", 1)]


@dataclass
class Batch:
    x: torch.Tensor
    extras: dict = field(default_factory=dict)


def halves(batch):
    batch["x"].div_(2)
    return batch["x"]


def replaces(batch):
    batch["x"] = batch["x"] / 2
    return batch["x"]


def adds_a_key(batch):
    batch["n"] = batch.get("n", 0) + 1
    return batch["x"] * batch["n"]


def pops(batch):
    return batch["x"] * batch.pop("scale", 1.0).mean()


def appends(batch):
    batch["inside"].append(batch["x"] / len(batch["inside"]))
    return batch["inside"][-1]


def writes_into_a_dataclass(batch):
    batch["record"].x.mul_(3)
    batch["record"].extras["n"] = len(batch["record"].extras)
    return batch["record"].x + batch["record"].extras["n"]


def wants_a_gradient(batch):
    batch["x"].requires_grad_()
    return batch["x"]


CHANGES = [
    halves, replaces, adds_a_key, pops, appends, writes_into_a_dataclass, wants_a_gradient
]  # fmt: skip


class Changing(Regression):
    """The loss has what was changed too, behind the blocks."""

    def __init__(self, change):
        super().__init__(linear_blocks(6))
        self.change = change

    def step(self, batch):
        x = self.change(batch)
        return (self(x) - batch["x"].mean()).pow(2).mean()


def make_batch(x):
    inside, scale = [x.clone() * 2, x.clone()], torch.rand(8).double()
    return {"x": x.clone(), "scale": scale, "inside": inside, "record": Batch(x.clone())}


@pytest.mark.parametrize(("change", "pipeline"), pairs(CHANGES, PIPELINES))
def test_a_change_is_made_once(change, pipeline):
    schedule, num_ranks = pipeline
    torch.manual_seed(0)
    module, x = Changing(change).double(), torch.randn(8, 4).double()
    plain = copy.deepcopy(module)
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step)
    for _ in range(2):
        torch.manual_seed(1)
        batch = make_batch(x)
        torch.manual_seed(1)
        losses, expected = pipeline.run(batch, 2), []
        for part in split_batch(make_batch(x), 2):
            expected.append(call_step(plain, part))
            (expected[-1] / 4).backward()
        torch.testing.assert_close(losses, [loss.detach() for loss in expected])
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(pipeline.named_gradients(), gradients)


@pytest.mark.parametrize("schedule", ["zb_v", "zb_h1"])
def test_hooks_find_the_change_in_the_batch_once(schedule):
    x = torch.randn(8, 4)
    batch = {"x": x.clone()}
    InProcessPipeline(Changing(halves), build(schedule, 1, 4), call_step).run(batch, 2)
    torch.testing.assert_close(batch["x"], x / 2)


def test_what_is_one_tensor_for_all_is_changed_for_each_microbatch_alone():
    def change(batch):
        batch["scale"].mul_(2)
        return batch["x"] * batch["scale"]

    module, x = Changing(change), torch.randn(1, 4).expand(8, 4)
    expected = call_step(module, {"x": x, "scale": torch.ones(1)}).detach()
    pipeline = InProcessPipeline(module, build("zb_v", 1, 4), call_step)
    losses = pipeline.run({"x": x, "scale": torch.ones(1)}, 2)
    torch.testing.assert_close(losses, [expected] * 4)


def test_copies_have_the_form_and_the_identities_of_what_they_copy():
    tensor = torch.ones(2)
    value = {"a": tensor, "b": [tensor, (tensor, "text")], "c": Batch(tensor)}
    copied = copy_batch(value)
    assert copied["a"] is copied["b"][0] is copied["b"][1][0] is copied["c"].x is not tensor
    before = fingerprint(copied)
    assert is_unchanged(before, fingerprint(copied))
    copied["c"].x.add_(1)
    assert not is_unchanged(before, fingerprint(copied))
    assert value["a"].sum() == 2
