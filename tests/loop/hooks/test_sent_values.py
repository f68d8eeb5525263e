"""Values of all kinds arrive as they were, without graph; what cannot be sent says why."""

from collections import deque

import pytest
import torch
from torch import nn

from lightning_pipeoffload.loop.hooks.sent_values import UnsendableError, pack, unpack
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly

CPU = torch.device("cpu")


def test_values_arrive():
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
    assert found["deque"][0].dtype == torch.bfloat16
    assert (found["deque"].maxlen, found["number"], float(found["parameter"])) == (
        2,
        (1.5, "text"),
        1,
    )


def test_a_view_does_not_bring_its_storage():
    assert len(pack(torch.ones(100_000)[:2])) < 1000


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
