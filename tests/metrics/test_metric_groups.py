"""Metrics gather over the replicas, or over nobody, wherever they are; a user's own way stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchmetrics import Metric, SumMetric

from lightning_pipeoffload.metrics.metric_groups import MetricGroups


@pytest.fixture
def join():
    """Join replicas of which each has the same state."""
    joined = []

    def make(num, refuse=lambda metric: None):
        replicas = SimpleNamespace(num=num, group=None, is_alone_with=lambda _: True)
        joined.append(MetricGroups(replicas, refuse))
        return joined[-1]

    yield make
    for groups in joined:
        groups.give_back()


def total(**options):
    metric = SumMetric(distributed_available_fn=lambda: True, **options)
    metric.update(torch.ones(2))
    return float(metric.compute())


def test_one_replica_gathers_from_nobody(join):
    join(1)
    assert total() == total(dist_sync_fn=lambda state, group: [state, state]) == 2


def test_several_gather_all_but_what_gathers_by_itself(join):
    join(3)
    assert total() == 6
    assert total(dist_sync_fn=lambda state, group: [state, state]) == 4


def test_a_value_that_is_elsewhere_is_refused(join):
    def refuse(metric):
        raise RuntimeError("elsewhere")

    join(1, refuse)
    with pytest.raises(RuntimeError, match="elsewhere"):
        total()


def test_torchmetrics_has_its_own_back():
    plain = Metric.sync
    replicas = SimpleNamespace(num=2)
    MetricGroups(replicas, lambda metric: None).give_back()
    assert Metric.sync is plain
