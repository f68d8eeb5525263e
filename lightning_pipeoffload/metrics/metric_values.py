"""Metrics gather over the replicas of a pipeline, and never within one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_pipeoffload.runtime.comm import Replicas

_PLAIN = Metric.sync
_PLAIN_SETUP = Strategy.setup_environment


class ReplicaMetricSync:
    """Makes all metrics of a process gather over the replicas until another run begins.

    Within a pipeline nothing is gathered: what steps have written is sent at an epoch's end. The
    processes stay the same after a run, where a script prints what a callback has counted, until
    the next run of any strategy begins.

    Args:
        replicas: The counterparts of this rank.
        refuse: Raises for a metric whose value is on another rank.
    """

    def __init__(self, replicas: Replicas, refuse: Callable[[Metric], None]) -> None:
        self._num, self._group = replicas.num, replicas.group
        self._is_local_only: Callable[[Tensor], bool] = replicas.is_local_only
        self._refuse = refuse

        def sync(metric: Metric, dist_sync_fn: Any = None, *args: Any, **kwargs: Any) -> None:
            self._refuse(metric)
            if self._num > 1:
                _PLAIN(metric, dist_sync_fn or self._gather, *args, **kwargs)

        Metric.sync = sync  # type: ignore[method-assign, assignment]
        Strategy.setup_environment = _restore_metric_sync  # type: ignore[method-assign]

    def _gather(self, state: Tensor, group: Any | None = None) -> list[Tensor]:
        if self._is_local_only(state):
            return [state] * self._num
        return gather_all_tensors(state, self._group if group is None else group)

    def end_run(self) -> None:
        """Drop what is of the run, all but the processes over which metrics gather."""
        self._refuse = lambda metric: None
        self._is_local_only = lambda state: False


def _restore_metric_sync(self: Strategy) -> None:
    """Make metrics gather as torchmetrics does, unless this run's strategy changes that again."""
    Metric.sync = _PLAIN  # type: ignore[method-assign]
    Strategy.setup_environment = _PLAIN_SETUP  # type: ignore[method-assign]
    _PLAIN_SETUP(self)
