"""Metrics gather over the replicas, if there are several; a user's own ``dist_sync_fn`` stays."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torchmetrics import Metric, SumMetric

from lightning_pipeoffload.metrics import ReplicaMetricSync


@pytest.fixture
def join():
    """Join replicas of which each has the same state."""

    def make(num, refuse=lambda metric: None):
        replicas = SimpleNamespace(num=num, group=None, is_local_only=lambda _: True)
        return ReplicaMetricSync(replicas, refuse)

    yield make
    start_run()


class Once(SingleDeviceStrategy):
    """A strategy that counts how often it is set up."""

    num_setups = 0

    def setup_environment(self):
        super().setup_environment()
        self.num_setups += 1
        assert self.num_setups == 1


def start_run():
    """Start a run of another strategy."""
    Once(accelerator=CPUAccelerator()).setup_environment()


def total(**options):
    metric = SumMetric(distributed_available_fn=lambda: True, **options)
    metric.update(torch.ones(2))
    return float(metric.compute())


@pytest.mark.parametrize(("num_replicas", "expected", "own"), [(1, 2, 2), (3, 6, 4)])
def test_replicas_gather_all_but_what_gathers_by_itself(join, num_replicas, expected, own):
    join(num_replicas)
    found = total(), total(dist_sync_fn=lambda state, group: [state, state])
    assert found == (expected, own)


def test_after_a_run_metrics_gather_as_in_it_until_another_begins(join):
    plain, setup = Metric.sync, Strategy.setup_environment

    def refuse(metric):
        raise RuntimeError("elsewhere")

    join(1, refuse).end_run()
    assert total() == 2
    start_run()
    assert Metric.sync is plain
    assert Strategy.setup_environment is setup
