"""Whose code it is, its lines in messages, and what a run without values leaves of its objects."""

import contextlib
import functools
import json
import random
from abc import ABC
from collections import OrderedDict, deque
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

import lightning_pipeoffload
from lightning_pipeoffload import strategy
from lightning_pipeoffload.runtime.users_code import (
    AttributeWatch,
    StepPoint,
    WrappedHook,
    fingerprint,
    in_brackets,
    is_library_object,
    original_class,
    restoring_attributes,
    running_user_line,
    subclass_like,
    users_line,
)
from lightning_pipeoffload.runtime.users_code.users_lines import (
    is_librarys_file,
    is_user_module,
    is_users_file,
)


def test_libraries_python_and_this_package_are_not_the_users_and_all_else_is():
    for module in (torch, L, random, lightning_pipeoffload, strategy):
        assert not is_user_module(module.__name__)
        assert not is_users_file(module.__file__)
    for name in (__name__, "__main__"):
        assert is_user_module(name)
    for name in (__file__, "<ipython-input-3-0123456789ab>"):
        assert is_users_file(name)
    assert not is_user_module("a.module.that.nobody.imported")
    assert is_librarys_file(torch.__file__)
    assert is_librarys_file(strategy.__file__)
    assert not is_librarys_file(contextlib.__file__)  # Python is no library


def test_what_libraries_have_for_themselves_is_not_looked_into():
    assert all(map(is_library_object, (torch.Generator(), ValueError(), functools.partial(print))))
    assert not any(map(is_library_object, (Meter(), SimpleNamespace())))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: WrappedHook(object(), "no_such_hook", print), AttributeError),
        (lambda: json.dumps({1, 2}), TypeError),
    ],
)
def test_the_line_of_an_error_is_the_users(call, error):
    with pytest.raises(error) as raised:
        call()
    assert f"{__file__}:" in users_line(raised.value)
    assert "(lambda: " in users_line(raised.value)


def test_the_line_that_calls_is_the_deepest():
    found = running_user_line()
    assert found.endswith("found = running_user_line()")
    assert in_brackets(found) == f" ({found})"
    assert in_brackets("") == ""


@pytest.mark.parametrize("base", [object, ABC])
def test_what_is_given_to_the_type_goes_to_the_class_it_stands_for(base):
    class Plain(base):
        count = 0

    first, second = Plain(), Plain()
    for instance in (first, second):
        instance.__class__ = subclass_like(Plain, {"__len__": lambda self: 3})
    type(first).count += 1
    type(second).count += 1
    type(first).word = "kept"
    assert (Plain.count, first.count, second.word, len(first)) == (2, 2, "kept", 3)
    del type(second).word
    assert not hasattr(Plain, "word")
    assert isinstance(first, Plain)
    assert original_class(first) is Plain


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
def test_a_run_without_values_leaves_all_as_it_was(write):
    module = Module()
    with restoring_attributes(module):
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
    watch = AttributeWatch(module)
    with restoring_attributes(module), watch.recording():
        module.values.append(2)
        module.total = 1
        watch.record_changes(StepPoint(0, is_in_block=False))
        watch.finish()
    assert [write.variable.label for write in watch.writes] == ["self.total", "self.values"]
    containers = [each for each, _ in fingerprint(OrderedDict(a=[1]))[1:]]
    assert containers == [{"a": [1]}, [1]]


def test_a_metric_whose_hash_goes_by_its_state_is_one_object():
    module = Module()
    module.mean = MeanMetric()
    watch = AttributeWatch(module)
    with restoring_attributes(module) as written, watch.recording():
        module.mean(torch.ones(2))
        module.mean.mean_value.add_(1)
        watch.record_changes(StepPoint(0, is_in_block=False))
    found = [write.variable.name for write in watch.writes]
    assert found.count("_computed") == 2  # compute() keeps the value, and forward() drops it
    assert {write.variable.attribute for write in watch.writes} >= written
