"""What ``self.log`` records: once for each batch, on the rank that has it, and read by all.

Only the last stage comes to the loss, and that stage is on global rank 0. There each step's values
are combined over the microbatches and logged at once. The other ranks fetch what rank 0 has
published when, and only when, something of theirs asks for ``trainer.callback_metrics``: nobody
waits otherwise.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
    _LoggerConnector,  # private: it answers trainer.callback_metrics
)
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

_KEPT_TICKS = 16


class LogCapture:
    """Takes the calls of ``self.log`` in a step aside, microbatch by microbatch.

    Args:
        module: whose ``log`` to take.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._calls: dict[str, list[tuple[Any, dict[str, Any]]]] = {}

    @contextmanager
    def capturing(self, keep: bool) -> Iterator[None]:
        """Record the calls inside, or drop them."""

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if keep:
                kwargs.update(
                    zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False)
                )
                self._calls.setdefault(name, []).append((_detach(value), kwargs))

        self._module.__dict__["log"] = log
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def replay(self, sizes: Sequence[int]) -> None:
        """Log each name once, with its values combined.

        Args:
            sizes: samples of each microbatch.
        """
        calls, self._calls = self._calls, {}
        for name, entries in calls.items():
            values = [value for value, _ in entries]
            kwargs = dict(entries[-1][1])
            samples = _repeat(sizes, len(entries))
            weights = [
                options.get("batch_size") or size
                for (_, options), size in zip(entries, samples, strict=True)
            ]
            kwargs["batch_size"] = sum(weights)
            value = _combine(values, weights, kwargs.get("reduce_fx", "mean"))
            LightningModule.log(self._module, name, value, **kwargs)


def _repeat(sizes: Sequence[int], count: int) -> list[int]:
    """Return a size for each call: as many calls for every microbatch, or one size for all."""
    times, rest = divmod(count, len(sizes))
    return [1] * count if rest else [size for size in sizes for _ in range(times)]


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _combine(values: list[Any], weights: list[int], reduce_fx: Any) -> Any:
    """Combine the microbatches' values of one name; a metric has combined them itself."""
    if isinstance(values[-1], (Metric, MetricCollection)):
        return values[-1]
    stacked = torch.stack([torch.as_tensor(value, dtype=_float_type(value)) for value in values])
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name == "mean":
        shares = torch.tensor(weights, dtype=stacked.dtype, device=stacked.device)
        return (stacked * shares).sum() / shares.sum()
    reductions: dict[str, Any] = {"sum": stacked.sum, "min": stacked.min, "max": stacked.max}
    reduce = reductions.get(name)
    return reduce() if reduce is not None else reduce_fx(stacked)


def _float_type(value: Any) -> torch.dtype:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.dtype
    return torch.get_default_dtype()


class SharedMetricsConnector(_LoggerConnector):
    """Lightning's connector, whose metrics are those of global rank 0 on every rank.

    Every rank goes through the same loop, so counting its milestones (**ticks**: the end of a
    step, of an epoch) names a moment on all of them. Rank 0 publishes what it has at each tick.
    """

    _store: Store | None = None
    _tick = 0
    _fetched = 0

    @classmethod
    def replacing(cls, plain: _LoggerConnector, store: Store | None) -> SharedMetricsConnector:
        """Make one with the state of ``plain``; without a store it is a plain one."""
        made = cls(plain.trainer)
        made.__dict__.update(plain.__dict__)
        made._store = store
        return made

    def leave(self) -> None:
        """Fetch what there is while global rank 0 is still there; be a plain connector then."""
        self._fetch()
        self._store = None

    def tick(self) -> None:
        """Mark a moment, and publish what was logged up to it."""
        self._tick += 1
        if self._store is None or not self.trainer.is_global_zero:
            return
        published = tuple(
            {name: float(value) for name, value in metrics.items()}
            for metrics in (super().callback_metrics, super().logged_metrics)
        )
        self._store.set(_key(self._tick), json.dumps(published))
        if self._tick > _KEPT_TICKS:
            self._store.delete_key(_key(self._tick - _KEPT_TICKS))

    @override
    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        self.tick()

    @override
    def update_eval_epoch_metrics(self) -> dict[str, Any]:
        metrics = super().update_eval_epoch_metrics()
        self.tick()
        return metrics

    @override
    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.tick()

    @override
    def reset_metrics(self) -> None:
        super().reset_metrics()
        self._fetched = self._tick  # what was published so far belongs to what is over

    @property
    @override
    def callback_metrics(self) -> dict[str, Any]:
        self._fetch()
        return super().callback_metrics

    @property
    @override
    def logged_metrics(self) -> dict[str, Any]:
        self._fetch()
        return super().logged_metrics

    def _fetch(self) -> None:
        if self._store is None or self.trainer.is_global_zero or self._fetched == self._tick:
            return
        self._fetched = self._tick
        callback, logged = json.loads(self._store.get(_key(self._tick)))
        self._callback_metrics.update(_as_tensors(callback))
        self._logged_metrics.update(_as_tensors(logged))


def _as_tensors(metrics: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def _key(tick: int) -> str:
    return f"metrics/{tick}"


def keep_metrics_local(trainer: Trainer) -> None:
    """Let metrics be computed where they are updated, instead of gathering over all ranks."""
    # Each value is logged by the one rank that has it: there is nothing to synchronize.
    warnings.filterwarnings("ignore", ".*sync_dist=True.*", category=PossibleUserWarning)
    for module in trainer.lightning_module.modules():
        if isinstance(module, Metric):
            module.distributed_available_fn = lambda: False
