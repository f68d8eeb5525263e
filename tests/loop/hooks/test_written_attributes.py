"""Which attributes some code writes, in all the ways in which steps collect."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from lightning_pipeoffload.loop.hooks.written_attributes import (
    WrittenAttributes,
    attributes_watched,
)


class Meter:
    total = 0.0

    def add(self, value):
        self.total = self.total + value


class Owner(nn.Module):
    shared, total = [], 0

    def __init__(self):
        super().__init__()
        self.values, self.named, self.number = [], {"a": []}, 1.5
        self.table = {index: [] for index in range(100)}
        self.meter, self.metric = Meter(), SumMetric()
        self.tensor = torch.zeros(2)
        self.register_buffer("buffer", torch.zeros(2))


WRITES = {
    "values": lambda owner: owner.values.append(1),
    "named": lambda owner: owner.named["a"].append(1),
    "table": lambda owner: owner.table.update(new=1),
    "number": lambda owner: setattr(owner, "number", owner.number + 1),
    "meter": lambda owner: owner.meter.add(1.0),
    "tensor": lambda owner: owner.tensor.add_(1),
    "buffer": lambda owner: owner.buffer.add_(1),
    "shared": lambda owner: owner.shared.append(1),
    "total": lambda owner: setattr(type(owner), "total", type(owner).total + 1),
    "made": lambda owner: setattr(owner, "made", 1),
}


def watched(owner, write):
    written = WrittenAttributes(owner, frozenset(vars(nn.Module())))
    with written.watching():
        write(owner)
    return written.names


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_noted_by_name(name):
    assert watched(Owner(), WRITES[name]) == {name}


def test_reading_is_no_write():
    assert not watched(Owner(), lambda owner: (owner.values[:], owner.tensor.sum(), owner.meter))


def test_a_callbacks_metric_is_written_by_its_update():
    callback = Meter()
    callback.metric = SumMetric()
    assert watched(callback, lambda owner: owner.metric.update(1)) == {"metric"}


def test_uses_of_watched_attributes_are_told():
    owner, used = Owner(), []
    with attributes_watched(owner, {"values", "buffer"}, used.append):
        assert (owner.values, owner.number, float(owner.buffer.sum())) == ([], 1.5, 0.0)
    assert (used, type(owner)) == (["values", "buffer"], Owner)
