"""Numbers get into the store in order; figures of all ranks reach global rank 0."""

import json
from queue import Queue

import pytest
import torch
from torch.distributed import HashStore

from lightning_pipeoffload.metrics.publisher import Publisher, RankFigures


def test_what_was_published_is_there_when_the_publisher_is_closed():
    store = HashStore()
    publisher = Publisher(store, print)
    metrics = {"log": {"a": torch.tensor(1.5), "b": 2}}
    for moment in range(70):
        metrics["log"]["b"] = moment
        publisher.publish(f"at {moment}", metrics)
        metrics["log"]["a"] = torch.tensor(float("nan"))
    publisher.close()
    assert not store.check(["at 5"])
    assert store.check(["at 6", "at 69"])
    assert json.loads(store.get("at 69"))["log"]["b"] == 69


def test_numbers_are_those_of_the_moment():
    store = HashStore()
    publisher = Publisher(store, print)
    metrics = {"log": {"a": torch.tensor(1.5)}}
    publisher.publish("now", metrics)
    metrics["log"]["a"].fill_(3.0)
    publisher.close()
    assert json.loads(store.get("now")) == {"log": {"a": 1.5}}


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
