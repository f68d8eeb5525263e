"""Steps that are taken before it is known that they are right, and taken back where they were not.

Whether a step is to be taken with clipped gradients, or skipped because a loss scale was too large,
is known when all ranks have computed theirs. Until then a rank assumes neither, steps, and begins
the next batch; where that was wrong, it goes back, steps as it should have, and runs again what has
run with the wrong weights::

    rank 0   backward | step | F0 F1 F2  [norm: clip!]  back, step', F0 F1 F2 | B0 ...
    rank 1     backward | step | F0 F1   [norm: clip!]  back, step', F0 F1    | B0 ...

A wrong assumption costs those forwards and a step; a right one the copies of what a step changes.
All ranks assume alike. A rank at whose optimizer hooks are registered waits before its own step;
the others hear of that with the norm, and all wait from the next step on.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4 (post-validation), whose
code computes the weights before from those after; not to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # private: hooks on every optimizer's step
    _global_optimizer_pre_hooks,
)

from lightning_pipeoffload.optimizers import OptimizerSnapshot, is_torch_optimizer
from lightning_pipeoffload.runtime import is_on_accelerator, start_host_copy
from lightning_pipeoffload.runtime.comm import PendingParameters, PipelineGroup
from lightning_pipeoffload.runtime.shapes import GradientChanges

log = logging.getLogger(__name__)

_WAITS = "ranks wait for each other at each step from now on: hooks run at the steps of %s"


class Clipping(NamedTuple):
    """How gradients are clipped by their norm.

    Attributes:
        parameters: This rank's parameters that have a gradient.
        most: The largest norm that is not clipped.
        squares: The squared norm of each gradient that this rank counts; 0 in place of others.
    """

    parameters: Sequence[Tensor]
    most: float
    squares: Tensor

    def norm(self, squares: Tensor) -> Tensor:
        """Return the norm of all gradients, from the squares of all ranks."""
        norm = squares.sum().sqrt()
        return norm.to(self.parameters[0].dtype.to_real()) if self.parameters else norm

    def never_clips(self, norm: Tensor) -> Tensor:
        """Return whether clipping leaves gradients of this norm unchanged; False for NaN."""
        return self.most / (norm + 1e-6) >= 1  # as torch has it

    def clip(self, norm: Tensor) -> None:
        clip_grads_with_norm_(self.parameters, self.most, norm)


class LossScaling(NamedTuple):
    """How a loss scale goes on.

    Attributes:
        overflow: Whether this rank has found infinities; the scaler reads it.
        lower: Lowers the scale of before the step, where only other ranks have found some.
        numbers: The tensors of the scale.
    """

    overflow: Tensor
    lower: Callable[[], None]
    numbers: Sequence[Tensor]


class PostValidation:
    """Validates each step of a rank while the next batch begins; does nothing until it starts.

    Attributes:
        pending: What the last step has changed, until it is known to be right.
        is_on: Whether steps are taken before they are known to be right.
        is_open: Whether there is a step that the ranks have not validated together.
        num_taken_back: How many steps were taken back.
    """

    def __init__(self, trainer: Trainer, group: PipelineGroup, changes: GradientChanges) -> None:
        self._trainer: Any = trainer
        self._group, self._changes = group, changes
        self.pending = PendingParameters(may_wait=True)
        self.is_on = self.is_open = False
        self.num_taken_back = 0
        self._snapshot: OptimizerSnapshot | None = None
        self._was_wrong = self._any_watched = False
        self._forget_step()

    def _forget_step(self) -> None:
        self._assumes: bool | None = None
        self._scaling: LossScaling | None = None
        self._clipping: Clipping | None = None
        self._sum: _Sum | None = None
        self._is_watched = self._is_validated = False

    def start(self, snapshot: OptimizerSnapshot, over_replicas: bool) -> None:
        """Begin with the next step of the snapshot's optimizer; all processes call it.

        Args:
            snapshot: Saves what the step changes.
            over_replicas: Whether the replicas divide the gradients of the model.
        """
        self._snapshot, self.is_on = snapshot, True
        self._group.make_boundary_group(over_replicas)

    def assumes_no_clipping(self) -> bool:
        """Whether the current step runs as if no clipping were needed."""
        # Private: no public name tells the hook that runs. Others may clip before this one.
        is_last = self._trainer.lightning_module._current_fx_name == "configure_gradient_clipping"
        return self.is_on and is_last and self.steps_before_validation()

    def steps_before_validation(self) -> bool:
        """Whether the step at hand is taken before it is validated; alike on all ranks.

        The first call in a step decides, and saves what the step will change.
        """
        if self._assumes is None:
            self._assumes = self._decide()
        return self._assumes

    def _decide(self) -> bool:
        if self._snapshot is None:
            return False
        if self._any_watched:
            if self._group.is_global_zero:
                log.info(_WAITS, type(self._snapshot.optimizer).__name__)
            self._snapshot, self.is_on = None, False
            return False
        self._is_watched = runs_user_code(self._snapshot.optimizer)  # on this rank: it trains
        self._snapshot.save()
        return True

    def defer_overflow_check(self, scaling: LossScaling) -> None:
        """Find out whether other ranks have found infinities, later if no hook watches the step."""
        self._scaling = scaling
        if self._is_watched and not clips_by_norm(self._trainer):
            self._validate_now()

    def defer_clipping(self, clipping: Clipping) -> None:
        """Find out whether gradients are to be clipped, later if no hook watches the step."""
        assert self._snapshot is not None
        self._clipping = clipping
        if self._is_watched:
            self._validate_now()
        else:
            self._snapshot.save_if_changed()  # hooks have run since the loss scale was taken out
            self._start_sum()

    def _validate_now(self) -> None:
        """Wait for the sums of all ranks, and clip or skip by them; the step is right then."""
        _, total = self._start_sum().wait()
        self._is_validated = True
        if total[0]:
            assert self._scaling is not None
            self._scaling.overflow.fill_(1)
        if not self._is_valid_step(total):
            self._clip(total)
            self._changes.record()

    def _start_sum(self) -> _Sum:
        scaling, clipping = self._scaling, self._clipping
        none = torch.zeros((), device=self._group.device)
        overflow = none if scaling is None else scaling.overflow.reshape(())
        numbers = torch.stack([overflow, torch.full_like(none, self._is_watched)]).double()
        if clipping is not None:
            numbers = torch.cat([numbers, clipping.squares.to(none.device)])
        self._sum = _Sum(self._group, numbers)
        return self._sum

    def defer_validation(self) -> None:
        """Go on after the optimizer's step without knowing whether it was right."""
        if self._assumes:
            assert self._snapshot is not None
            if self._sum is None:
                self._start_sum()
            self._snapshot.record_step_changes()
            scale = () if self._scaling is None else self._scaling.numbers
            self.pending.defer_or_wait(
                self._validate, [*self._snapshot.tensors_changed_by_undo(), *scale]
            )
            self.is_open = True
        else:
            self._forget_step()

    @torch.inference_mode(False)  # a hook may be in it
    def _validate(self) -> None:
        """Wait for the sums of all ranks; take the step back and repeat it if it was wrong."""
        assert self._sum is not None
        numbers, total = self._sum.wait()
        is_right = self._is_valid_step(total)
        if not (is_right or self._is_validated):
            with torch.autocast(self._group.device.type, enabled=False):
                self._undo_and_repeat_step(numbers, total)
        assert self._snapshot is not None
        self._any_watched |= bool(total[1])
        self._snapshot.free_gradients()
        self.num_taken_back += not is_right
        self._was_wrong = not is_right
        self._forget_step()

    def _is_valid_step(self, total: Tensor) -> bool:
        """Whether the step is neither clipped nor skipped."""
        if total[0] or self._clipping is None:
            return not total[0]
        return bool(self._clipping.never_clips(self._clipping.norm(total[2:])))

    def _clip(self, total: Tensor) -> None:
        if self._clipping is not None:
            self._clipping.clip(self._clipping.norm(total[2:]))

    def _undo_and_repeat_step(self, numbers: Tensor, total: Tensor) -> None:
        assert self._snapshot is not None
        of_replicas = self._group.replicas.pending
        of_replicas.wait()  # it would overwrite what is put back
        if not total[0]:
            self._snapshot.repeat(partial(self._clip, total))
            self._changes.record()
            of_replicas.wait()  # of the step that is right, for which nobody waits after this
        elif not numbers[0]:  # else neither the optimizer nor the scale has gone on
            assert self._scaling is not None
            self._snapshot.undo()
            self._scaling.lower()

    def wait_for_validated_weights(self) -> bool:
        """Wait for the right weights; returns whether those since the step were others.

        All ranks call it, before they run what cannot be taken back.
        """
        self.pending.wait()
        was_wrong, self._was_wrong, self.is_open = self._was_wrong, False, False
        return was_wrong

    def forget(self) -> None:
        """Validate nothing more, after an error."""
        self.pending.forget()
        self._snapshot, self.is_open = None, False


class _Sum:
    """Numbers to sum over all ranks asynchronously."""

    def __init__(self, group: PipelineGroup, numbers: Tensor) -> None:
        self._group = group
        self._read = start_host_copy(numbers)
        self._total: Callable[[], Tensor] | None = None
        self._result: tuple[Tensor, Tensor] | None = None
        if not is_on_accelerator(numbers):  # an accelerator has yet to compute them
            self._total = self._start()

    def _start(self) -> Callable[[], Tensor]:
        self._numbers = self._read()
        return self._group.start_host_sum(self._numbers.clone())

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return this rank's numbers, and the sums."""
        if self._result is None:
            total = self._start() if self._total is None else self._total
            self._result = self._numbers, total()
        return self._result


def runs_user_code(optimizer: Optimizer) -> bool:
    """Whether a step runs code that is not torch's: the user's optimizer, or hooks of a step."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return (
        bool(of_all)
        or not is_torch_optimizer(optimizer)
        or any(len(registered) > 1 for registered in hooks)
    )


def clips_by_norm(trainer: Trainer) -> bool:
    """Whether Lightning clips gradients by the norm of all."""
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    return bool(trainer.gradient_clip_val) and not by_value
