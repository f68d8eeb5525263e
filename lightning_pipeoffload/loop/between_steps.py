"""Weights from the end of one step to the begin of the next: which ranks wait for which.

Weights that replicas still send each other, or that a step has changed without waiting for the norm
of all gradients, are not final there. What Lightning, its callbacks, the user's hooks and the data
do between batches is watched: a call of torch that is given such a weight waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipeoffload.loop.backward_hooks import scaler_of
from lightning_pipeoffload.loop.hooks.users_hooks import (
    GradientHooks,
    has_forward_hooks,
    users_hooks,
    without_forward_hooks,
)
from lightning_pipeoffload.loop.pipeline_run import PipelineRun
from lightning_pipeoffload.loop.step_boundary import StepBoundary, is_watched
from lightning_pipeoffload.optimizers.kept_step import KeptStep, can_keep
from lightning_pipeoffload.runtime.executor import Settle
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pending_parameters import PendingParameters, SettlingMode

log = logging.getLogger(__name__)

_WAITS = 'optimizer_sync="post_validation": ranks wait for each other at each step, because %s'
# From the step of one batch to the first F of the next.
_HOOKS_BETWEEN = (
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "on_exception",
)  # fmt: skip


class BetweenSteps:
    """One rank's weights between the steps of a run.

    Attributes:
        boundary: What takes steps back that were wrong.
        gradient_hooks: The hooks that may read gradients; None: there are none.
    """

    def __init__(self, trainer: Trainer, run: PipelineRun, group: PipelineGroup) -> None:
        self._trainer: Any = trainer
        self._module = trainer.lightning_module
        self._run, self._group = run, group
        self.boundary = StepBoundary(group, run.pipeline.gradient_age)
        self.gradient_hooks: GradientHooks | None = None
        self._watch = _WeightsWatch(group.replicas.pending, self.boundary.weights)
        self._has_forward_hooks = False

    def has_barrier(self) -> bool:
        """Whether all ranks wait for each other between two steps."""
        return has_step_barrier(self._trainer, self.gradient_hooks) and (
            not self.boundary.keeps_copies
        )

    def start_training(self, may_take_back: bool) -> None:
        """Decide what ranks wait for; all call it.

        Args:
            may_take_back: Whether steps may be taken for right, and taken back.
        """
        self._group.replicas.pending.may_wait = _may_travel(self._trainer)
        self._watch.is_on = True
        self._run.pipeline.before_trace = self.settle
        if may_take_back and self._group.num_ranks > 1:
            self._open_boundary()

    def _open_boundary(self) -> None:
        may_open = _may_step_ahead(self._trainer, self._group.reports)
        if self._group.world.agree(may_open, unanimous=True):
            self.boundary.open_for(KeptStep(self._trainer.optimizers[0]), self._is_clipping)
            self.boundary.clips = partial(_clips_by_norm, self._trainer)
            found = has_forward_hooks(self._module)
            self._has_forward_hooks = self._group.world.agree(found, unanimous=False)

    def _is_clipping(self) -> bool:
        """Whether Lightning clips, as the last thing before the step; hooks may have before."""
        # Private: no public name tells the hook that runs.
        return self._module._current_fx_name == "configure_gradient_clipping"

    def start_ahead(self) -> tuple[ExitStack, Settle | None]:
        """Begin a batch before the weights are final, if what runs can be taken back.

        Returns:
            What is in force while the batch runs, and what its executor is to settle by.
        """
        boundary, muted = self.boundary, ExitStack()
        if not boundary.is_open:
            return muted, None
        if self._run.pipeline.leaves_trace or self._has_forward_hooks:
            boundary.settle()
        elif not has_forward_hooks(self._module):
            return muted, boundary.settle
        elif boundary.settle():  # other ranks may have no hooks, and send what they take back
            muted.enter_context(without_forward_hooks(self._module))
            return muted, partial(self._begin_again, muted)
        return muted, None

    def _begin_again(self, muted: ExitStack) -> bool:
        muted.close()
        return True

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Step with weights that all hooks see, and let them become final later."""
        self.stop_watching()  # which the optimizer's own hooks read
        yield
        self.boundary.end_step()
        self._watch.start()

    def stop_watching(self) -> None:
        """Let the next step wait for weights that are not final yet."""
        self._watch.stop()

    def settle(self) -> None:
        """Have all weights of this rank."""
        self.stop_watching()
        self._group.replicas.pending.settle()
        self.boundary.weights.settle()

    def settle_together(self) -> None:
        """Have all weights, where all ranks pass."""
        self.settle()
        self.boundary.settle()


class _WeightsWatch:
    """Lets weights become final while the next batch begins."""

    def __init__(self, *weights: PendingParameters) -> None:
        self._weights = weights
        self._mode = SettlingMode(*weights)
        self.is_on = self._is_watching = False

    def start(self) -> None:
        """Watch, from the end of a step on."""
        if self.is_on and any(self._weights) and not self._is_watching:
            self._mode.start()
            self._is_watching = True

    def stop(self) -> None:
        """Watch no longer: a batch begins."""
        if self._is_watching:
            self._mode.stop()
            self._is_watching = False


def _may_travel(trainer: Trainer) -> bool:
    """Whether no code of the user's runs while weights come, from a step to the next batch."""
    return not (users_hooks(trainer, _HOOKS_BETWEEN) or any(map(is_watched, trainer.optimizers)))


def has_step_barrier(trainer: Trainer, gradient_hooks: GradientHooks | None) -> bool:
    """Whether no rank can end its optimizer step before it has heard of all others' gradients.

    Clipping by norm needs the norm over all stages, a loss scale has to know of every infinity, and
    before a hook that may read gradients their sizes are exchanged. Clipping by value reads each by
    itself. A hook of the user's own that clips is taken to clip by norm.
    """
    return (gradient_hooks is not None and gradient_hooks.is_any) or _needs_others(trainer)


def _needs_others(trainer: Trainer) -> bool:
    """Whether what Lightning does itself depends on the gradients of all stages."""
    if scaler_of(trainer.precision_plugin) is not None:
        return True
    if is_overridden("configure_gradient_clipping", trainer.lightning_module):
        return True
    return _clips_by_norm(trainer)


def _clips_by_norm(trainer: Trainer) -> bool:
    """Whether Lightning clips gradients by the norm of all."""
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    return bool(trainer.gradient_clip_val) and not by_value


def _may_step_ahead(trainer: Trainer, reports: bool) -> bool:
    """Whether steps that depend on all stages' gradients can be taken back; says why not."""
    if not _needs_others(trainer):
        return False
    obstacle = _obstacle(trainer)
    if obstacle and reports:
        log.info(_WAITS, obstacle)
    return not obstacle


def _obstacle(trainer: Trainer) -> str:
    (optimizer,) = trainer.optimizers
    name = type(optimizer).__name__
    if not can_keep(optimizer):
        return f"{name} is not one of torch's, and may change more than weights and its state"
    if is_watched(optimizer):
        return f"hooks run at the steps of {name}"
    if is_overridden("configure_gradient_clipping", trainer.lightning_module):
        return "configure_gradient_clipping() may look at what it has clipped"
    return ""
