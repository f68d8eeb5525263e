"""Outputs on ranks that do not have them: numbers are fetched, anything else leaves the hook."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from lightning_pipeoffload.loop.hooks.outputs_elsewhere import (
    ElsewhereError,
    OutputsElsewhere,
    numbers_in,
)


@pytest.fixture
def outputs():
    return OutputsElsewhere(lambda: {"loss": 2.0})


def test_numbers_come_from_where_they_are(outputs):
    assert isinstance(outputs, dict)
    assert (outputs["loss"], outputs.get("loss")) == (2.0, 2.0)


USES = [
    lambda outputs: outputs["logits"],
    lambda outputs: outputs.get("logits"),
    lambda outputs: "logits" in outputs,
    lambda outputs: outputs.items(),
    lambda outputs: dict(outputs),
    lambda outputs: float(outputs),
    lambda outputs: outputs.detach(),
    lambda outputs: sum([outputs]),
    lambda outputs: torch.stack([outputs, outputs]),
    lambda outputs: sorted(outputs),
    lambda outputs: 1 if outputs else 2,
    pickle.dumps,
    copy.copy,
]


@pytest.mark.parametrize("use", USES)
def test_any_other_use_leaves(outputs, use):
    with pytest.raises(ElsewhereError):
        use(outputs)


def test_numbers_in_outputs():
    tensor = torch.tensor(1.0)
    assert numbers_in(tensor) == {"loss": tensor}
    assert numbers_in({"a": 1, "b": torch.ones(2), "c": "text", "d": tensor}) == {
        "a": 1,
        "d": tensor,
    }
    assert numbers_in(None) == {}
