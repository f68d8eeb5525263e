"""Runs the user's step on each microbatch of a minibatch, with Lightning's hooks and logging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_pipeoffload.loop import BackwardHooks
from lightning_pipeoffload.metrics import LogCapture, MicrobatchCapture, batch_value, combine_logged
from lightning_pipeoffload.odc.on_demand_run import OnDemandRun
from lightning_pipeoffload.runtime.batch import batch_size
from lightning_pipeoffload.texts.minibatch import Minibatch

_ROUNDING = 1e-4  # of a sum of many weights


@dataclass
class _RankReport:
    """A summary of one rank's part of a minibatch, for the other ranks."""

    loss: float
    dtype: torch.dtype
    weight: float
    logged: list[LoggedValues]
    num_minibatches: float
    is_end: bool


class MinibatchTraining(BackwardHooks):
    """Computes the gradients of all ranks' loss from one rank's microbatches.

    Attributes:
        microbatch: The microbatch whose step runs; None between minibatches.
    """

    microbatch: int | None = None

    def __init__(
        self,
        module: LightningModule,
        precision: Precision,
        run: OnDemandRun,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        super().__init__(module, precision, device)
        self._run = run
        self._num_ranks = num_ranks
        self._logs = MinibatchLogs(module)

    def train(self, batch: Any, arguments: Sequence[Any], is_last: bool) -> Any:
        """Run a minibatch, forward and backward.

        Args:
            batch: A minibatch, or a batch of another loader, which is one microbatch.
            arguments: The other arguments of the step.
            is_last: Whether the optimizer steps after it.

        Returns:
            The last microbatch's output, with the loss of all ranks.
        """
        part = self._as_minibatch(batch)
        self._run.reshard()  # a hook may have run a forward
        self._run_zero_grad()  # before gradients are dropped, which its hook may read
        self._run.open(self.adds_up)
        with self._run.on_demand():
            output, total = self._run_microbatches(part, arguments)
        return self._end(part, output, total, is_last)

    def _run_microbatches(self, part: Minibatch, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """Return the last output, and the weighted sum of the losses."""
        output: Any = None
        total: Any = 0.0
        for number, (microbatch, weight) in enumerate(zip(part, part.weights, strict=True)):
            self.microbatch = number
            with _explaining_shard_use():
                output = self._call_step(microbatch, arguments)
                loss = _loss_of(output)
                if number == 0:
                    self._run_pre_backward(loss)
                if loss is not None:
                    total = total + weight * loss.detach()
                    self.differentiate(loss * (weight / self._num_batches))
        self.microbatch = None
        if not part:
            self._run_pre_backward(None)
        return output, total

    def _call_step(self, microbatch: Any, arguments: Sequence[Any]) -> Any:
        with MicrobatchCapture(self._logs, keep=True), self._precision.train_step_context():
            output = self._module.training_step(microbatch, *arguments)
            return self._logs.metrics.resolve_metric_values(output)

    @property
    def _num_batches(self) -> int:
        return self._module.trainer.accumulate_grad_batches

    def _as_minibatch(self, batch: Any) -> Minibatch:
        if isinstance(batch, Minibatch):
            return batch
        _refuse_several(batch)
        return Minibatch([batch], [1 / self._num_ranks], self._num_ranks * batch_size(batch, 1))

    def _end(self, part: Minibatch, output: Any, total: Any, is_last: bool) -> Any:
        logged = self._logs.pop_logged([weight * part.total for weight in part.weights])
        reports = self._run.close(self._step_report(part, total, logged), is_last)
        _refuse_unlike(reports)
        loss = _mean_loss(reports).to(self._device)
        self._logs.log([report.logged for report in reports], self._device)
        self._precision.post_backward(loss, self._module)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _step_report(self, part: Minibatch, total: Any, logged: list[LoggedValues]) -> _RankReport:
        num = self._module.trainer.num_training_batches
        progress = self._module.trainer.fit_loop.epoch_loop.batch_progress
        is_end = progress.is_last_batch or progress.current.ready >= num
        dtype = total.dtype if isinstance(total, Tensor) else torch.float32
        return _RankReport(float(total), dtype, sum(part.weights), logged, num, is_end)


def _mean_loss(reports: Sequence[_RankReport]) -> Tensor:
    """Return the loss of all ranks in their widest dtype, with the same bits on each rank."""
    weight = sum(report.weight for report in reports) or 1.0  # no rank has a microbatch
    _refuse_weights(weight)
    dtype = reduce(torch.promote_types, [report.dtype for report in reports], torch.float32)
    return torch.tensor(sum(report.loss for report in reports) / weight, dtype=dtype)


def _refuse_unlike(reports: Sequence[_RankReport]) -> None:
    """Refuse different numbers of minibatches, with which ranks would wait for ever."""
    counts = [report.num_minibatches for report in reports]
    ended = [rank for rank, report in enumerate(reports) if report.is_end]
    if 0 < len(ended) < len(reports):
        raise ValueError(
            f"global ranks {', '.join(map(str, ended))} of {len(reports)} have no more "
            f"minibatches, but the others have; give all ranks as many, with Minibatch() for an "
            f"empty one"
        )
    if len(set(counts)) > 1:
        raise ValueError(
            f"global ranks 0 to {len(counts) - 1} have {', '.join(map(str, counts))} minibatches "
            f"in an epoch, but each minibatch needs all ranks; give all ranks as many, with "
            f"Minibatch() for an empty one"
        )


def _refuse_weights(total: float) -> None:
    if abs(total - 1) > _ROUNDING:
        raise ValueError(
            f"the weights of a minibatch's microbatches add up to {total:g} over the ranks, not to "
            f"1, so the loss is no mean; divide each weight of Minibatch(microbatches, weights) by "
            f"{total:g}"
        )


def _refuse_several(batch: Any) -> None:
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping | list | tuple) and any(isinstance(p, Minibatch) for p in parts):
        raise ValueError(
            "a batch of several loaders contains a minibatch; give fit a single loader of "
            "minibatches, whose dataset has all the data"
        )


@contextmanager
def _explaining_shard_use() -> Iterator[None]:
    """Explain torch's error about a step that uses a block's parameter while it is sharded."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            "training_step uses a parameter of a block outside of that block's forward, where it "
            "is a shard; use weight decay for a penalty on weights, or OnDemandStrategy(blocks=[]) "
            "to gather all around the whole step"
        ) from error


def _loss_of(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise ValueError(
                f"training_step returned a dict with {', '.join(map(repr, output))}; it needs "
                f"'loss', by which gradients are made"
            )
        output = output["loss"]
    if output is None or isinstance(output, Tensor):
        return output
    raise ValueError(
        f"training_step returned a {type(output).__name__}; return the loss, a dict with it under "
        f"'loss', or None"
    )


_OF_RANKS = ("sync_dist", "sync_dist_group")


@dataclass
class _MetricPlace:
    """Replaces a metric of the module in logged values that are sent to other ranks."""

    name: str


@dataclass
class LoggedValues:
    """The values that one rank has logged under one name in a minibatch.

    Attributes:
        name: The name.
        repeat: The number of earlier calls with that name in the step.
        values: The value of each microbatch.
        weights: The samples, or tokens, of each microbatch.
        args: The other positional arguments of ``self.log``.
        kwargs: The keyword arguments, without those about ranks.
    """

    name: str
    repeat: int
    values: list[Any]
    weights: list[float]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class MinibatchLogs(LogCapture):
    """Collects the calls of ``self.log`` in all ranks' microbatches, and logs each name once."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__(module)
        # By identity: metrics compare as equal, and a metric's hash changes with its state.
        self._paths = {
            id(part): name for name, part in module.named_modules() if isinstance(part, Metric)
        }

    def pop_logged(self, sizes: Sequence[float]) -> list[LoggedValues]:
        """Return the calls since the last :meth:`pop_logged`, for other processes.

        Args:
            sizes: The samples, or tokens, of each microbatch.
        """
        calls = self._make_and_pop_calls(sizes, sizes)
        return [
            LoggedValues(
                name,
                repeat,
                [self._portable(name, batch_value(entry.value)) for entry in entries],
                [entry.kwargs.get("batch_size") or sizes[entry.microbatch] for entry in entries],
                entries[-1].args,
                {k: v for k, v in entries[-1].kwargs.items() if k not in _OF_RANKS},
            )
            for (name, repeat), entries in calls.items()
        ]

    def log(self, ranks: Sequence[list[LoggedValues]], device: torch.device) -> None:
        """Log each name once, with the values of all ranks combined, on ``device``."""
        entries_by_name: dict[tuple[str, int], list[LoggedValues]] = {}
        for logged in (entry for rank in ranks for entry in rank):
            entries_by_name.setdefault((logged.name, logged.repeat), []).append(logged)
        for (name, _), entries in entries_by_name.items():
            self._log_of_ranks(name, entries, device)

    def _log_of_ranks(self, name: str, entries: list[LoggedValues], device: torch.device) -> None:
        first = entries[0]
        values = [value for entry in entries for value in entry.values]
        weights = [weight for entry in entries for weight in entry.weights]
        bound = self._signature.bind(self._module, name, values[0], *first.args, **first.kwargs)
        reduce_fx = {**bound.arguments, **first.kwargs}.get("reduce_fx", "mean")
        value = self._local_metric(combine_logged(values, weights, reduce_fx))
        value = value.to(device) if isinstance(value, Tensor) else value
        kwargs = dict(first.kwargs)
        if self._takes_batch_size:
            kwargs["batch_size"] = max(1, round(sum(weights)))  # Lightning counts in whole numbers
        self._log(self._module, name, value, *first.args, **kwargs)

    def _portable(self, name: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            raise ValueError(
                f"self.log({name!r}, ...) in training_step was given a value of a shard: a block's "
                f"parameters are whole in its forward only; log it in a hook such as "
                f"on_train_batch_end, of parameter.full_tensor()"
            )
        if id(value) in self._paths:
            return _MetricPlace(self._paths[id(value)])
        return value.cpu() if isinstance(value, Tensor) else value

    def _local_metric(self, value: Any) -> Any:
        if isinstance(value, _MetricPlace):
            return self._module.get_submodule(value.name)
        return value
