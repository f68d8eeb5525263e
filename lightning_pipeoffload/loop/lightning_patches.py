"""All methods of Lightning that a run replaces.

Forwards and backwards of a pipeline interleave, so what Lightning runs between them (zero_grad, the
hooks around backward) is handed to the strategy, which runs it where its first backward starts.
Lightning's loops wait for other ranks at each batch; here they do only where all of them meet. The
names are Lightning's own, most of them private; tests/test_private_api.py pins each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ThroughputMonitor
from lightning.pytorch.loops.optimization.automatic import (
    _AutomaticOptimization,  # private: it decides what follows the training step
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_pipeoffload.loop.backward import GradientTotals, scaler_of
from lightning_pipeoffload.loop.data import group_sampler_of
from lightning_pipeoffload.loop.hooks import EndHooks, OutputsElsewhere, refuse_other_callbacks
from lightning_pipeoffload.metrics import SharedMetricsConnector
from lightning_pipeoffload.processes.processes import Processes
from lightning_pipeoffload.runtime.comm import RankMesh
from lightning_pipeoffload.runtime.shapes import EqualIsSame

_filter_by_value = BaseFinetuning.filter_on_optimizer
_SHARED_RATES = ("batches_per_sec", "samples_per_sec", "items_per_sec")


def replace_method(owner: Any, name: str, replacement: Callable[..., Any], *args: Any) -> None:
    """Replace a method of one object by ``replacement(*args, plain, ...)``."""
    plain = partial(getattr(type(owner), name), owner)
    owner.__dict__[name] = partial(replacement, *args, plain)


def _replace_until(
    at_end: ExitStack, owner: Any, name: str, replacement: Callable[..., Any], *args: Any
) -> None:
    replace_method(owner, name, replacement, *args)
    at_end.callback(owner.__dict__.pop, name, None)


def join_loops(trainer: Trainer, mesh: RankMesh, at_end: ExitStack) -> None:
    """Replace methods of the trainer's loops until ``at_end`` is closed."""
    replace = partial(_replace_until, at_end)
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epoch.automatic_optimization = BackwardInStep.from_plain(epoch.automatic_optimization)
    replace(fit, "run", _fit, trainer)
    replace(fit, "on_advance_start", _start_epoch, trainer)
    replace(fit, "on_advance_end", _end_epoch, trainer)
    # While the module still trains: Lightning calls no hook of the strategy that early.
    replace(epoch.val_loop, "run", _validate, trainer)
    for loop in (trainer.validate_loop, trainer.test_loop):
        replace(loop, "run", _evaluate_alone, trainer, loop)
    replace(trainer.predict_loop, "run", _predict, trainer, mesh.is_root)
    # Before the hooks of a prediction's end, where Lightning calls no method of its connector.
    replace(trainer.predict_loop, "on_run_end", _end_prediction, trainer)
    # Before the hooks of an epoch's end, for schedulers are updated first.
    replace(epoch, "update_lr_schedulers", _update_schedulers, trainer)
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        # Private: in Lightning's own every rank goes by its own clock.
        replace(epoch, "_should_check_val_fx", _check_validation, trainer)
    stop_without_waiting(trainer, replace)
    leave_group_samplers(trainer, replace)
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
        if isinstance(callback, ThroughputMonitor):
            throughputs = callback._throughputs  # private: nothing else has them
            for stage, plain in throughputs.items():
                throughputs[stage] = PipelineThroughput.from_plain(plain, mesh.num_ranks)


def join_metrics(
    trainer: Trainer, mesh: RankMesh, processes: Processes, at_end: ExitStack
) -> SharedMetricsConnector:
    """Put in the connector by which all ranks have the root's metrics.

    Lightning's loops call it at the ends of batches and epochs; until ``at_end`` is closed, the
    entry that runs is called there too.
    """
    store = processes.metrics_store
    plain = trainer._logger_connector
    connector = SharedMetricsConnector.from_plain(plain, mesh, store, processes.fail)
    trainer._logger_connector = connector
    replace = partial(_replace_until, at_end)
    replace(connector, "on_batch_end", _end_batch, trainer)
    replace(connector, "epoch_end_reached", _reach_epoch_end, trainer)
    replace(connector, "reset_results", _reset_logged, trainer)
    at_end.callback(lambda: connector.leave() if processes.board is not None else None)
    if store is not None:
        refuse_other_callbacks(trainer)
        at_end.callback(EndHooks(trainer, connector.publish).remove)
    return connector


@contextmanager
def joined_precision(precision: Precision, totals: GradientTotals) -> Iterator[None]:
    """Make a precision plugin clip and unscale by the gradients of all stages."""
    scaler = scaler_of(precision)
    precision.clip_grad_by_norm = totals.clip_by_norm  # type: ignore[method-assign]
    precision.clip_grad_by_value = totals.clip_by_value  # type: ignore[method-assign]
    if scaler is not None:
        # Private: unscale_ and step both look for infinities by it, and by nothing else.
        scaler._unscale_grads_ = partial(totals.unscale, scaler)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            precision.__dict__.pop(name, None)
        if scaler is not None:
            scaler.__dict__.pop("_unscale_grads_", None)


@contextmanager
def filtering_by_identity() -> Iterator[None]:
    """Make finetuning callbacks find the parameters that an optimizer has by identity."""

    def find_new(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        with EqualIsSame():
            return _filter_by_value(optimizer, params)

    BaseFinetuning.filter_on_optimizer = staticmethod(find_new)  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseFinetuning.filter_on_optimizer = staticmethod(_filter_by_value)  # type: ignore[method-assign]


def stop_without_waiting(trainer: Trainer, replace: Callable[..., None] = replace_method) -> None:
    """Make a rank that a signal stops end after its batch, and the others with it."""
    # Private: Lightning's own makes every rank wait for global rank 0 before each batch.
    epoch = trainer.fit_loop.epoch_loop
    replace(epoch, "_broadcast_sigterm_tensor", _stop_after_signal, trainer)
    # Private: Lightning's own broadcasts inside the handler, wherever the rank happens to be.
    replace(trainer._signal_connector, "_sigterm_notifier_fn", _note_sigterm, trainer)


def leave_group_samplers(trainer: Trainer, replace: Callable[..., None] = replace_method) -> None:
    """Keep Lightning from adding a DistributedSampler to loaders that need none.

    The sampler of such a loader already shares the data out among replicas.
    """
    # Private: nothing else decides it for one loader.
    replace(trainer._data_connector, "_requires_distributed_sampler", _requires_sampler)


def answer_requeue(
    trainer: Trainer, note_signal: Callable[[int, FrameType | None], None]
) -> Callable[[Any], None]:
    """Replace Lightning's signal handler under Slurm; return the object that saves and requeues."""
    connector = trainer._signal_connector
    # Private: Lightning's own saves there and then.
    connector._slurm_sigusr_handler_fn = note_signal  # type: ignore[method-assign, assignment]
    save: Any = partial(type(connector)._slurm_sigusr_handler_fn, connector)
    return lambda signum: save(signum, None)


class BackwardInStep(_AutomaticOptimization):
    """Leaves zero_grad and backward to the strategy, which runs them in its training step."""

    @classmethod
    def from_plain(cls, plain: _AutomaticOptimization) -> Self:
        """Make a loop with the progress of ``plain``."""
        loop = cls(plain.trainer)
        loop.optim_progress = plain.optim_progress
        return loop

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; hooks on other ranks than the root get the numbers of its outputs alone."""
        outputs, connector = super().run(*args, **kwargs), self.trainer._logger_connector
        if not isinstance(connector, SharedMetricsConnector) or connector.is_root:
            return outputs
        root = self.trainer.strategy.group.root  # type: ignore[attr-defined]
        return OutputsElsewhere("training_step", root, connector.outputs)

    @override
    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        zero_grad = super()._make_zero_grad_fn(batch_idx, optimizer)
        self.trainer.strategy.backward_of_batch.expect(zero_grad)  # type: ignore[attr-defined]
        return None

    @override
    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        return None


class PipelineThroughput(Throughput):
    """Counts a batch once for all ranks of a pipeline, and for each rank its share of operations.

    Lightning's assumes that each device has batches of its own.
    """

    _num_ranks = 1

    @classmethod
    def from_plain(cls, plain: Throughput, num_ranks: int) -> PipelineThroughput:
        """Make one with the state of ``plain``; replicas have batches of their own."""
        throughput = cls()
        throughput.__dict__.update(plain.__dict__)
        throughput._num_ranks = num_ranks
        return throughput

    @override
    def update(self, *, flops: int | None = None, **counts: Any) -> None:
        # A share of them need not be a whole number.
        share: Any = None if flops is None else flops / self._num_ranks
        super().update(flops=share, **counts)

    @override
    def compute(self) -> dict[str, int | float]:
        metrics = super().compute()
        for name in _SHARED_RATES:
            if name in metrics:
                metrics[name] /= self._num_ranks
        return metrics


# The replacements; the trainer or the loop, and Lightning's own method come first.


def _fit(trainer: Any, plain: Callable[[], None]) -> None:
    """Fit, unless a rank has set ``should_stop``, in on_fit_start for instance."""
    trainer.strategy.fit.batch_end.agree_on_stop()
    plain()


def _start_epoch(trainer: Any, plain: Callable[[], None]) -> None:
    """Run the hooks of an epoch's start, which may freeze parameters of every stage."""
    plain()
    trainer.strategy.fit.batch_end.agree_on_stop()


def _end_batch(trainer: Any, plain: Callable[[], None]) -> None:
    plain()
    trainer.strategy.fit.batch_end.end_batch()


def _reach_epoch_end(trainer: Any, plain: Callable[[], None]) -> None:
    """Go on after the last batch of an epoch or an evaluation, before the hooks of its end."""
    fit = trainer.strategy.fit
    fit.batch_end.arrive()  # before anything waits for the other ranks
    fit.send_collected()
    plain()


def _reset_logged(trainer: Any, plain: Callable[[], None]) -> None:
    plain()
    trainer.strategy.fit.reset_logged()


def _end_epoch(trainer: Any, plain: Callable[[], None]) -> None:
    """Agree on whether to go on, after the hooks of an epoch's end."""
    trainer.strategy.fit.boundary.wait_on_all_ranks()
    plain()
    trainer.strategy.fit.batch_end.agree_on_stop()


def _validate(trainer: Any, plain: Callable[[], Any]) -> Any:
    fit = trainer.strategy.fit
    fit.boundary.wait_on_all_ranks()
    fit.batch_end.arrive()
    result = _evaluate(trainer.fit_loop.epoch_loop.val_loop, plain)
    fit.batch_end.agree_on_stop()
    return result


def _evaluate_alone(trainer: Any, loop: Any, plain: Callable[[], Any]) -> Any:
    results = _evaluate(loop, plain)
    trainer.strategy.fit.batch_end.finish()
    return results


def _evaluate(loop: Any, plain: Callable[[], Any]) -> Any:
    """Run an evaluation in inference mode, if the trainer is to.

    With process groups of gloo Lightning's own strategies do not: what they send may be an
    inference tensor. What ranks of a pipeline send is none.
    """
    with torch.inference_mode() if loop.inference_mode else nullcontext():
        return plain()


def _predict(trainer: Any, is_root: bool, plain: Callable[[], Any]) -> Any:
    """Predict; other ranks than the last stage's have nothing to return."""
    predictions = _evaluate_alone(trainer, trainer.predict_loop, plain)
    return predictions if is_root else None


def _end_prediction(trainer: Any, plain: Callable[[], Any]) -> Any:
    trainer.strategy.fit.send_collected()
    return plain()


def _update_schedulers(trainer: Any, plain: Any, interval: str, *args: Any, **kwargs: Any) -> None:
    """Update learning rates; an epoch's scheduler may read attributes that its steps wrote."""
    has_epochs = [config.interval == "epoch" for config in trainer.lr_scheduler_configs]
    if interval == "epoch" and any(has_epochs):
        trainer.strategy.fit.send_collected()
    plain(interval, *args, **kwargs)


def _check_validation(trainer: Any, plain: Callable[[Any], bool], data_fetcher: Any) -> bool:
    """Validate when global rank 0's clock says so."""
    clocks = trainer.strategy.fit.batch_end.clocks
    with nullcontext() if clocks is None else clocks.deciding():
        return plain(data_fetcher)


def _requires_sampler(plain: Callable[[Any], bool], loader: Any) -> bool:
    return group_sampler_of(loader) is None and plain(loader)


def _note_sigterm(trainer: Any, plain: Any, signum: int, frame: FrameType | None) -> None:
    """Request a stop of this rank after this batch; its failure then ends the other ranks."""
    trainer._signal_connector.received_sigterm = True


def _stop_after_signal(trainer: Any, plain: Any) -> None:
    if trainer.received_sigterm:
        raise SIGTERMException
