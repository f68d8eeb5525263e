"""Captures ``self.log`` in the steps of a batch's microbatches, and logs once for the batch.

Lightning receives what it would receive had the step run on the whole batch: one value of each
name, and for a metric that the step calls its value over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeoffload.metrics.metric_calls import MetricCalls, batch_value
from lightning_pipeoffload.metrics.metric_value import MetricValue, is_expression
from lightning_pipeoffload.runtime.batch import weighted_or_zero
from lightning_pipeoffload.runtime.shapes import unwrap_replicated

_REDUCTIONS: dict[str, Any] = {"sum": torch.sum, "min": torch.min, "max": torch.max}


@dataclass
class _Call:
    """One call of ``self.log``; ``value`` may be the expression of a value of metrics."""

    microbatch: int
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LogCapture:
    """Captures the calls of a module's ``self.log``."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._log = type(module).log  # may be the user's own, around Lightning's
        self._signature = signature(self._log)
        kinds = [(p.name, p.kind) for p in self._signature.parameters.values()]
        self._takes_batch_size = any(
            name == "batch_size" or kind is Parameter.VAR_KEYWORD for name, kind in kinds
        )
        self._calls: dict[tuple[str, int], list[_Call]] = {}
        self._num_passes = 0
        self.metrics = MetricCalls(module)

    def log_combined(self, sizes: Sequence[int], shares: Sequence[Any]) -> None:
        """Log each name once, with its values combined.

        Args:
            sizes: The number of samples of each microbatch.
            shares: The share of each in means, where the step gives no ``batch_size``.
        """
        for (name, _), entries in self._make_and_pop_calls(sizes, shares).items():
            self._log_once(name, entries, sizes, shares)

    def pop_tensors(self, sizes: Sequence[int], shares: Sequence[Any]) -> list[Tensor]:
        """Return the tensors that were logged, and log none of them; see :meth:`log_combined`."""
        calls = self._make_and_pop_calls(sizes, shares)
        values = (batch_value(call.value) for entries in calls.values() for call in entries)
        return [value for value in values if isinstance(value, Tensor)]

    def _make_and_pop_calls(
        self, sizes: Sequence[float], shares: Sequence[Any]
    ) -> dict[tuple[str, int], list[_Call]]:
        """Return the batch's calls of ``self.log``, once those of its metrics are made."""
        calls, self._calls, self._num_passes = self._calls, {}, 0
        self.metrics.make_deferred_calls(sizes, shares)
        return calls

    def _log_once(
        self, name: str, entries: list[_Call], sizes: Sequence[int], shares: Sequence[Any]
    ) -> None:
        last = entries[-1]
        bound = self._signature.bind(self._module, name, last.value, *last.args, **last.kwargs)
        options = {**bound.arguments, **last.kwargs}
        # The number of samples that the step gives, and the microbatch.
        pairs = [(entry.kwargs.get("batch_size"), entry.microbatch) for entry in entries]
        value = combine_logged(
            _over_batch([entry.value for entry in entries]),
            [size or shares[index] * sum(sizes) for size, index in pairs],
            options.get("reduce_fx", "mean"),
        )
        kwargs = dict(last.kwargs)
        if self._takes_batch_size:
            # Between batches means weigh by samples, as on one device.
            kwargs["batch_size"] = sum([size or sizes[index] for size, index in pairs])
        self._log(self._module, name, value, *last.args, **kwargs)


class MicrobatchCapture:
    """Captures the calls of one microbatch.

    Args:
        capture: What they are captured for.
        keep: Whether the step comes to its end, with all that it logs; False: it is traced, without
            values.
    """

    def __init__(self, capture: LogCapture, keep: bool) -> None:
        self._capture, self._keep = capture, keep
        self._repeats: dict[str, int] = {}
        self._calls: list[_Call] = []

    def __enter__(self) -> None:
        capture = self._capture
        self._microbatch = capture._num_passes
        capture._num_passes += self._keep
        capture.metrics.start(self._microbatch, is_trace=not self._keep)
        attributes = capture._module.__dict__
        self._before = attributes.get("log")
        attributes["log"] = self._log

    def __exit__(self, *error: object) -> None:
        capture, attributes = self._capture, self._capture._module.__dict__
        del attributes["log"]
        if self._before is not None:
            attributes["log"] = self._before
        capture.metrics.stop(has_failed=any(error))
        # Values of earlier stages are there only now: used on the last stage, they come.
        for call in self._calls:
            if type(call.value) is not Tensor:
                call.value = _detach(call.value)
        if not self._keep:
            capture._calls.clear()

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        capture, repeat = self._capture, self._repeats.get(name, 0)
        call = _Call(self._microbatch, _detach(value), args, kwargs)
        self._calls.append(call)
        capture._calls.setdefault((name, repeat), []).append(call)
        self._repeats[name] = repeat + 1


def ignore_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Drop a call of ``self.log`` in a stage that leaves the step before its end.

    The operations are those of a captured one.
    """
    _detach(value)


def _detach(value: Any) -> Any:
    if type(value) is Tensor:  # as most are
        return value.detach()
    if isinstance(value, MetricValue):
        return value.microbatch_value().detach() if value.expression is None else value.expression
    return unwrap_replicated(value).detach() if isinstance(value, Tensor) else value


def _over_batch(values: list[Any]) -> list[Any]:
    """Return the batch's value where each microbatch logs the same of a metric; else each value."""
    expressions = [value for value in values if is_expression(value)]
    if not expressions:
        return values
    if len(expressions) == len(values) and all(
        expression.batch_key == expressions[0].batch_key for expression in expressions
    ):
        return [batch_value(expressions[0])]
    return [*map(batch_value, values)]


def combine_logged(values: list[Any], weights: Sequence[Any], reduce_fx: Any) -> Any:
    """Combine the microbatches' values of one name; a metric has combined them itself."""
    others = [v for v in values if not isinstance(v, Number)]
    if [v for v in others if not isinstance(v, Tensor) or v.numel() != 1]:
        return values[-1]  # a metric, or what Lightning refuses
    stacked = torch.stack([torch.as_tensor(v, dtype=_dtype(v)).reshape(()) for v in values])
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name in _REDUCTIONS:
        return _REDUCTIONS[name](stacked)
    if len(values) == 1:  # of a batch without samples, say, which has no weight
        return stacked[0]
    # Mean; any other reduction Lightning refuses. By numbers: a tensor of them would have to go to
    # the accelerator, which the host waits for.
    products = [*map(weighted_or_zero, stacked.unbind(), weights)]
    return (torch.stack(products).sum() / sum(weights)).to(stacked.dtype)


def _dtype(value: Any) -> torch.dtype:
    """Return what Lightning accumulates a value in: never less than float32."""
    default = torch.get_default_dtype()
    dtype = value.dtype if isinstance(value, Tensor) and value.is_floating_point() else default
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
