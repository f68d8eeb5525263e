"""Hooks that may look at gradients: before each, the ranks tell each other what they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_pipeoffload.loop.hooks.gradient_readers import may_read_gradients
from lightning_pipeoffload.loop.hooks.users_hooks import (
    is_users_hook,
    owners_of_hooks,
    refuse_others,
)
from lightning_pipeoffload.loop.hooks.wrapped_hook import WrappedHook

# In the middle of the plan, where the ranks are at different places: what these look at has been
# there since the batch before.
_IN_THE_PLAN = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
_BETWEEN_STEPS = (
    "on_train_batch_start", "on_after_backward", "on_before_optimizer_step",
    "configure_gradient_clipping", "lr_scheduler_step", "on_train_batch_end",
    "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end",
    "on_train_end",
)  # fmt: skip
_OPTIMIZER_STEP = "optimizer_step"


class GradientHooks:
    """The hooks of a module and of a trainer's callbacks that may look at gradients.

    Args:
        trainer: The trainer whose module and callbacks have the hooks.
        share: What tells all ranks of all gradients; they call it together.

    Raises:
        ValueError: This rank has other such hooks than global rank 0.
    """

    def __init__(self, trainer: Trainer, share: Callable[[], None]) -> None:
        self._share = share
        found = [
            (owner, hook)
            for owner in owners_of_hooks(trainer)
            for hook in (*_IN_THE_PLAN, *_BETWEEN_STEPS, _OPTIMIZER_STEP)
            if hasattr(owner, hook)
            and is_users_hook(owner, hook)
            and may_read_gradients(owner, hook, trainer.lightning_module)
        ]
        names = [f"{type(owner).__qualname__}.{hook}" for owner, hook in found]
        refuse_others(trainer, names, "compare gradients before the hooks that may look at them")
        self._before_plan = any(hook in _IN_THE_PLAN for _, hook in found)
        self._wrapped = [
            WrappedHook(owner, hook, self._step if hook == _OPTIMIZER_STEP else self._share_first)
            for owner, hook in found
            if hook not in _IN_THE_PLAN
        ]

    @property
    def is_any(self) -> bool:
        """Whether there is such a hook."""
        return self._before_plan or bool(self._wrapped)

    def start_batch(self) -> None:
        """Let hooks in the middle of the plan that comes next know of the gradients."""
        if self._before_plan:
            self._share()

    def remove(self) -> None:
        """Give the module and the callbacks their own hooks back."""
        for wrapped in reversed(self._wrapped):
            wrapped.remove()
        self._wrapped.clear()

    def _share_first(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._share()
        return plain(*args, **kwargs)

    def _step(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step, whose closure has to run before the gradients are there."""
        given = {name: self._sharing(value) for name, value in kwargs.items()}
        return plain(*map(self._sharing, args), **given)

    def _sharing(self, value: Any) -> Any:
        if not callable(value):
            return value

        def closure() -> Any:
            result = value()
            self._share()
            return result

        return closure
