"""Figures of all ranks reach global rank 0, whose thread waits for them, and nobody else."""

from __future__ import annotations

from queue import Queue

import pytest
import torch
from torch.distributed import HashStore

from lightning_pipeoffload.metrics.rank_figures import RankFigures


@pytest.fixture
def ranks():
    store, failed = HashStore(), Queue()
    made = [RankFigures(lambda: store, "here", rank, [0, 1], failed.put) for rank in range(2)]
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


def test_nobody_waits_after_a_run_was_broken_off(ranks):
    first, second = ranks
    first.give(5, {"a": 1.0})
    first.abandon()
    second.abandon()
