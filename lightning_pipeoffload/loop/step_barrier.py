"""Whether all ranks wait for each other between two optimizer steps."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipeoffload.loop.hooks.gradient_hooks import GradientHooks
from lightning_pipeoffload.loop.loss_scale import scaler_of


def has_step_barrier(trainer: Trainer, gradient_hooks: GradientHooks | None) -> bool:
    """Whether no rank can end its optimizer step before it has heard of all others' gradients.

    Clipping by norm needs the norm over all stages, a loss scale has to know of every infinity, and
    a hook that may look at gradients is told of all. Clipping by value looks at each by itself. A
    hook of the user's own that clips is taken to clip by norm.

    Args:
        trainer: The trainer.
        gradient_hooks: The hooks that may look at gradients; None: there are none.
    """
    if gradient_hooks is not None and gradient_hooks.is_any:
        return True
    if scaler_of(trainer.precision_plugin) is not None:
        return True
    if is_overridden("configure_gradient_clipping", trainer.lightning_module):
        return True
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    return bool(trainer.gradient_clip_val) and not by_value
