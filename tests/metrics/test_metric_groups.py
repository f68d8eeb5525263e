"""Metrics gather over the replicas, or over nobody; a user's own way of gathering stays."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_pipeoffload.metrics.metric_groups import MetricGroups


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.more = MetricCollection({"sum": SumMetric()})
        self.users = SumMetric(dist_sync_fn=lambda state, group: [state, state])


def of_replicas(num, is_alone=True):
    return SimpleNamespace(num=num, group=None, is_alone_with=lambda _: is_alone)


def test_one_replica_gathers_from_nobody():
    module = Module()
    metrics = [module.mean, module.more["sum"], module.users]
    plain = [metric.distributed_available_fn for metric in metrics]
    groups = MetricGroups(module, of_replicas(1))
    assert not any(metric.distributed_available_fn() for metric in metrics)
    groups.give_back()
    assert [metric.distributed_available_fn for metric in metrics] == plain


def test_several_gather_all_but_what_gathers_by_itself():
    module = Module()
    users = module.users.dist_sync_fn
    groups = MetricGroups(module, of_replicas(3))
    gather = module.mean.dist_sync_fn
    assert module.more["sum"].dist_sync_fn is gather
    assert module.users.dist_sync_fn is users
    assert deepcopy(module.mean).dist_sync_fn is gather
    state = torch.ones(2)
    assert all(part is state for part in gather(state))  # in a probe: nobody else is there
    assert len(gather(state)) == 3
    groups.give_back()
    assert module.mean.dist_sync_fn is None
    assert module.users.dist_sync_fn is users
