"""What a run without values collects does not stay, however deep it was put."""

from collections import OrderedDict, deque

import pytest
from torch import nn

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
