"""Where Lightning's loops are told that gradients come with the training step.

Forwards and backwards of a pipeline interleave, so what Lightning runs between them (zero_grad, the
hooks around backward) is handed to the strategy, which runs it where its first backward starts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import (
    _AutomaticOptimization,  # private: it decides what follows the training step
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_pipeoffload.loop.hooks.elsewhere import OutputsElsewhere
from lightning_pipeoffload.loop.hooks.end_hooks import EndHooks, refuse_other_callbacks
from lightning_pipeoffload.loop.throughput import share_throughput
from lightning_pipeoffload.metrics.shared_metrics import SharedMetricsConnector
from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.randomness import draw_seed
from lightning_pipeoffload.runtime.shapes.equal_is_same import EqualIsSame

_STEP_OF = {
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class BackwardInStep(_AutomaticOptimization):
    """Leaves zero_grad and backward to the strategy, which runs them in its training step."""

    @classmethod
    def replacing(cls, plain: _AutomaticOptimization) -> Self:
        """Make one that goes on counting where ``plain`` is."""
        made = cls(plain.trainer)
        made.optim_progress = plain.optim_progress
        return made

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; of its outputs only numbers are for hooks of other ranks than the root."""
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


def join_loops(
    trainer: Trainer,
    mesh: RankMesh,
    metrics_store: Store | None,
    fail: Callable[[Exception], None],
) -> EndHooks | None:
    """Put the pipeline's pieces into the trainer's loops.

    Args:
        trainer: The trainer whose loops are changed; to call this again is harmless.
        mesh: The processes, of which some are roots.
        metrics_store: The store in which roots publish metrics; None with one rank.
        fail: A function that ends the run by an error of the thread that publishes.

    Returns:
        The hooks after which roots publish; None with one rank.

    Raises:
        ValueError: This rank has other callbacks than global rank 0.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization = BackwardInStep.replacing(loop.automatic_optimization)
    fit = trainer.fit_loop
    fit.run = partial(_fit, trainer)  # type: ignore[method-assign]
    fit.on_advance_start = partial(_start_epoch, trainer)  # type: ignore[method-assign]
    fit.on_advance_end = partial(_end_epoch, trainer)  # type: ignore[method-assign]
    stop_without_waiting(trainer)
    # While the module still trains: Lightning calls no hook of the strategy that early.
    loop.val_loop.run = partial(_validate, trainer)  # type: ignore[method-assign]
    for evaluation in (trainer.validate_loop, trainer.test_loop):
        evaluation.run = partial(_evaluate_alone, evaluation)  # type: ignore[method-assign]
    trainer.predict_loop.run = partial(_predict, trainer, mesh.is_root)  # type: ignore[method-assign]
    trainer.predict_loop.on_run_end = partial(_end_prediction, trainer)  # type: ignore[method-assign]
    # Before the hooks of an epoch's end, for schedulers are updated first.
    loop.update_lr_schedulers = partial(_update_schedulers, trainer)  # type: ignore[method-assign]
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        # Private: in Lightning's own every rank goes by its own clock.
        loop._should_check_val_fx = partial(  # type: ignore[method-assign]
            _agree_to_validate, trainer
        )
    connector = SharedMetricsConnector.replacing(
        trainer._logger_connector, mesh, metrics_store, fail
    )
    trainer._logger_connector = connector
    share_throughput(trainer, mesh.num_ranks)
    if metrics_store is None:
        return None
    refuse_other_callbacks(trainer)
    return EndHooks(trainer, connector.tick)


def stop_without_waiting(trainer: Trainer) -> None:
    """Let a rank that is told to stop by a signal do so after its batch, and the others with it."""
    # Private: Lightning's own makes every rank wait for global rank 0 before each batch.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = partial(  # type: ignore[method-assign]
        _stop_if_told, trainer
    )
    # Private: Lightning's own broadcasts inside the handler, wherever the rank happens to be.
    trainer._signal_connector._sigterm_notifier_fn = partial(  # type: ignore[method-assign]
        _note_sigterm, trainer
    )


def _validate(trainer: Trainer) -> Any:
    """Run the backwards that are left of batches that accumulate, and validate."""
    trainer.strategy.settle_together()  # type: ignore[attr-defined]
    trainer.strategy.finish_accumulating()  # type: ignore[attr-defined]
    trainer.strategy.arrive()  # type: ignore[attr-defined]
    result = _evaluate(trainer.fit_loop.epoch_loop.val_loop)
    trainer.strategy.settle()  # type: ignore[attr-defined]
    return result


def _fit(trainer: Trainer) -> None:
    """Fit, unless a rank has been told not to; what is set in on_fit_start counts already."""
    trainer.strategy.settle()  # type: ignore[attr-defined]
    draw_seed()  # a second fit is to draw others
    type(trainer.fit_loop).run(trainer.fit_loop)


def _predict(trainer: Trainer, is_root: bool) -> Any:
    """Predict; other ranks than the last stage's have nothing to return."""
    predictions = _evaluate_alone(trainer.predict_loop)
    return predictions if is_root else None


def _evaluate_alone(loop: Any) -> Any:
    draw_seed()
    return _evaluate(loop)


def _end_prediction(trainer: Trainer) -> Any:
    """Run the hooks of a prediction's end, for which Lightning has no connector's word."""
    trainer._logger_connector.at_epoch_end()  # type: ignore[attr-defined] # the one of join_loops
    return type(trainer.predict_loop).on_run_end(trainer.predict_loop)


def _update_schedulers(trainer: Trainer, interval: str, *args: Any, **kwargs: Any) -> None:
    """Update learning rates; those of an epoch may depend on what its steps have collected."""
    if any(config.interval == interval == "epoch" for config in trainer.lr_scheduler_configs):
        trainer._logger_connector.at_epoch_end()  # type: ignore[attr-defined] # the one of join_loops
    loop = trainer.fit_loop.epoch_loop
    type(loop).update_lr_schedulers(loop, interval, *args, **kwargs)


def _evaluate(loop: Any) -> Any:
    """Run an evaluation in inference mode, if the trainer is to.

    With process groups of gloo Lightning's own strategies do not: what they send may be an
    inference tensor. What ranks of a pipeline send is none.
    """
    with torch.inference_mode() if loop.inference_mode else nullcontext():
        return type(loop).run(loop)


def _start_epoch(trainer: Trainer) -> None:
    """Let the hooks at an epoch's start freeze and unfreeze parameters of every stage."""
    loop = trainer.fit_loop
    with EqualIsSame():
        type(loop).on_advance_start(loop)
    trainer.strategy.settle()  # type: ignore[attr-defined]


def _end_epoch(trainer: Trainer) -> None:
    """Let the ranks agree on whether they go on, after the hooks of an epoch's end."""
    trainer.strategy.settle_together()  # type: ignore[attr-defined]
    type(trainer.fit_loop).on_advance_end(trainer.fit_loop)
    trainer.strategy.settle()  # type: ignore[attr-defined]


def _agree_to_validate(trainer: Trainer, data_fetcher: Any) -> bool:
    """Validate when the time has come for global rank 0."""
    loop = trainer.fit_loop.epoch_loop
    return trainer.strategy.broadcast(type(loop)._should_check_val_fx(loop, data_fetcher))


def _note_sigterm(trainer: Trainer, signum: int, frame: FrameType | None) -> None:
    """Remember to stop after this batch; the other ranks then stop because of this one."""
    trainer._signal_connector.received_sigterm = True


def _stop_if_told(trainer: Trainer) -> None:
    if trainer.received_sigterm:
        raise SIGTERMException


def refuse_module(module: LightningModule, trainer: Trainer) -> None:
    """Refuse what cannot be run stage by stage.

    Raises:
        ValueError: There is something; the message says what, and what would do.
    """
    for step in _steps_of(trainer):
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"{step}(self, dataloader_iter) cannot be pipelined: each batch has to be cut into "
                f"microbatches; use {step}(self, batch, batch_idx)"
            )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if not module.automatic_optimization:
        raise ValueError(
            "manual optimization cannot be pipelined: training_step runs once for every stage and "
            "microbatch, an optimizer step inside it would run as often; use automatic optimization"
        )


def _steps_of(trainer: Trainer) -> list[str]:
    """List the steps that a run is going to call."""
    if trainer.state.fn in _STEP_OF:
        return [_STEP_OF[trainer.state.fn]]
    return ["training_step", "validation_step"] if trainer.enable_validation else ["training_step"]
