"""Whether all ranks wait for each other between two optimizer steps."""

from __future__ import annotations

import logging

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipeoffload.loop.hooks.gradient_hooks import GradientHooks
from lightning_pipeoffload.loop.loss_scale import scaler_of
from lightning_pipeoffload.loop.weights_watch import is_watched
from lightning_pipeoffload.optimizers.kept_step import can_keep

log = logging.getLogger(__name__)

_WAITS = 'optimizer_sync="post_validation": ranks wait for each other at each step, because %s'


def has_step_barrier(trainer: Trainer, gradient_hooks: GradientHooks | None) -> bool:
    """Whether no rank can end its optimizer step before it has heard of all others' gradients.

    Clipping by norm needs the norm over all stages, a loss scale has to know of every infinity, and
    before a hook that may read gradients their sizes are exchanged. Clipping by value reads each by
    itself. A hook of the user's own that clips is taken to clip by norm.

    Args:
        trainer: The trainer.
        gradient_hooks: The hooks that may read gradients; None: there are none.
    """
    return (gradient_hooks is not None and gradient_hooks.is_any) or _needs_others(trainer)


def _needs_others(trainer: Trainer) -> bool:
    """Whether what Lightning does itself depends on the gradients of all stages."""
    if scaler_of(trainer.precision_plugin) is not None:
        return True
    if is_overridden("configure_gradient_clipping", trainer.lightning_module):
        return True
    return clips_by_norm(trainer)


def clips_by_norm(trainer: Trainer) -> bool:
    """Whether Lightning clips gradients by the norm of all."""
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    return bool(trainer.gradient_clip_val) and not by_value


def may_step_ahead(trainer: Trainer, reports: bool) -> bool:
    """Whether steps that depend on the gradients of all stages can be taken back.

    Args:
        trainer: The trainer, whose training starts.
        reports: Whether this rank says why not.
    """
    if not _needs_others(trainer):
        return False
    obstacle = _obstacle(trainer)
    if obstacle and reports:
        log.info(_WAITS, obstacle)
    return not obstacle


def _obstacle(trainer: Trainer) -> str:
    """Return why a step cannot be taken back; empty where it can."""
    (optimizer,) = trainer.optimizers
    name = type(optimizer).__name__
    if not can_keep(optimizer):
        return f"{name} is not one of torch's, and may change more than weights and its state"
    if is_watched(optimizer):
        return f"hooks run at the steps of {name}"
    if is_overridden("configure_gradient_clipping", trainer.lightning_module):
        return "configure_gradient_clipping() may look at what it has clipped"
    return ""
