"""Calls of torchmetrics objects in steps, made once for the batch.

Some metrics look at a whole update: a sigmoid is applied where one of its values is outside [0, 1],
and R2Score needs two samples. So a step's calls are recorded, and made when the batch's
microbatches are there::

    microbatch 0    self.auroc(logits, y)    recorded; returns a MetricValue
    microbatch 1    self.auroc(logits, y)    recorded
    batch           self.auroc(both logits, both y), once; then self.log gets its value

Metrics that are exact for each microbatch and may get large tensors (see
:func:`is_exact_per_microbatch`) are updated with each instead, and a copy of them too, which has
the batch's value.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (  # private: see runtime/leaves
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)
from torchmetrics import Metric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassStatScores,
)
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError
from torchmetrics.text import Perplexity
from torchmetrics.wrappers import Running

from lightning_pipeoffload.metrics.joined_arguments import ArgumentJoiner, NotJoinedError
from lightning_pipeoffload.metrics.metric_value import (
    Entry,
    MetricValue,
    is_expression,
    make_metric_values,
    resolve_metric_values,
)
from lightning_pipeoffload.runtime.shapes import ValueNeededError
from lightning_pipeoffload.runtime.users_code import in_brackets, running_user_line

log = logging.getLogger(__name__)

_OWN_VALUE = (
    "each microbatch's own value of a %s is computed, which differs from the batch's: the step "
    "uses it otherwise than for self.log%s"
)
_METHODS = ("forward", "update", "compute", "reset")
# What they add up for each sample or token does not depend on the others of an update.
_EXACT_APART = {
    kind.update
    for kind in (
        MulticlassConfusionMatrix,
        MulticlassExactMatch,
        MulticlassStatScores,
        MeanAbsoluteError,
        MeanSquaredError,
        Perplexity,
    )
}


def is_exact_per_microbatch(
    target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether updating a metric with each microbatch is the same as with the batch.

    Args:
        target: A metric or a collection.
        args: The positional arguments of its update in a microbatch.
        kwargs: The others.
    """
    if isinstance(target, MetricCollection):
        members = target.values(copy_state=False)
        return all(is_exact_per_microbatch(member, args, kwargs) for member in members)
    if isinstance(target, BaseAggregator):
        values = [*args, *kwargs.values()]
        has_weight = len(values) > 1
        has_samples = isinstance(values[0], Tensor) and values[0].ndim > 0 if values else False
        return has_weight or has_samples or isinstance(target, SumMetric)
    return getattr(type(target), "update", None) in _EXACT_APART


@dataclass(eq=False)
class _MicrobatchCall:
    """A call in one microbatch; ``given`` are its arguments with their graph, in the step only."""

    microbatch: int
    operands: tuple[Any, Any] | None
    given: tuple[Any, Any] | None
    own: dict[str, Any] | None = None


class _Call:
    """One call of a step, in all microbatches of a batch."""

    def __init__(self, target: nn.Module, method: str) -> None:
        self.target, self.method = target, method
        self.parts: list[_MicrobatchCall] = []
        self.copy: Any = None  # which is updated with each microbatch; None: made once
        self.is_made = False
        self.result: dict[str, Any] = {}


class MetricCalls:
    """Records the calls of a module's metrics, and makes them once for a batch.

    Args:
        module: The module.

    Attributes:
        traced_bytes: Bytes of the tensors that a microbatch keeps for the batch's calls, by the
            last trace of a step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.traced_bytes = 0
        self._key: list[int] | None = None
        self._targets: list[nn.Module] = []
        self._unregistered: set[int] = set()  # of those, in lists, tuples and dicts
        self._trackers: list[nn.Module] = []
        self._calls: dict[tuple[int, str, int], _Call] = {}
        self._of_microbatch: list[_Call] = []
        self._known: dict[int, nn.Module] = {}  # so that no other gets the id of one
        self._blanks: dict[tuple[int, int], Any] = {}
        self._result_templates: dict[tuple[int, str], Any] = {}
        self._noted: set[int] = set()
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._origins: dict[int, weakref.ref[Tensor]] = {}
        self._created: list[weakref.ref[MetricValue]] = []
        self._makes = False
        self._is_trace = False
        self._microbatch = 0

    # In a microbatch

    def start(self, microbatch: int, is_trace: bool) -> None:
        """Record the calls in the microbatch that begins now."""
        self._microbatch, self._is_trace = microbatch, is_trace
        for target in self._find_targets():
            space = vars(target)
            self._replaced.append((space, {name: space.get(name) for name in _METHODS}))
            for name in _METHODS:
                space[name] = partial(self._record, target, name, getattr(target, name))
        if is_trace:
            self.traced_bytes = 0

    def stop(self, has_failed: bool) -> None:
        """Stop recording; values that are still in use become the microbatch's own.

        Args:
            has_failed: Whether the step has raised an error.
        """
        while self._replaced:
            space, methods = self._replaced.pop()
            for name, method in methods.items():
                if method is None:
                    del space[name]
                else:
                    space[name] = method
        created, self._created = self._created, []
        for reference in () if has_failed or self._is_trace else created:
            value = reference()
            if value is not None and value.expression is not None:
                self._record_result(value)
                value.resolve_expression()
        for call in self._of_microbatch:
            call.parts[-1].given = call.parts[-1].own = None
        self._of_microbatch.clear()
        self._copies.clear()

    def resolve_metric_values(self, result: Any) -> Any:
        """Replace the deferred metric values in a step's result by those of its microbatch."""
        if not any(isinstance(leaf, MetricValue) for leaf in tree_leaves(result)):
            return result
        return resolve_metric_values(result)

    def _find_targets(self) -> list[nn.Module]:
        attributes = vars(self._module)
        # Private: hooks may make metrics.
        key = [*map(id, self._module._modules.values()), len(attributes)]
        if key != self._key:
            self._key, modules = key, [*self._module.modules()]
            registered = {*map(id, modules)}
            for value in attributes.values():
                if isinstance(value, list | tuple | dict):
                    modules += [leaf for leaf in tree_leaves(value) if _is_metric(leaf)]
            self._trackers = [part for part in modules if isinstance(part, MetricTracker)]
            inner = [part for child in filter(_is_metric, modules) for part in child.modules()]
            self._targets = [*{id(part): part for part in inner if _is_metric(part)}.values()]
            self._unregistered = {*map(id, self._targets)} - registered
        if not self._trackers:
            return self._targets
        tracked = [part for each in self._trackers for part in each.modules() if _is_metric(part)]
        return [*{id(part): part for part in self._targets + tracked}.values()]

    def _record(
        self, target: nn.Module, method: str, plain: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._makes:  # by a metric, of one in it
            return plain(*args, **kwargs)
        if self._is_trace:
            return self._trace(target, method, plain, args, kwargs)
        call = self._call_of(target, method)
        is_first = not any(other.target is target for other in self._of_microbatch)
        part = _MicrobatchCall(self._microbatch, None, (args, kwargs))
        call.parts.append(part)
        self._of_microbatch.append(call)
        if method == "reset" and is_first:
            if not call.is_made:
                call.is_made = True
                self._call_unrecorded(plain)
        elif not self._update_per_microbatch(call, plain, args, kwargs):
            part.operands = tree_map(self._copy_argument, (args, kwargs))
        if method in ("forward", "compute"):
            return self._make_deferred_results(call, part)
        return None

    def _call_of(self, target: nn.Module, method: str) -> _Call:
        same = [c for c in self._of_microbatch if c.target is target and c.method == method]
        key = id(target), method, len(same)
        self._known[id(target)] = target
        if key not in self._calls:
            self._calls[key] = _Call(target, method)
        return self._calls[key]

    def _update_per_microbatch(
        self, call: _Call, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Update a metric with this microbatch now, if that is exact; return whether it is."""
        if call.method not in ("forward", "update"):
            return False
        if call.copy is None:
            others = [c for c in self._of_microbatch if c.target is call.target]
            resets = any(other.method == "reset" and not other.is_made for other in others)
            is_kept = len(call.parts) > 1 or resets
            has_values = any(isinstance(leaf, MetricValue) for leaf in tree_leaves((args, kwargs)))
            if is_kept or has_values or not is_exact_per_microbatch(call.target, args, kwargs):
                return False
            number = sum(other.copy is not None for other in others)
            call.copy = self._reset_copy(call.target, number + 1)
        self._call_unrecorded(partial(_update_both, call, args, kwargs))
        return True

    def _copy_argument(self, leaf: Any) -> Any:
        """Return a copy of a tensor without its graph, or the expression of a metric's value."""
        if isinstance(leaf, MetricValue):
            leaf = leaf.microbatch_value() if leaf.expression is None else leaf.expression
        if not isinstance(leaf, Tensor):
            return leaf
        known = self._copies.get(id(leaf))
        if known is not None and known[1] == leaf._version:
            return known[2]
        copy = leaf.detach().clone()
        if not leaf.is_inference():  # whose writes nothing counts
            self._copies[id(leaf)] = leaf, leaf._version, copy
        self._origins[id(copy)] = weakref.ref(leaf)
        return copy

    def _trace(
        self,
        target: nn.Module,
        method: str,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a metric without values; what it refuses for so few samples is seen later."""
        if method in ("forward", "update") and not is_exact_per_microbatch(target, args, kwargs):
            tensors = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            self.traced_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
        if id(target) in self._unregistered:  # of which the trace puts no state back
            plain = getattr(_copied(target), method)
        try:
            return self._call_unrecorded(partial(plain, *args, **kwargs))
        except (Exception, ValueNeededError) as error:
            if method not in ("forward", "compute"):
                if isinstance(error, ValueNeededError):
                    return None
                raise
            call, part = _Call(target, method), _MicrobatchCall(0, None, (args, kwargs))
            like = torch.zeros(())
            return make_metric_values(
                like, partial(Entry, call, part), self._microbatch_result, self._created
            )

    def _call_unrecorded(self, function: Callable[[], Any]) -> Any:
        before, self._makes = self._makes, True
        try:
            return function()
        finally:
            self._makes = before

    # The microbatch's own value

    def _make_deferred_results(self, call: _Call, part: _MicrobatchCall) -> Any:
        key = id(call.target), call.method
        if key not in self._result_templates:
            try:
                with warnings.catch_warnings(), torch.no_grad():
                    warnings.simplefilter("ignore")
                    like = self._call_unrecorded(
                        partial(self._compute_microbatch_result, call, part, syncs=False)
                    )
                    self._result_templates[key] = like
            except Exception:  # R2Score of one sample
                self._result_templates[key] = torch.zeros(())
        return make_metric_values(
            self._result_templates[key],
            partial(Entry, call, part),
            self._microbatch_result,
            self._created,
        )

    def _microbatch_result(self, entry: Entry) -> Any:
        call, part = entry.call, entry.part
        self._record_use(call)
        if part.own is None:
            part.own = _entries(
                self._call_unrecorded(partial(self._compute_microbatch_result, call, part))
            )
        return part.own[entry.path]

    def _compute_microbatch_result(
        self, call: _Call, part: _MicrobatchCall, syncs: bool = True
    ) -> Any:
        assert part.given is not None
        args, kwargs = resolve_metric_values(part.given)
        if call.method == "forward" and _has_plain_forward(call.target) and syncs:
            return self._reset_copy(call.target, 0).forward(*args, **kwargs)
        copy = _copied(call.target)
        if not syncs:  # only the structure of what it returns is needed
            for metric in _metrics_of(copy):
                metric._to_sync = metric.dist_sync_on_step = False  # private: see _blank
        for earlier in self._calls.values():
            for done in earlier.parts:
                if earlier.target is call.target and done is not part and done.operands is not None:
                    before = tree_map(self._resolve_own, done.operands)
                    getattr(copy, earlier.method)(*before[0], **before[1])
        return getattr(copy, call.method)(*args, **kwargs)

    def _resolve_own(self, leaf: Any) -> Any:
        return leaf.value(self._microbatch_result) if is_expression(leaf) else leaf

    def _reset_copy(self, target: nn.Module, number: int) -> Any:
        """Return a copy of a metric with nothing in it; those of unlike numbers differ."""
        key = id(target), number
        if key not in self._blanks:
            self._blanks[key] = _copied(target)
            for part in self._blanks[key].modules():
                if isinstance(part, Metric):
                    # Private: torchmetrics reads it, and not ``sync_on_compute``, once it is made.
                    part._to_sync = part.dist_sync_on_step  # as of the value of one call
        self._blanks[key].reset()
        return self._blanks[key]

    def _record_result(self, value: MetricValue) -> None:
        expression: Any = value.expression
        for entry in [expression, *tree_leaves(getattr(expression, "operands", ()))]:
            if isinstance(entry, Entry):
                self._record_use(entry.call)

    def _record_use(self, call: _Call) -> None:
        if id(call.target) not in self._noted and not self._is_trace:
            self._noted.add(id(call.target))
            log.info(_OWN_VALUE, type(call.target).__name__, in_brackets(running_user_line()))

    # For the batch

    def make_deferred_calls(self, sizes: Sequence[float], shares: Sequence[Any]) -> None:
        """Make the recorded calls.

        Args:
            sizes: The samples of each microbatch.
            shares: The share of each in means over the batch.
        """
        calls, self._calls = self._calls, {}
        with torch.no_grad():
            for call in calls.values():
                if not call.is_made:
                    self._make(call, sizes, shares)
        self._origins.clear()

    def _make(self, call: _Call, sizes: Sequence[float], shares: Sequence[Any]) -> None:
        call.is_made = True
        result: Any = None
        for part in call.parts:
            part.operands = tree_map(batch_value, part.operands)
        if call.copy is not None:
            result = _value_of_copy(call)
        else:
            try:
                args, kwargs = self._join(call, sizes, shares)
            except NotJoinedError:
                result = self._make_per_microbatch(call)
            else:
                result = getattr(call.target, call.method)(*args, **kwargs)
        if call.method in ("forward", "compute"):
            call.result = _entries(result)
            self._result_templates[id(call.target), call.method] = tree_map(_detached, result)
        for part in call.parts:
            part.operands = None

    def _join(
        self, call: _Call, sizes: Sequence[float], shares: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        places = [part.microbatch for part in call.parts]
        joining = ArgumentJoiner(
            [sizes[place] for place in places],
            [shares[place] for place in places],
            self._are_copies_of_one,
            isinstance(call.target, BaseAggregator | Running),
        )
        joined = joining.join([part.operands for part in call.parts])
        args, kwargs = joined
        return args, kwargs

    def _are_copies_of_one(self, one: Tensor, other: Tensor) -> bool:
        origins = [self._origins.get(id(tensor)) for tensor in (one, other)]
        first, second = [None if origin is None else origin() for origin in origins]
        return first is not None and first is second

    def _make_per_microbatch(self, call: _Call) -> Any:
        call.copy = self._reset_copy(call.target, -1)
        for part in call.parts:
            assert part.operands is not None
            _update_both(call, *part.operands)
        return _value_of_copy(call)


def batch_value(value: Any) -> Any:
    """Return what an expression gives for the batch; any other value is returned as it is."""
    return value.value(_batch_result) if is_expression(value) else value


def _batch_result(entry: Entry) -> Any:
    result = entry.call.result
    if entry.path not in result:
        raise RuntimeError(
            f"a {type(entry.call.target).__name__} has returned other entries for the batch than "
            f"for its first microbatch, which has {entry.path or 'a single value'}: log the metric "
            f"itself, or call it in on_validation_epoch_end"
        )
    return result[entry.path]


def _is_metric(part: Any) -> bool:
    return isinstance(part, Metric | MetricCollection)


def _has_plain_forward(target: nn.Module) -> bool:
    """Whether a call's value is of this call only, whatever the metric got before."""
    kinds = {type(part) for part in target.modules() if _is_metric(part)}
    return all(kind.forward in (Metric.forward, MetricCollection.forward) for kind in kinds)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _entries(tree: Any) -> dict[str, Any]:
    return {keystr(place): leaf for place, leaf in tree_flatten_with_path(tree)[0]}


def _update_both(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    metrics: tuple[Any, Any] = call.target, call.copy
    states = tree_leaves([metric.metric_state for metric in _metrics_of(call.target)])
    is_inference = any(isinstance(state, Tensor) and state.is_inference() for state in states)
    # A metric's forward in an evaluation makes its states in inference mode. In a training step its
    # forward would make new ones; update writes into these, which only inference mode allows.
    with torch.inference_mode() if is_inference else nullcontext():
        for metric in metrics:
            metric.update(*args, **kwargs)


def _value_of_copy(call: _Call) -> Any:
    """Return the batch's value, and put it where Lightning reads that of the last call."""
    if call.method != "forward":
        return None
    value = call.copy.compute()
    for metric, copy in zip(_metrics_of(call.target), _metrics_of(call.copy), strict=True):
        metric._forward_cache = copy.compute()  # private: Lightning reads it
    return value


def _metrics_of(target: nn.Module) -> Iterator[Metric]:
    return (part for part in target.modules() if isinstance(part, Metric))


def _copied(target: nn.Module) -> Any:
    # Not its hooks: those of a profiler hold what cannot be copied.
    hooks = [d for m in target.modules() for d in (m._forward_hooks, m._forward_pre_hooks)]
    memo: dict[int, Any] = {id(hook_dict): OrderedDict() for hook_dict in hooks}
    replaced = [vars(m)[name] for m in target.modules() for name in _METHODS if name in vars(m)]
    memo |= {id(method): method for method in replaced}  # which hold the module
    with _CopiesWithoutGraphs():
        copy = deepcopy(target, memo)
    for part in copy.modules():
        for name in _METHODS if _is_metric(part) else ():
            method = vars(part).get(name)
            if isinstance(method, partial):  # of the original
                del vars(part)[name]
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
