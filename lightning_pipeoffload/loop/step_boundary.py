"""Weights from the end of one step to the begin of the next: which ranks wait for which.

Weights that replicas still send each other, or that a step has changed before it was validated, are
pending there. What Lightning, its callbacks, the user's hooks and the data do between batches is
watched: a call of torch that is given such a weight waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipeoffload.loop.backward import scaler_of
from lightning_pipeoffload.loop.hooks import (
    has_forward_hooks,
    share_gradient_norms,
    users_hooks,
    without_forward_hooks,
    wrap_gradient_hooks,
)
from lightning_pipeoffload.loop.post_validation import (
    PostValidation,
    clips_by_norm,
    runs_user_code,
)
from lightning_pipeoffload.optimizers import (
    MasterWeights,
    OptimizerSnapshot,
    may_step_by_bucket,
    supports_snapshot,
)
from lightning_pipeoffload.runtime.comm import PendingParametersMode
from lightning_pipeoffload.runtime.run import Pipeline, WaitForWeights
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.runtime.users_code import WrappedHook

log = logging.getLogger(__name__)

_WAITS = 'optimizer_sync="post_validation": ranks wait for each other at each step, because %s'
# From the first gradient that is final to the optimizer's computation.
_BEFORE_STEP = "on_after_backward", "on_before_optimizer_step", "on_exception"
# From the step of one batch to the first F of the next.
_HOOKS_BETWEEN = (
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "on_exception",
)  # fmt: skip


class StepBoundary:
    """This rank's weights between the steps of a run.

    Args:
        trainer: The trainer.
        pipeline: This rank's part of the module.
        masters: The masters of parameters; None: there are none.

    Attributes:
        validation: What takes steps back that were wrong.
        num_steps: The number of calls of ``optimizer.step``.
        may_step_early: Whether a parameter may step on the host before the gradients of others are
            final; known once training starts.
    """

    num_steps = 0
    may_step_early = False

    def __init__(
        self,
        trainer: Trainer,
        pipeline: Pipeline,
        masters: MasterWeights | None = None,
    ) -> None:
        self._trainer: Any = trainer
        self._module = trainer.lightning_module
        group = pipeline.group
        self._group, self._masters = group, masters
        self._pipeline, self._gradients = pipeline, pipeline.gradients
        self.validation = PostValidation(trainer, group, pipeline.gradient_changes)
        self._gradient_hooks: list[WrappedHook] = []
        if group.num_ranks > 1 or self._gradients.updating_replica is not None:
            self._gradient_hooks = wrap_gradient_hooks(trainer, self._share_gradient_norms)
        self._of_replicas = group.replicas.pending
        self._mode = PendingParametersMode(self._of_replicas, self.validation.pending)
        self._may_watch = self._is_watching = self._has_forward_hooks = False

    def _share_gradient_norms(self) -> None:
        """Exchange gradients' sizes before each hook that may read them; all ranks call it."""
        if self._pipeline.is_split:
            share_gradient_norms(self._pipeline)

    def has_barrier(self) -> bool:
        """Whether all ranks wait for each other between two steps."""
        return not self.validation.is_on and has_step_barrier(self._trainer, self._gradient_hooks)

    def configure_step_sync(self, may_take_back: bool) -> None:
        """Decide what ranks wait for; all call it.

        Args:
            may_take_back: Whether ``optimizer_sync="post_validation"`` was asked for.
        """
        self._of_replicas.allow_deferral(_may_defer_broadcasts(self._trainer))
        self.may_step_early = _may_step_early(self._trainer, self._gradient_hooks)
        if may_take_back and self._group.num_ranks > 1:
            self._start_validation()
        # Else no weight is ever pending.
        self._may_watch = self._group.num_replicas > 1 or self.validation.is_on

    def _start_validation(self) -> None:
        may_start = _may_step_before_validation(self._trainer, self._group.is_global_zero)
        if self._group.world.agree(may_start, unanimous=True):
            optimizer, gradients = self._trainer.optimizers[0], self._gradients
            snapshot = OptimizerSnapshot(optimizer, self._masters, gradients.owns)
            self.validation.start(snapshot, over_replicas=gradients.updating_replica is not None)
            has_hooks = has_forward_hooks(self._module)
            self._has_forward_hooks = self._group.world.agree(has_hooks, unanimous=False)

    def start_before_validation(
        self, microbatches: Sequence[Microbatch]
    ) -> tuple[ExitStack, WaitForWeights | None]:
        """Begin a batch before the weights are final, if what runs can be taken back.

        Args:
            microbatches: Its microbatches; where steps have side effects, they cannot run again.

        Returns:
            A context for the batch, and the function by which its executor waits for final weights.
        """
        validation, muted = self.validation, ExitStack()
        if not validation.is_open:
            return muted, None
        is_final = any(each.record.writes.cannot_run_again for each in microbatches)
        if is_final or self._has_forward_hooks:
            validation.wait_for_validated_weights()
        elif not has_forward_hooks(self._module):
            return muted, validation.wait_for_validated_weights
        elif validation.wait_for_validated_weights():
            # Other ranks may have no hooks, and send what they take back.
            muted.enter_context(without_forward_hooks(self._module))
            return muted, partial(_restore_hooks_and_rerun, muted)
        return muted, None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The optimizer steps in here, with final weights; the new ones become final later."""
        self.num_steps += 1
        self.stop_watching_weights()  # the optimizer's own hooks read weights
        yield
        if self.validation.is_on:
            self.validation.defer_validation()
        if not self._may_watch or self._is_watching:
            return
        if self._of_replicas or self.validation.pending:
            self._mode.start()
            self._is_watching = True

    def stop_watching_weights(self) -> None:
        """Leave it to the next step to wait for pending weights."""
        if self._is_watching:
            self._mode.stop()
            self._is_watching = False

    def wait_for_parameters(self) -> None:
        """Wait for all weights of this rank."""
        self.stop_watching_weights()
        self._of_replicas.wait()
        self.validation.pending.wait()

    def wait_for_final_weights(self) -> None:
        """Wait for all weights, where all ranks do."""
        self.wait_for_parameters()
        self.validation.wait_for_validated_weights()

    def leave(self) -> None:
        """Leave the trainer, after an error too."""
        while self._gradient_hooks:
            self._gradient_hooks.pop().remove()
        self.validation.forget()


def _restore_hooks_and_rerun(muted: ExitStack) -> bool:
    muted.close()
    return True


def _may_defer_broadcasts(trainer: Trainer) -> bool:
    """Whether no code of the user's runs from a step to the next batch, while weights come."""
    return not (
        users_hooks(trainer, _HOOKS_BETWEEN) or any(map(runs_user_code, trainer.optimizers))
    )


def has_step_barrier(trainer: Trainer, gradient_hooks: Sequence[WrappedHook]) -> bool:
    """Whether no rank can end its optimizer step before it has heard of all others' gradients.

    Clipping by norm needs the norm over all stages, a loss scale has to know of every infinity, and
    before a hook that may read gradients their sizes are exchanged. Clipping by value reads each by
    itself. A hook of the user's own that clips is taken to clip by norm.
    """
    return bool(gradient_hooks) or _needs_all_gradients(trainer)


def _may_step_early(trainer: Trainer, gradient_hooks: Sequence[WrappedHook]) -> bool:
    """Whether a parameter may step on the host before the gradients of others are final.

    Optimizers step by bucket, nothing clips, no hook runs between gradients and step, and nothing
    saves after an error, which may come while some parameters have stepped and others have not.
    """
    saves = any(isinstance(c, OnExceptionCheckpoint) for c in trainer.callbacks)  # type: ignore[attr-defined] # set at run time
    hooks = users_hooks(trainer, _BEFORE_STEP)
    is_clipped = bool(trainer.gradient_clip_val)
    is_held_up = saves or hooks or is_clipped or has_step_barrier(trainer, gradient_hooks)
    return not is_held_up and all(map(may_step_by_bucket, trainer.optimizers))


def _needs_all_gradients(trainer: Trainer) -> bool:
    """Whether what Lightning does itself depends on the gradients of all stages."""
    if scaler_of(trainer.precision_plugin) is not None:
        return True
    if is_overridden("configure_gradient_clipping", trainer.lightning_module):
        return True
    return clips_by_norm(trainer)


def _may_step_before_validation(trainer: Trainer, reports: bool) -> bool:
    """Whether steps that depend on all stages' gradients can be taken back; logs why not."""
    if not _needs_all_gradients(trainer):
        return False
    obstacle = _obstacle(trainer)
    if obstacle and reports:
        log.info(_WAITS, obstacle)
    return not obstacle


def _obstacle(trainer: Trainer) -> str:
    (optimizer,) = trainer.optimizers
    name = type(optimizer).__name__
    if not supports_snapshot(optimizer):
        return f"{name} is not one of torch's, and may change more than weights and its state"
    if runs_user_code(optimizer):
        return f"hooks run at the steps of {name}"
    if is_overridden("configure_gradient_clipping", trainer.lightning_module):
        return "configure_gradient_clipping() may look at what it has clipped"
    return ""
