"""Values of metrics over a whole batch, where the step calls them with microbatches.

What a metric returns when it is called is of that call's inputs; Lightning logs it as the value "on
step" of the metric. A copy of the metric, updated with the same inputs, has it for the batch,
whatever the metric computes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from torchmetrics import Metric


class WholeBatchValues:
    """Copies of a module's metrics that know of one batch only.

    Args:
        module: whose metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._copies: dict[int, list[Metric]] = {}
        self._calls: Counter[int] = Counter()

    @contextmanager
    def watching(self, enabled: bool) -> Iterator[None]:
        """See the metrics' calls in one microbatch."""
        metrics = self._metrics if enabled else []
        self._calls.clear()
        for metric in metrics:
            metric.__dict__["forward"] = self._forward_of(metric)
        try:
            yield
        finally:
            for metric in metrics:
                del metric.__dict__["forward"]

    def give_to(self, metric: Metric) -> None:
        """Let Lightning find the batch's value where it looks for that of the last call."""
        copies = self._copies.get(id(metric))
        if copies:
            # Private: Lightning reads it.
            metric._forward_cache = copies[self._calls[id(metric)] - 1].compute()

    def forget(self) -> None:
        """Be done with the batch."""
        for copies in self._copies.values():
            for copy in copies:
                copy.reset()

    def _forward_of(self, metric: Metric) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            value = type(metric).forward(metric, *args, **kwargs)
            self._copy_for_call(metric).update(*args, **kwargs)
            return value

        return forward

    def _copy_for_call(self, metric: Metric) -> Metric:
        """Return the copy for the first call in a microbatch, for the second, and so on."""
        place = self._calls[id(metric)]
        self._calls[id(metric)] += 1
        copies = self._copies.setdefault(id(metric), [])
        if place == len(copies):
            copies.append(_fresh(metric))
        return copies[place]


def _fresh(metric: Metric) -> Metric:
    # Not its hooks: those of a profiler hold what cannot be copied.
    hooks = [d for m in metric.modules() for d in (m._forward_hooks, m._forward_pre_hooks)]
    copy = deepcopy(metric, {id(found): OrderedDict() for found in hooks})
    for child in copy.modules():
        child.__dict__.pop("forward", None)
    copy.reset()
    return copy
