"""Finds what a step writes in a branch that the traced batches did not take."""

from __future__ import annotations

from collections.abc import Callable, Container
from operator import is_
from typing import Any

import lightning.pytorch as pl
from torchmetrics import Metric

from lightning_pipeoffload.runtime.users_code import (
    GONE,
    ContainedValues,
    Fingerprint,
    fingerprint,
    is_plain_value,
    is_unchanged,
)

# Private: the copy of the hyperparameters that loggers get once; no step writes it.
OF_LIGHTNING = frozenset({*dir(pl.LightningModule()), "_hparams_initial"})
"""Attributes of a module that torch and Lightning write, and wrapped hooks."""

_MOST_VALUES = 64  # a longer container is compared by its length


class LateWrites:
    """Compares the module's attributes before and after the steps of a batch.

    Args:
        module: The module whose step runs.
        skipped: Labels of attributes that need no comparison, "self.count".
        metrics: Returns the module's metrics with their paths.
        record_write: Called with the label of each attribute that a step has written.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        skipped: Container[str],
        metrics: Callable[[], list[tuple[str, Metric]]],
        record_write: Callable[[str], None],
    ) -> None:
        self._module = module
        self._skipped = skipped
        self._metrics = metrics
        self._record_write = record_write
        self._attributes: dict[str, Any] = {}  # the same object while none of them is another
        self._holding: list[str] = []  # whose values can change in place

    def begin(self) -> None:
        self._record_attributes()
        self._before = self._attributes
        self._inside = self._fingerprint_insides()

    def end(self) -> None:
        self._record_attributes()
        if self._attributes is not self._before:
            for name in self._attributes.keys() - OF_LIGHTNING:
                was, now = self._before.get(name, GONE), self._attributes[name]
                if f"self.{name}" not in self._skipped and not is_unchanged([(was, 0)], [(now, 0)]):
                    self._record_write(f"self.{name}")
        for label, after in self._fingerprint_insides().items():
            if not is_unchanged(self._inside.get(label, []), after):
                self._record_write(label)

    def _record_attributes(self) -> None:
        now, seen = vars(self._module), self._attributes
        # Twice for each batch: no line of Python for each attribute.
        if len(now) == len(seen) and all(map(is_, now.values(), seen.values())):
            return
        self._attributes = now.copy()
        self._holding = [n for n in now.keys() - OF_LIGHTNING if not is_plain_value(now[n])]

    def _fingerprint_insides(self) -> dict[str, Fingerprint]:
        fingerprints = {
            f"self.{name}": _fingerprint_with_metrics(self._attributes[name])
            for name in self._holding
            if f"self.{name}" not in self._skipped
        }
        for path, metric in self._metrics():
            if f"self.{path}._update_count" not in self._skipped:
                fingerprints[f"self.{path}._update_count"] = [(metric, metric.update_count)]
        return fingerprints


def _fingerprint_with_metrics(value: Any) -> Fingerprint:
    states = fingerprint(value, longest=_MOST_VALUES)
    parts = [part for _, state in states if isinstance(state, ContainedValues) for part in state]
    return states + [(part, part.update_count) for part in parts if isinstance(part, Metric)]
