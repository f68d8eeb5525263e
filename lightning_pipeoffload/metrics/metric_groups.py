"""Which processes a metric's value is of: the roots of all replicas, or this one alone."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_pipeoffload.runtime.replicas import Replicas


class MetricGroups:
    """Metrics that gather over the replicas, each rank's over its counterparts, or over nobody.

    Within a pipeline one rank has a value: there is nothing to gather.

    Args:
        module: The module whose metrics are meant.
        replicas: The counterparts of this rank.
    """

    def __init__(self, module: nn.Module, replicas: Replicas) -> None:
        metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._plain = [(m, m.distributed_available_fn, m.dist_sync_fn) for m in metrics]
        gather = _Gather(replicas)
        if replicas.num == 1:
            warnings.filterwarnings("ignore", ".*sync_dist=True.*", category=PossibleUserWarning)
        for metric in metrics:
            if replicas.num == 1:
                metric.distributed_available_fn = _never
            elif metric.process_group is None and metric.dist_sync_fn is None:
                metric.dist_sync_fn = gather

    def give_back(self) -> None:
        """Let them gather as before, under another strategy."""
        for metric, is_available, gather in self._plain:
            metric.distributed_available_fn, metric.dist_sync_fn = is_available, gather


class _Gather:
    """Gathers a metric's state over the replicas; metrics that are copied have it in common."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def __call__(self, state: Tensor, group: Any | None = None) -> list[Tensor]:
        if self._replicas.is_alone_with(state):
            return [state] * self._replicas.num
        return gather_all_tensors(state, self._replicas.group if group is None else group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gather:
        return self


def _never() -> bool:
    return False
