"""The boundary between two steps, where a rank does not wait for what it learns later.

Whether a step is to be taken with clipped gradients, or not at all because a loss scale was too
large, is known when all ranks have computed theirs. Until then a rank takes its step for right and
begins the next batch; where it was wrong, the step is taken back and repeated, and so is what has
run with its weights::

    rank 0   backward | step | F0 F1 F2  [norm: clip!]  back, step', F0 F1 F2 | B0 ...
    rank 1     backward | step | F0 F1   [norm: clip!]  back, step', F0 F1    | B0 ...

A wrong guess costs those forwards and a step; a right one the copies of what a step changes. All
ranks make the same guesses. A rank at whose steps hooks have come to run waits before its own step;
the others hear of that with the norm, and all wait from the next step on.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4 (post-validation), whose
code computes the weights before from those after; not to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # private: hooks on every optimizer's step
    _global_optimizer_pre_hooks,
)

from lightning_pipeoffload.optimizers.kept_step import KeptStep, is_torchs
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.late_values import is_remote, start_reading
from lightning_pipeoffload.runtime.pending_parameters import PendingParameters
from lightning_pipeoffload.runtime.shapes.remote_tensor import GradientAge
from lightning_pipeoffload.runtime.step.autocast import outside_autocast

log = logging.getLogger(__name__)

_WAITS = "ranks wait for each other at each step from now on: hooks run at the steps of %s"


class Clipping(NamedTuple):
    """How gradients are clipped by their norm.

    Attributes:
        parameters: This rank's parameters that have a gradient.
        most: The largest norm that stays as it is.
        squares: The squared norm of each gradient that this rank counts; 0 in place of others.
    """

    parameters: Sequence[Tensor]
    most: float
    squares: Tensor

    def norm(self, squares: Tensor) -> Tensor:
        """Return the norm of all gradients, from the squares of all ranks."""
        norm = squares.sum().sqrt()
        return norm.to(self.parameters[0].dtype.to_real()) if self.parameters else norm

    def is_needless(self, norm: Tensor) -> Tensor:
        """Whether gradients of that norm over all ranks stay as they are; never where it is NaN."""
        return self.most / (norm + 1e-6) >= 1  # as torch has it

    def clip(self, norm: Tensor) -> None:
        """Clip by the norm over all ranks."""
        clip_grads_with_norm_(self.parameters, self.most, norm)


class Scaling(NamedTuple):
    """How a loss scale goes on.

    Attributes:
        found: How many infinities this rank has found, if only whether there are any; the scaler
            goes by it.
        lower: A function that lowers the scale as it was, where only other ranks have found some.
        numbers: What the scale is kept in.
    """

    found: Tensor
    lower: Callable[[], None]
    numbers: Sequence[Tensor]


class StepBoundary:
    """What a rank does at the end of a step instead of waiting.

    Attributes:
        weights: What the last step has changed, until it is known to be right.
        keeps_copies: Whether steps are taken for right, and kept so that they can be taken back.
        clips: Whether gradients will be clipped by :meth:`expect_clipping` after the loss scale.
        is_open: Whether the ranks have not met since a step that was taken for right.
        num_taken_back: How many steps were taken back.
    """

    def __init__(self, group: PipelineGroup, age: GradientAge) -> None:
        self._group = group
        self._age = age
        self.weights = PendingParameters()
        self.weights.may_wait = True
        self.is_open = self.keeps_copies = False
        self.num_taken_back = 0
        self._kept: KeptStep | None = None
        self._is_last: Callable[[], bool] = lambda: False
        self.clips: Callable[[], bool] = lambda: False
        self._was_wrong = False
        self._somebody_looks = False
        self._forget_step()

    def _forget_step(self) -> None:
        self._guesses: bool | None = None
        self._scaling: Scaling | None = None
        self._clipping: Clipping | None = None
        self._exchange: _Exchange | None = None
        self._looks = self._has_looked = False

    def open_for(self, kept: KeptStep, is_last: Callable[[], bool]) -> None:
        """Take steps for right from now on; all processes call it.

        Args:
            kept: What keeps the steps of the one optimizer.
            is_last: A function that says whether no hook runs between what clips now and the step.
        """
        self._kept, self._is_last, self.keeps_copies = kept, is_last, True
        self._group.connect_borders()

    def guesses_clipping(self) -> bool:
        """Whether the step at hand is taken for right, and nobody looks at what is not clipped."""
        return self._is_last() and self.guesses()

    def guesses(self) -> bool:
        """Whether the step at hand is taken for right; all ranks ask, and decide alike."""
        if self._guesses is None:
            self._guesses = self._decide()
        return self._guesses

    def _decide(self) -> bool:
        if self._kept is None:
            return False
        if self._somebody_looks:
            self._wait_from_now_on()
            return False
        self._looks = is_watched(self._kept.optimizer)  # on this rank, since training has begun
        self._kept.keep()
        return True

    def _wait_from_now_on(self) -> None:
        assert self._kept is not None
        if self._group.reports:
            log.info(_WAITS, type(self._kept.optimizer).__name__)
        self._kept, self.keeps_copies = None, False

    def expect_scaling(self, scaling: Scaling) -> None:
        """Find out later whether other ranks have found infinities."""
        self._scaling = scaling
        if self._looks and not self.clips():
            self._look()

    def expect_clipping(self, clipping: Clipping) -> None:
        """Find out later whether gradients are to be clipped."""
        assert self._kept is not None
        self._clipping = clipping
        if self._looks:
            self._look()
        else:
            self._kept.keep_anew()  # hooks have run since the loss scale was taken out
            self._start_exchange()

    def _look(self) -> None:
        """Wait for what the ranks have found; what follows is the step that it should be."""
        _, total = self._start_exchange().wait()
        self._has_looked = True
        if total[0]:
            assert self._scaling is not None
            self._scaling.found.fill_(1)
        if not self._is_right(total):
            self._clip(total)
            self._age.change()

    def _start_exchange(self) -> _Exchange:
        scaling, clipping = self._scaling, self._clipping
        none = torch.zeros((), device=self._group.device)
        found = none if scaling is None else scaling.found.reshape(())
        numbers = torch.stack([found, torch.full_like(none, self._looks)]).double()
        if clipping is not None:
            numbers = torch.cat([numbers, clipping.squares.to(none.device)])
        self._exchange = _Exchange(self._group, numbers)
        return self._exchange

    def end_step(self) -> None:
        """Go on without knowing, after the optimizer's step."""
        if self._guesses:
            assert self._kept is not None
            if self._exchange is None:
                self._start_exchange()
            self._kept.end_step()
            scale = () if self._scaling is None else self._scaling.numbers
            self.weights.add(self._find_out, [*self._kept.changed(), *scale])
            self.is_open = True
        else:
            self._forget_step()

    @torch.inference_mode(False)  # a hook may be in it
    def _find_out(self) -> None:
        """Wait for what the ranks have found, and mend what was wrong."""
        assert self._exchange is not None
        own, total = self._exchange.wait()
        is_right = self._is_right(total)
        if not (is_right or self._has_looked):
            with outside_autocast(self._group.device):
                self._mend(own, total)
        assert self._kept is not None
        self._somebody_looks |= bool(total[1])
        self._kept.end()
        self.num_taken_back += not is_right
        self._was_wrong = not is_right
        self._forget_step()

    def _is_right(self, total: Tensor) -> bool:
        """Whether the weights are those of a step that nobody has clipped or left out."""
        if total[0] or self._clipping is None:
            return not total[0]
        return bool(self._clipping.is_needless(self._clipping.norm(total[2:])))

    def _clip(self, total: Tensor) -> None:
        if self._clipping is not None:
            self._clipping.clip(self._clipping.norm(total[2:]))

    def _mend(self, own: Tensor, total: Tensor) -> None:
        """Have the weights that a rank has that waits."""
        assert self._kept is not None
        copies = self._group.replicas.pending
        copies.settle()  # they would overwrite what is put back
        if not total[0]:
            self._kept.repeat(partial(self._clip, total))
            self._age.change()
            copies.settle()  # of the step that is right, for which nobody waits after this
        elif not own[0]:  # else neither the optimizer nor the scale has gone on
            assert self._scaling is not None
            self._kept.take_back()
            self._scaling.lower()

    def settle(self) -> bool:
        """Have the right weights; returns whether those since the step were others.

        All ranks call it, before they run what cannot be taken back.
        """
        self.weights.settle()
        was_wrong, self._was_wrong, self.is_open = self._was_wrong, False, False
        return was_wrong

    def forget(self) -> None:
        """Find out nothing more, after an error."""
        self.weights.forget()
        self._kept, self.is_open = None, False


class _Exchange:
    """Numbers of which all ranks want the sum, and do not wait for it."""

    def __init__(self, group: PipelineGroup, numbers: Tensor) -> None:
        self._group = group
        self._read = start_reading(numbers)
        self._total: Callable[[], Tensor] | None = None
        self._found: tuple[Tensor, Tensor] | None = None
        if not is_remote(numbers):  # an accelerator has yet to compute them
            self._total = self._start()

    def _start(self) -> Callable[[], Tensor]:
        self._own = self._read()
        return self._group.start_adding(self._own.clone())

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return this rank's numbers, and the sums."""
        if self._found is None:
            total = self._start() if self._total is None else self._total
            self._found = self._own, total()
        return self._found


def is_watched(optimizer: Optimizer) -> bool:
    """Whether more than a step of torch's runs between a step and its closure, or after it."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return (
        bool(of_all) or not is_torchs(optimizer) or any(len(registered) > 1 for registered in hooks)
    )
