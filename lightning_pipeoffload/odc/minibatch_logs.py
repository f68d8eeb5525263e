"""What ``self.log`` records in the microbatches of all ranks, logged once and alike on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_pipeoffload.metrics.log_capture import LogCapture, combine_logged

_OF_RANKS = ("sync_dist", "sync_dist_group")


@dataclass
class _MetricPlace:
    """Stands for a metric of the module, which every rank has under this name."""

    name: str


@dataclass
class LoggedName:
    """What one rank has logged under one name in a minibatch.

    Attributes:
        name: The name.
        repeat: How many calls of that name the step makes before.
        values: The value of each microbatch.
        weights: What each counts: as many samples, or tokens, as it has.
        args: The other arguments.
        kwargs: The keyword arguments, of which none is about ranks: the value is that of all.
    """

    name: str
    repeat: int
    values: list[Any]
    weights: list[float]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class MinibatchLogs(LogCapture):
    """Takes the calls of ``self.log`` aside, until those of the other ranks are known.

    Args:
        module: The module whose ``log`` is taken.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__(module)
        # By identity: a metric is equal to others, and its hash changes with its state.
        self._paths = {
            id(part): name for name, part in module.named_modules() if isinstance(part, Metric)
        }

    def take(self, sizes: Sequence[float]) -> list[LoggedName]:
        """Return what was logged since the last time, for other processes.

        Args:
            sizes: What each microbatch counts.
        """
        calls, self._calls, self._num_passes = self._calls, {}, 0
        self._metrics.forget()
        return [
            LoggedName(
                name,
                repeat,
                [self._portable(name, entry.value) for entry in entries],
                [entry.kwargs.get("batch_size") or sizes[entry.microbatch] for entry in entries],
                entries[-1].args,
                {k: v for k, v in entries[-1].kwargs.items() if k not in _OF_RANKS},
            )
            for (name, repeat), entries in calls.items()
        ]

    def log(self, ranks: Sequence[list[LoggedName]], device: torch.device) -> None:
        """Log each name once, with the values of all ranks combined.

        Args:
            ranks: What each rank has logged.
            device: Where Lightning keeps what it logs.
        """
        found: dict[tuple[str, int], list[LoggedName]] = {}
        for logged in (entry for rank in ranks for entry in rank):
            found.setdefault((logged.name, logged.repeat), []).append(logged)
        for (name, _), entries in found.items():
            self._log_of_ranks(name, entries, device)

    def _log_of_ranks(self, name: str, entries: list[LoggedName], device: torch.device) -> None:
        first = entries[0]
        values = [value for entry in entries for value in entry.values]
        weights = [weight for entry in entries for weight in entry.weights]
        given = self._signature.bind(self._module, name, values[0], *first.args, **first.kwargs)
        reduce_fx = {**given.arguments, **first.kwargs}.get("reduce_fx", "mean")
        value = self._own(combine_logged(values, weights, reduce_fx))
        value = value.to(device) if isinstance(value, Tensor) else value
        kwargs = dict(first.kwargs)
        if self._takes_batch_size:
            kwargs["batch_size"] = max(1, round(sum(weights)))  # Lightning counts in whole numbers
        self._log(self._module, name, value, *first.args, **kwargs)

    def _portable(self, name: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            raise ValueError(
                f"self.log({name!r}, ...) in training_step was given what comes of a shard: a "
                f"block's parameters are whole in its forward only; log it in a hook such as "
                f"on_train_batch_end, of parameter.full_tensor()"
            )
        if id(value) in self._paths:
            return _MetricPlace(self._paths[id(value)])
        return value.cpu() if isinstance(value, Tensor) else value

    def _own(self, value: Any) -> Any:
        if isinstance(value, _MetricPlace):
            return self._module.get_submodule(value.name)
        return value
