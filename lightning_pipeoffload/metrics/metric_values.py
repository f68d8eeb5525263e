"""Values of metrics over a whole batch, where the step calls them with microbatches.

What a metric returns when it is called is of that call's inputs; Lightning logs it as the value "on
step" of the metric, and a step may log it itself. A copy of the metric, updated with the same
inputs, has it for the batch, whatever the metric computes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves  # private: see runtime/leaves
from torchmetrics import Metric


@dataclass(frozen=True)
class CallValue:
    """A number that a call of a metric has returned.

    Attributes:
        copy: The copy of the metric that is updated with the whole batch.
        place: Which number of what the call returned, counted over all of its tensors.
        number: The number as it was then.
    """

    copy: Metric
    place: tuple[int, int]
    number: Tensor

    def over_batch(self) -> Tensor:
        """Return the number for the batch."""
        tensor, index = self.place
        return tree_leaves(self.copy.compute())[tensor].flatten()[index]


class WholeBatchValues:
    """Copies of a module's metrics that know of one batch only.

    Args:
        module: The module whose metrics are meant.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._copies: dict[int, list[Metric]] = {}
        self._calls: Counter[int] = Counter()
        self._returned: dict[int, tuple[Metric, int, Tensor, Tensor]] = {}

    def watching(self, enabled: bool) -> AbstractContextManager[None]:
        """See the metrics' calls in the microbatch that begins now."""
        self._calls.clear()
        self._returned.clear()
        return self._watching() if enabled and self._metrics else nullcontext()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        for metric in self._metrics:
            metric.__dict__["forward"] = self._forward_of(metric)
        try:
            yield
        finally:
            for metric in self._metrics:
                del metric.__dict__["forward"]

    def give_to(self, metric: Metric) -> None:
        """Let Lightning find the batch's value where it looks for that of the last call."""
        copies = self._copies.get(id(metric))
        if copies:
            # Private: Lightning reads it.
            metric._forward_cache = copies[self._calls[id(metric)] - 1].compute()

    def origin(self, value: Any) -> CallValue | None:
        """Tell whether a number that the step logs is one that a metric returned in this call.

        ``detach()`` and an index into several numbers keep the memory, by which it is known.
        """
        if type(value) is not Tensor or value.numel() != 1 or not self._returned:
            return None
        found = self._returned.get(_memory(value))
        if found is None or found[2].dtype != value.dtype:
            return None
        copy, tensor, returned, then = found
        index = int(value.storage_offset() - returned.storage_offset())
        is_in_it = 0 <= index < returned.numel()
        return CallValue(copy, (tensor, index), then.flatten()[index]) if is_in_it else None

    def forget(self) -> None:
        """Be done with the batch."""
        for copies in self._copies.values():
            for copy in copies:
                copy.reset()

    def _forward_of(self, metric: Metric) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            value = type(metric).forward(metric, *args, **kwargs)
            copy = self._copy_for_call(metric)
            copy.update(*args, **kwargs)
            if type(metric).forward is Metric.forward:  # else it may be of more than this call
                self._remember(copy, value)
            return value

        return forward

    def _remember(self, copy: Metric, value: Any) -> None:
        for index, tensor in enumerate(tree_leaves(value)):
            if type(tensor) is Tensor and tensor.is_contiguous():
                kept = tensor.detach()
                self._returned[_memory(tensor)] = (copy, index, kept, kept.clone())

    def _copy_for_call(self, metric: Metric) -> Metric:
        """Return the copy for the first call in a microbatch, for the second, and so on."""
        place = self._calls[id(metric)]
        self._calls[id(metric)] += 1
        copies = self._copies.setdefault(id(metric), [])
        if place == len(copies):
            copies.append(_fresh(metric))
        return copies[place]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fresh(metric: Metric) -> Metric:
    # Not its hooks: those of a profiler hold what cannot be copied.
    hooks = [d for m in metric.modules() for d in (m._forward_hooks, m._forward_pre_hooks)]
    with _CopiesWithoutGraphs():
        copy = deepcopy(metric, {id(found): OrderedDict() for found in hooks})
    for child in copy.modules():
        child.__dict__.pop("forward", None)
        if isinstance(child, Metric):
            # Private: what it has been made with decides, not ``sync_on_compute``.
            child._to_sync = child.dist_sync_on_step  # as of the value of one call
    copy.reset()
    return copy


class _CopiesWithoutGraphs(TorchFunctionMode):
    """Copies tensors that were computed, which torch refuses, without what they came from.

    A metric that was given the model's outputs as they are keeps such: its latest value at least.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not Tensor.__deepcopy__ or args[0].is_leaf:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]
