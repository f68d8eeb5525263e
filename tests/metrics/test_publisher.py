"""Numbers get into the store in order; figures of all ranks reach global rank 0."""

import json
from math import isnan
from queue import Queue
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from lightning_pipeoffload.metrics import PendingNumbers, RankFigures
from lightning_pipeoffload.metrics.publisher import Publisher
from lightning_pipeoffload.runtime import late_values


def test_what_was_published_is_there_when_the_publisher_is_closed():
    store = HashStore()
    publisher = Publisher(store, print)
    for moment in range(70):
        metrics = {"log": {"a": torch.tensor(float(moment)), "b": moment, "c": torch.tensor(1.5)}}
        publisher.publish(f"at {moment}", PendingNumbers(metrics))
        metrics["log"]["a"].fill_(float("nan"))  # numbers are those of the moment
        metrics["log"]["b"] = -1
    publisher.publish("nan", PendingNumbers(metrics))
    publisher.close()
    assert not store.check(["at 5"])
    assert store.check(["at 7", "at 69"])
    assert json.loads(store.get("at 69")) == {"log": {"a": 69.0, "b": 69, "c": 1.5}}
    assert isnan(json.loads(store.get("nan"))["log"]["a"])


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_of_the_store_is_reported(monkeypatch, is_late):
    monkeypatch.setattr(late_values, "is_on_accelerator", lambda value: is_late)
    monkeypatch.setattr(late_values, "start_host_copy", lambda tensor: lambda: tensor)
    told = Queue()
    publisher = Publisher(None, told.put)
    publisher.publish("at 0", PendingNumbers({"log": {"a": torch.tensor(1.0)}}))
    assert "'set'" in str(told.get(timeout=1000))
    publisher.close()


def test_numbers_of_the_host_come_after_those_of_an_accelerator(monkeypatch):
    """They are read once, in the order in which they were published."""
    computed, written = Event(), []
    monkeypatch.setattr(late_values, "is_on_accelerator", torch.is_tensor)

    def start_host_copy(tensor):
        return lambda: tensor if computed.wait(1000) else None

    monkeypatch.setattr(late_values, "start_host_copy", start_host_copy)
    store = SimpleNamespace(set=lambda key, value: written.append(key))
    publisher = Publisher(store, print)
    publisher.publish("at 0", PendingNumbers({"log": {"a": 1.0}}))
    publisher.publish("at 1", PendingNumbers({"log": {"a": torch.tensor(1.0)}}))
    publisher.publish("at 2", PendingNumbers({"log": {"a": 2.0}}))
    assert written == ["at 0"]
    computed.set()
    publisher.close()
    assert written == ["at 0", "at 1", "at 2"]


@pytest.fixture
def ranks():
    store, failed = HashStore(), Queue()
    made = [RankFigures(store, "here", rank, [0, 1], failed.put) for rank in range(2)]
    yield made
    assert failed.empty()


def test_a_step_arrives_when_all_ranks_have_given_theirs(ranks):
    first, second = ranks
    first.publish(5, {"a": torch.tensor(1.5)})
    assert list(first.arrived()) == []
    first.publish(10, {"a": 2.5})
    second.publish(5, {"a": 3})
    second.publish(10, {})
    second.close()
    first.close()
    assert list(first.arrived()) == [
        (5, {0: {"a": 1.5}, 1: {"a": 3.0}}),
        (10, {0: {"a": 2.5}, 1: {}}),
    ]
    assert list(second.arrived()) == []


def test_no_rank_waits_after_a_run_was_broken_off(ranks):
    first, second = ranks
    first.publish(5, {"a": 1.0})
    first.abandon()
    second.abandon()
