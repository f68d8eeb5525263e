"""Numbers get into the store in order; figures of all ranks reach global rank 0."""

import json
from math import isnan
from queue import Queue

import pytest
import torch
from torch.distributed import HashStore

from lightning_pipeoffload.metrics.publisher import Publisher, RankFigures


def test_what_was_published_is_there_when_the_publisher_is_closed():
    store = HashStore()
    publisher = Publisher(store, print)
    for moment in range(70):
        metrics = {"log": {"a": torch.tensor(float(moment)), "b": moment, "c": torch.tensor(1.5)}}
        publisher.publish(f"at {moment}", metrics)
        metrics["log"]["a"].fill_(float("nan"))  # numbers are those of the moment
        metrics["log"]["b"] = -1
    publisher.publish("nan", metrics)
    publisher.close()
    assert not store.check(["at 5"])
    assert store.check(["at 7", "at 69"])
    assert json.loads(store.get("at 69")) == {"log": {"a": 69.0, "b": 69, "c": 1.5}}
    assert isnan(json.loads(store.get("nan"))["log"]["a"])


def test_an_error_of_the_thread_is_reported():
    told = Queue()
    publisher = Publisher(None, told.put)
    publisher.publish("at 0", {})
    assert "'set'" in str(told.get(timeout=1000))
    publisher.close()


@pytest.fixture
def ranks():
    store, failed = HashStore(), Queue()
    made = [RankFigures(store, "here", rank, [0, 1], failed.put) for rank in range(2)]
    yield made
    assert failed.empty()


def test_a_step_arrives_when_all_ranks_have_given_theirs(ranks):
    first, second = ranks
    first.give(5, {"a": torch.tensor(1.5)})
    assert list(first.arrived()) == []
    first.give(10, {"a": 2.5})
    second.give(5, {"a": 3})
    second.give(10, {})
    second.close()
    first.close()
    assert list(first.arrived()) == [
        (5, {0: {"a": 1.5}, 1: {"a": 3.0}}),
        (10, {0: {"a": 2.5}, 1: {}}),
    ]
    assert list(second.arrived()) == []


def test_no_rank_waits_after_a_run_was_broken_off(ranks):
    first, second = ranks
    first.give(5, {"a": 1.0})
    first.abandon()
    second.abandon()
