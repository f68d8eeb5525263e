"""The values that ``self.log`` recorded on a pipeline's root, for all its ranks.

Only the last stage comes to the loss, and that stage is on the root. Another rank fetches what the
root has published when something on it reads a metric; else no rank waits::

    root            step 1   publish 1        step 2   publish 2        step 3 ...
                                 v                         v
    store                    numbers 1                 numbers 2
                                 v
    another rank    step 1           reads "loss": waits for numbers 1, no later ones

Callbacks and schedulers decide by global rank 0's metrics in every replica: else a learning rate,
say, would be another one in each, and their weights would differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
    _LoggerConnector,  # private: it answers trainer.callback_metrics
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from typing_extensions import override

from lightning_pipeoffload.metrics.publisher import PendingNumbers, Publisher
from lightning_pipeoffload.runtime import late_values, replaced
from lightning_pipeoffload.runtime.comm import RankMesh

_Metrics = dict[str, Any]


class _Published:
    """The values that one replica's root has published."""

    def __init__(self, store: Store, replica: int) -> None:
        self._store, self._replica = store, replica
        self._version = 0
        self._last: dict[str, _Metrics] = {}

    def wait_for_version(self, version: int) -> dict[str, _Metrics]:
        """Return the metrics of a version, by kind; waits for them."""
        if self._version != version:
            published = json.loads(self._store.get(_key(self._replica, version)))
            self._version = version
            dtypes = published.pop("dtypes")
            self._last = {
                kind: _as_tensors(values, dtypes[kind]) for kind, values in published.items()
            }
        return self._last

    def forget(self, version: int) -> None:
        """Drop what was published up to a version."""
        self._version, self._last = version, {}


class SharedMetricsConnector(_LoggerConnector):
    """Lightning's connector, whose metrics are those of the root on every rank of a pipeline.

    Every rank goes through the same loop and calls :meth:`publish` at the same milestones: at the
    end of a step, of an epoch, of a hook. So the number of calls so far, the **version** of the
    metrics, is the same on all ranks. The root publishes what it has then.

    Attributes:
        is_root: Whether this rank has the last stage, whose steps log.
    """

    is_root = True
    _pipeline = 0
    _publisher: Publisher | None = None
    _roots: _Published | None = None
    _decisive: _Published | None = None
    _version = 0
    _shown: PendingNumbers | None = None

    @classmethod
    def from_plain(
        cls,
        plain: _LoggerConnector,
        mesh: RankMesh,
        store: Store | None,
        fail: Callable[[Exception], None],
    ) -> SharedMetricsConnector:
        """Make one with the state of ``plain``; without a store it reads nothing from others.

        Args:
            plain: The trainer's own connector.
            mesh: The processes, including the roots.
            store: A store that all ranks can read.
            fail: Ends the run by an error of another thread.
        """
        connector = cls(plain.trainer)
        connector.__dict__.update(plain.__dict__)
        connector._stop_reading()
        connector._version, connector._pipeline, connector.is_root = (
            0,
            mesh.pipeline_index,
            mesh.is_root,
        )
        if store is not None and mesh.is_root:
            connector._publisher = Publisher(store, fail)
        if store is not None and not mesh.is_root:
            connector._roots = connector._decisive = _Published(store, mesh.pipeline_index)
        if store is not None and mesh.pipeline_index > 0:
            connector._decisive = _Published(store, 0)
        return connector

    def _stop_reading(self) -> None:
        self._publisher = self._roots = self._decisive = None

    def fetch_last_metrics(self) -> None:
        """Fetch the last metrics while the other ranks are there; read nothing from them later."""
        for kind in ("callback", "log", "pbar"):
            self._read(kind)
        if self._publisher is not None:
            self._publisher.close()
        self._stop_reading()

    def abandon(self) -> None:
        """Read nothing from other ranks any more: the run was broken off."""
        if self._publisher is not None:
            self._publisher.abandon()
        self._stop_reading()

    def publish(self, returned: _Metrics | None = None, outputs: _Metrics | None = None) -> None:
        """Publish what was logged up to now; on other ranks, expect what the root publishes.

        Args:
            returned: What an evaluation returns for one loader, by name.
            outputs: Numbers that a step has returned, by name.
        """
        self._version += 1
        if self._publisher is not None:
            mine = self._update_all()
            self._publish({**mine, "returned": returned or {}, "outputs": outputs or {}})

    def _publish(self, now: dict[str, _Metrics]) -> PendingNumbers:
        assert self._publisher is not None
        fetch = PendingNumbers(now)
        key = _key(self._pipeline, self._version)
        self._publisher.publish(key, fetch, dtypes=_dtypes(now))
        return fetch

    def _own(self) -> dict[str, _Metrics]:
        """Return this rank's own metrics by kind, as of the last update."""
        return {
            "callback": self._callback_metrics,
            "log": self._logged_metrics,
            "pbar": self._progress_bar_metrics,
        }

    def _update_all(self) -> dict[str, _Metrics]:
        """Update this rank's own metrics; return them by kind."""
        mine = self._own()
        if self.trainer._results:
            latest = cast(dict[str, _Metrics], self.metrics)
            for kind, values in mine.items():
                values.update(latest[kind])
        return mine

    def outputs(self) -> _Metrics:
        """Return the numbers that the last step returned on the root; waits for them."""
        return self._root_metrics().get("outputs", {})

    @override
    def on_batch_end(self) -> None:
        super().on_batch_end()  # which updates them
        self._version += 1
        self._shown = (
            PendingNumbers(self._own()) if self._publisher is None else self._publish(self._own())
        )

    @override
    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        self._shown = None  # a trainer may be saved now
        self.publish()

    @override
    def update_eval_epoch_metrics(self) -> _Metrics:
        metrics = super().update_eval_epoch_metrics()
        self.publish(metrics)
        if self._roots is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return self._root_metrics().get("returned", metrics)  # the trainer's user sees it
        return metrics

    @override
    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.publish()

    @override
    def reset_metrics(self) -> None:
        super().reset_metrics()
        # Earlier entries belong to the previous epoch.
        for published in filter(None, (self._roots, self._decisive)):
            published.forget(self._version)

    @property
    @override
    def callback_metrics(self) -> _Metrics:
        return self._read("callback")

    @property
    @override
    def logged_metrics(self) -> _Metrics:
        return self._read("log")

    @property
    @override
    def metrics(self) -> Any:
        """This rank's values; those for a progress bar stay tensors."""
        with _keeping_tensors():
            return super().metrics

    @property
    @override
    def progress_bar_metrics(self) -> _Metrics:
        """Numbers; during a batch those that were known by the end of the one before.

        Otherwise a bar that shows each batch would wait for the accelerator at each.
        """
        metrics = self._read("pbar")
        if not any(map(late_values.is_on_accelerator, metrics.values())):
            return convert_tensors_to_scalars(metrics)
        # Private: None outside of batches, such as at the end of an epoch.
        is_in_epoch = self._first_loop_iter is not None
        if not is_in_epoch:
            return PendingNumbers({"pbar": metrics})()["pbar"]
        return {} if self._shown is None else dict(self._shown()["pbar"])

    def _read(self, kind: str) -> _Metrics:
        """Return metrics of a kind; the root's come before this rank's own.

        Before these, for decisions, come those of global rank 0.
        """
        metrics = self._update_all()[kind]
        metrics.update(self._root_metrics().get(kind, {}))
        if kind == "callback" and self._decisive is not None and self._version:
            metrics.update(self._decisive.wait_for_version(self._version).get(kind, {}))
        return metrics

    def _root_metrics(self) -> dict[str, _Metrics]:
        """Return the root's metrics of the last version, by kind; nothing on the root."""
        return (
            self._roots.wait_for_version(self._version)
            if self._roots is not None and self._version
            else {}
        )


def _keeping_tensors() -> AbstractContextManager[None]:
    """Keep Lightning from waiting for each value that a progress bar might show."""
    # Private: Lightning turns them into numbers there, though there may be no bar.
    return replaced(result, "convert_tensors_to_scalars", lambda value: value)


def _dtypes(metrics: dict[str, _Metrics]) -> dict[str, dict[str, str]]:
    """Return the name of each tensor's dtype, by kind: 0.7 is less in float32 than in float64."""
    dtypes: dict[str, dict[str, str]] = {kind: {} for kind in metrics}
    for kind, values in metrics.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and kind != "pbar":  # a progress bar shows numbers
                dtypes[kind][name] = str(value.dtype).removeprefix("torch.")
    return dtypes


def _as_tensors(metrics: dict[str, float], dtypes: dict[str, str]) -> _Metrics:
    """Return tensors of the published dtypes, with the bits that they have on the root."""
    return {
        name: torch.tensor(value, dtype=getattr(torch, dtypes[name])) if name in dtypes else value
        for name, value in metrics.items()
    }


def _key(replica: int, version: int) -> str:
    return f"metrics/{replica}/{version}"
