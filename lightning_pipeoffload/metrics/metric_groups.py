"""Which processes a metric's value is of: this rank's counterparts in all replicas, or it alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_pipeoffload.runtime.replicas import Replicas

_PLAIN = Metric.sync


class MetricGroups:
    """Lets all metrics of a process gather over the replicas while a run lasts, wherever they are.

    Within a pipeline nothing is gathered: what steps have written is sent at an epoch's end.

    Args:
        replicas: The counterparts of this rank.
        refuse: A function that raises for a metric whose value is on another rank.
    """

    def __init__(self, replicas: Replicas, refuse: Callable[[Metric], None]) -> None:
        if replicas.num == 1:
            warnings.filterwarnings("ignore", ".*sync_dist=True.*", category=PossibleUserWarning)

        def gather(state: Tensor, group: Any | None = None) -> list[Tensor]:
            if replicas.is_alone_with(state):
                return [state] * replicas.num
            return gather_all_tensors(state, replicas.group if group is None else group)

        def sync(metric: Metric, dist_sync_fn: Any = None, *args: Any, **kwargs: Any) -> None:
            refuse(metric)
            if replicas.num > 1:
                _PLAIN(metric, dist_sync_fn or gather, *args, **kwargs)

        Metric.sync = sync  # type: ignore[method-assign, assignment]

    def give_back(self) -> None:
        """Let them gather as before, under another strategy."""
        Metric.sync = _PLAIN  # type: ignore[method-assign]
