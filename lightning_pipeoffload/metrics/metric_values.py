"""Values of metrics over a whole batch and all replicas.

A metric that a step calls with a microbatch returns the value of that call's inputs. Lightning logs
it as the value "on step" of the metric, and a step may log it itself. A copy of the metric that is
updated with the inputs of all microbatches has the value of the batch, whatever the metric
computes. Between replicas a metric gathers over this rank's counterparts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves  # private: see runtime/leaves
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_pipeoffload.runtime.comm.replicas import Replicas

_PLAIN = Metric.sync
_PLAIN_SETUP = Strategy.setup_environment


class CallValue(NamedTuple):
    """A number that a call of a metric has returned.

    Attributes:
        copy: The copy of the metric that is updated with the whole batch.
        leaf: Index of the tensor among those that the call returned.
        element: Index of the number in that tensor.
        returned: The tensor.
        then: Its values when it was returned.
    """

    copy: Metric
    leaf: int
    element: int
    returned: Tensor
    then: Tensor

    @property
    def number(self) -> Tensor:
        """The number when it was returned."""
        return self.then.flatten()[self.element]

    def over_batch(self) -> Tensor:
        """Return the number for the batch."""
        return tree_leaves(self.copy.compute())[self.leaf].flatten()[self.element]


class WholeBatchValues:
    """Copies of a module's metrics that are updated with one batch only."""

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._copies: dict[int, list[Metric]] = {}
        self._calls: Counter[int] = Counter()
        self._returned: dict[int, CallValue] = {}

    def start_watching(self) -> None:
        """Record the metrics' calls in the microbatch that begins now."""
        self._calls.clear()
        self._returned.clear()
        for metric in self._metrics:
            metric.__dict__["forward"] = partial(self._call, metric)

    def stop_watching(self) -> None:
        """Stop to record the metrics' calls."""
        for metric in self._metrics:
            del metric.__dict__["forward"]

    def _call(self, metric: Metric, *args: Any, **kwargs: Any) -> Any:
        value = type(metric).forward(metric, *args, **kwargs)
        copies = self._copies.setdefault(id(metric), [])
        call = self._calls[id(metric)]  # a step may call a metric several times
        self._calls[id(metric)] += 1
        if call == len(copies):
            copies.append(_fresh(metric))
        copies[call].update(*args, **kwargs)
        if type(metric).forward is Metric.forward:  # else it may be of more than this call
            for leaf, tensor in enumerate(tree_leaves(value)):
                if type(tensor) is Tensor and tensor.is_contiguous():
                    kept = tensor.detach()
                    call_value = CallValue(copies[call], leaf, 0, kept, kept.clone())
                    self._returned[_memory(tensor)] = call_value
        return value

    def origin(self, value: Any) -> CallValue | None:
        """Return the call of a metric that returned a number, if one did in this microbatch.

        ``detach()`` and an index into several numbers keep the memory, by which it is known. What
        is computed from it is a number like any other.
        """
        if type(value) is not Tensor or value.numel() != 1:
            return None
        call_value = self._returned.get(_memory(value))
        if call_value is None or call_value.returned.dtype != value.dtype:
            return None
        element = int(value.storage_offset() - call_value.returned.storage_offset())
        is_in_it = 0 <= element < call_value.returned.numel()
        return call_value._replace(element=element) if is_in_it else None

    def give_to(self, metric: Metric) -> None:
        """Put the batch's value where Lightning reads that of the last call."""
        copies = self._copies.get(id(metric))
        if copies:
            # Private: Lightning reads it.
            metric._forward_cache = copies[self._calls[id(metric)] - 1].compute()

    def forget(self) -> None:
        """Reset the copies, after a batch."""
        self._returned.clear()
        for copies in self._copies.values():
            for copy in copies:
                copy.reset()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fresh(metric: Metric) -> Metric:
    # Not its hooks: those of a profiler hold what cannot be copied.
    hooks = [d for m in metric.modules() for d in (m._forward_hooks, m._forward_pre_hooks)]
    with _CopiesWithoutGraphs():
        copy = deepcopy(metric, {id(hook_dict): OrderedDict() for hook_dict in hooks})
    for child in copy.modules():
        child.__dict__.pop("forward", None)
        if isinstance(child, Metric):
            # Private: torchmetrics reads it, and not ``sync_on_compute``, once the metric is made.
            child._to_sync = child.dist_sync_on_step  # as of the value of one call
    copy.reset()
    return copy


class _CopiesWithoutGraphs(TorchFunctionMode):
    """Copies tensors that were computed, which torch refuses, without what they came from.

    A metric that was given the model's outputs undetached has such tensors.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not Tensor.__deepcopy__ or args[0].is_leaf:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]


class MetricGroups:
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
        Strategy.setup_environment = _start_run  # type: ignore[method-assign]

    def _gather(self, state: Tensor, group: Any | None = None) -> list[Tensor]:
        if self._is_local_only(state):
            return [state] * self._num
        return gather_all_tensors(state, self._group if group is None else group)

    def end_run(self) -> None:
        """Drop what is of the run, all but the processes over which metrics gather."""
        self._refuse = lambda metric: None
        self._is_local_only = lambda state: False


def _start_run(self: Strategy) -> None:
    """Make metrics gather as torchmetrics does, unless this run's strategy changes that again."""
    Metric.sync = _PLAIN  # type: ignore[method-assign]
    Strategy.setup_environment = _PLAIN_SETUP  # type: ignore[method-assign]
    _PLAIN_SETUP(self)
