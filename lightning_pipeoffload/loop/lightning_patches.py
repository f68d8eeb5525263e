"""Methods of Lightning that a run replaces, until the end of the entry.

Forwards and backwards of a pipeline interleave, so what Lightning runs between them (zero_grad, the
hooks around backward) is handed to ``backward.py``, which runs it where a first backward starts.
Lightning's loops wait for other ranks at each batch; here they do only where all of them meet. The
names are Lightning's own, most of them private; tests/test_private_api.py pins each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from typing_extensions import override

from lightning_pipeoffload.loop.backward import BatchBackward, GradientClipper, scaler_of
from lightning_pipeoffload.loop.batch_end import BatchEndExchange
from lightning_pipeoffload.loop.data import group_sampler_of
from lightning_pipeoffload.loop.hooks import (
    CollectedValues,
    RemoteOutputs,
    refuse_different_callbacks,
    wrap_end_hooks,
)
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.loop.stops import RankZeroClocks
from lightning_pipeoffload.metrics import SharedMetricsConnector
from lightning_pipeoffload.processes import Processes
from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.comm import RankMesh
from lightning_pipeoffload.runtime.shapes import EqualIsSame

_filter_by_value = BaseFinetuning.filter_on_optimizer
_SHARED_RATES = ("batches_per_sec", "samples_per_sec", "items_per_sec")


def _patch_method(
    at_end: ExitStack, owner: Any, name: str, replacement: Callable[..., Any], *args: Any
) -> None:
    """Replace a method of one object by ``replacement(*args, plain, ...)``."""
    plain = partial(getattr(type(owner), name), owner)
    at_end.enter_context(replaced(owner, name, partial(replacement, *args, plain)))


def install_shared_metrics(
    trainer: Trainer, mesh: RankMesh, processes: Processes, at_end: ExitStack
) -> SharedMetricsConnector:
    """Put in the connector by which all ranks have the root's metrics, until ``at_end`` is closed.

    Lightning's loops call it at the ends of batches and epochs.
    """
    plain, store = trainer._logger_connector, processes.metrics_store
    connector = SharedMetricsConnector.from_plain(
        plain, mesh, store, processes.exit_for_thread_failure
    )
    trainer._logger_connector = connector
    at_end.callback(lambda: connector.fetch_last_metrics() if processes.board is not None else None)
    if store is not None:
        refuse_different_callbacks(trainer)
        for hook in wrap_end_hooks(trainer, connector.publish):
            at_end.callback(hook.remove)
    return connector


@contextmanager
def clipping_across_stages(precision: Precision, totals: GradientClipper) -> Iterator[None]:
    """Make a precision plugin clip and unscale by the gradients of all stages."""
    scaler = scaler_of(precision)
    with ExitStack() as stack:
        stack.enter_context(replaced(precision, "clip_grad_by_norm", totals.clip_by_norm))
        stack.enter_context(replaced(precision, "clip_grad_by_value", totals.clip_by_value))
        if scaler is not None:
            # Private: unscale_ and step both look for infinities by it, and by nothing else.
            unscale = partial(totals.unscale, scaler)
            stack.enter_context(replaced(scaler, "_unscale_grads_", unscale))
        yield


def filtering_by_identity() -> AbstractContextManager[None]:
    """Make finetuning callbacks find the parameters that an optimizer has by identity."""

    def find_new(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        with EqualIsSame():
            return _filter_by_value(optimizer, params)

    return replaced(BaseFinetuning, "filter_on_optimizer", staticmethod(find_new))


def patch_sigterm_handling(trainer: Trainer, at_end: ExitStack) -> None:
    """Make a rank that a signal stops end after its batch, and the others with it."""
    # Private: Lightning's own makes every rank wait for global rank 0 before each batch.
    epoch = trainer.fit_loop.epoch_loop
    _patch_method(at_end, epoch, "_broadcast_sigterm_tensor", _stop_after_signal, trainer)
    # Private: Lightning's own broadcasts inside the handler, wherever the rank happens to be.
    connector = trainer._signal_connector
    _patch_method(at_end, connector, "_sigterm_notifier_fn", _record_sigterm, trainer)


def prevent_distributed_samplers(trainer: Trainer, at_end: ExitStack) -> None:
    """Keep Lightning from adding a DistributedSampler to loaders that need none.

    The sampler of such a loader already shares the data out among replicas.
    """
    # Private: nothing else decides it for one loader.
    connector = trainer._data_connector
    _patch_method(at_end, connector, "_requires_distributed_sampler", _requires_sampler)


def run_backward_in_step(
    trainer: Trainer,
    at_end: ExitStack,
    set_zero_grad: Callable[[Callable[[], None] | None], None],
    outputs: Callable[[], Any] | None = None,
) -> None:
    """Leave zero_grad and backward to the strategy, which runs them in its training step.

    Args:
        trainer: The trainer.
        at_end: Puts Lightning's loop back.
        set_zero_grad: Called with the ``zero_grad`` of a batch; None while gradients accumulate.
        outputs: Returns what hooks get in place of a step's outputs; None: these.
    """
    epoch = trainer.fit_loop.epoch_loop
    in_step = _BackwardInStep(epoch.automatic_optimization, set_zero_grad, outputs)
    at_end.enter_context(replaced(epoch, "automatic_optimization", in_step))


class _BackwardInStep(_AutomaticOptimization):
    def __init__(
        self,
        plain: _AutomaticOptimization,
        set_zero_grad: Callable[[Callable[[], None] | None], None],
        outputs: Callable[[], Any] | None,
    ) -> None:
        super().__init__(plain.trainer)
        self.optim_progress = plain.optim_progress
        self._set_zero_grad, self._outputs = set_zero_grad, outputs

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().run(*args, **kwargs)
        return outputs if self._outputs is None else self._outputs()

    @override
    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        self._set_zero_grad(super()._make_zero_grad_fn(batch_idx, optimizer))
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


class LoopPatches:
    """What all ranks do together where Lightning's loops and their connector call.

    Each method stands in place of Lightning's own, which it gets as ``plain``. The trainer has the
    connector of :func:`install_shared_metrics`.
    """

    def __init__(
        self,
        trainer: Trainer,
        mesh: RankMesh,
        boundary: StepBoundary,
        batch_end: BatchEndExchange,
        collected: CollectedValues | None,
    ) -> None:
        self._trainer: Any = trainer
        self._mesh, self._boundary = mesh, boundary
        self._end, self._collected = batch_end, collected

    def install(self, backward: BatchBackward, at_end: ExitStack) -> None:
        """Replace methods of the loops and the connector until ``at_end`` is closed."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        replace = partial(_patch_method, at_end)
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        message = "training_step", self._mesh.root, connector.outputs
        outputs = None if self._mesh.is_root else partial(RemoteOutputs, *message)
        run_backward_in_step(trainer, at_end, backward.set_zero_grad, outputs)
        replace(fit, "run", self._fit)
        replace(fit, "on_advance_start", self._start_epoch)
        replace(fit, "on_advance_end", self._end_epoch)
        # While the module still trains: Lightning calls no hook of the strategy that early.
        replace(epoch.val_loop, "run", self._validate)
        for loop in (trainer.validate_loop, trainer.test_loop):
            replace(loop, "run", self._evaluate_outside_fit, loop)
        replace(trainer.predict_loop, "run", self._predict)
        # Before the hooks of a prediction's end, where Lightning calls no method of its connector.
        replace(trainer.predict_loop, "on_run_end", self._end_prediction)
        # Before the hooks of an epoch's end, for schedulers are updated first.
        replace(epoch, "update_lr_schedulers", self._update_schedulers)
        clocks = self._end.clocks
        if clocks is not None and getattr(trainer, "_val_check_time_interval", None) is not None:
            # Private: in Lightning's own every rank goes by its own clock.
            replace(epoch, "_should_check_val_fx", _is_validation_due, clocks)
        replace(connector, "on_batch_end", self._end_batch)
        replace(connector, "epoch_end_reached", self._reach_epoch_end)
        replace(connector, "reset_results", self._reset_logged)
        patch_sigterm_handling(trainer, at_end)
        prevent_distributed_samplers(trainer, at_end)
        for callback in trainer.callbacks:
            if isinstance(callback, ThroughputMonitor):
                throughputs = callback._throughputs  # private: nothing else has them
                for stage, counter in throughputs.items():
                    throughputs[stage] = PipelineThroughput.from_plain(
                        counter, self._mesh.num_ranks
                    )

    def _fit(self, plain: Callable[[], None]) -> None:
        """Fit, unless a rank has set ``should_stop``, in on_fit_start for instance."""
        self._end.agree_on_stop()
        plain()

    def _start_epoch(self, plain: Callable[[], None]) -> None:
        """Run the hooks of an epoch's start, which may freeze parameters of every stage."""
        plain()
        self._end.agree_on_stop()

    def _end_batch(self, plain: Callable[[], None]) -> None:
        """Run ``SharedMetricsConnector.on_batch_end``, then ``BatchEndExchange.end_batch``."""
        plain()
        self._end.end_batch()

    def _reach_epoch_end(self, plain: Callable[[], None]) -> None:
        """Go on after the last batch of an epoch or an evaluation, before the hooks of its end."""
        self._end.reach_milestone()  # before anything waits for the other ranks
        self._send_collected()
        plain()

    def _send_collected(self) -> None:
        if self._collected is not None:
            self._collected.send()

    def _reset_logged(self, plain: Callable[[], None]) -> None:
        plain()
        if self._collected is not None:
            self._collected.reset_logged()

    def _end_epoch(self, plain: Callable[[], None]) -> None:
        """Agree on whether to go on, after the hooks of an epoch's end."""
        self._boundary.wait_for_final_weights()
        plain()
        self._end.agree_on_stop()

    def _validate(self, plain: Callable[[], Any]) -> Any:
        self._boundary.wait_for_final_weights()
        self._end.reach_milestone()
        result = _run_in_inference_mode(self._trainer.fit_loop.epoch_loop.val_loop, plain)
        self._end.agree_on_stop()
        return result

    def _evaluate_outside_fit(self, loop: Any, plain: Callable[[], Any]) -> Any:
        results = _run_in_inference_mode(loop, plain)
        self._end.compare_remaining()
        return results

    def _predict(self, plain: Callable[[], Any]) -> Any:
        """Predict; other ranks than the last stage's have nothing to return."""
        predictions = self._evaluate_outside_fit(self._trainer.predict_loop, plain)
        return predictions if self._mesh.is_root else None

    def _end_prediction(self, plain: Callable[[], Any]) -> Any:
        self._send_collected()
        return plain()

    def _update_schedulers(self, plain: Any, interval: str, *args: Any, **kwargs: Any) -> None:
        """Update learning rates; an epoch's scheduler may read attributes that its steps wrote."""
        has_epochs = [config.interval == "epoch" for config in self._trainer.lr_scheduler_configs]
        if interval == "epoch" and any(has_epochs):
            self._send_collected()
        plain(interval, *args, **kwargs)


# Other replacements; what they need and Lightning's own method come first.


def _run_in_inference_mode(loop: Any, plain: Callable[[], Any]) -> Any:
    """Run an evaluation in inference mode, if the trainer is to.

    With process groups of gloo Lightning's own strategies do not: what they send may be an
    inference tensor. What ranks of a pipeline send is none.
    """
    with torch.inference_mode() if loop.inference_mode else nullcontext():
        return plain()


def _is_validation_due(
    clocks: RankZeroClocks, plain: Callable[[Any], bool], data_fetcher: Any
) -> bool:
    """Validate when global rank 0's clock says so."""
    with clocks.deciding():
        return plain(data_fetcher)


def _requires_sampler(plain: Callable[[Any], bool], loader: Any) -> bool:
    return group_sampler_of(loader) is None and plain(loader)


def _record_sigterm(trainer: Any, plain: Any, signum: int, frame: FrameType | None) -> None:
    """Request a stop of this rank after this batch; its failure then ends the other ranks."""
    trainer._signal_connector.received_sigterm = True


def _stop_after_signal(trainer: Any, plain: Any) -> None:
    if trainer.received_sigterm:
        raise SIGTERMException
