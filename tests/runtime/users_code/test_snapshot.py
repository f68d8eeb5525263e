"""What a run without values collects does not stay, however deep it was put."""

from collections import OrderedDict, deque

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_pipeoffload.runtime.users_code.attributes import StepPoint, WriteWatch
from lightning_pipeoffload.runtime.users_code.snapshot import containers_in, unchanged


class Meter:
    def __init__(self):
        self.total, self.history = 0.0, []


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.values, self.named, self.last = [1], {"a": [1]}, deque([1], maxlen=3)
        self.meter = Meter()


WRITES = [
    lambda module: module.values.append(2),
    lambda module: module.named["a"].append(2),
    lambda module: module.named.update(b=[2]),
    lambda module: module.last.append(2),
    lambda module: setattr(module.meter, "total", 2.0),
    lambda module: module.meter.history.append(2),
    lambda module: setattr(module, "made", 2),
]


@pytest.mark.parametrize("write", WRITES)
def test_all_is_as_it_was(write):
    module = Module()
    with unchanged(module):
        write(module)
    assert (module.values, module.named, list(module.last)) == ([1], {"a": [1]}, [1])
    assert (module.meter.total, module.meter.history) == (0.0, [])
    assert not hasattr(module, "made")


class Lazy(OrderedDict):
    """Loads its values when it is asked for them, as those of transformers do."""

    def values(self):
        raise ValueError("could not load")


def test_a_mapping_that_loads_its_values_is_left_alone():
    module = Module()
    module.mapping = Lazy(b=[1])
    watch = WriteWatch(module)
    with unchanged(module), watch.watching():
        module.values.append(2)
        module.total = 1
        watch.compare(StepPoint(0, is_in_block=False))
        watch.finish()
    assert [write.variable.label for write in watch.writes] == ["self.total", "self.values"]
    assert len([*containers_in(OrderedDict(a=[1]))]) == 2


def test_a_metric_whose_hash_goes_by_its_state_is_one_object():
    module = Module()
    module.mean = MeanMetric()
    watch = WriteWatch(module)
    with unchanged(module) as written, watch.watching():
        module.mean(torch.ones(2))
        module.mean.mean_value.add_(1)
        watch.compare(StepPoint(0, is_in_block=False))
    found = [write.variable.name for write in watch.writes]
    assert found.count("_computed") == 2  # compute() keeps the value, and forward() drops it
    assert {write.variable.attribute for write in watch.writes} >= written
