"""Hooks that may read gradients: before each, the ranks exchange the sizes of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_pipeoffload.loop.hooks.users_hooks import (
    is_users_hook,
    owners_of_hooks,
    refuse_others,
)
from lightning_pipeoffload.processes.wrapped_hook import WrappedHook

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class GradientHooks:
    """The user's overrides of the three hooks that Lightning has for gradients.

    Args:
        trainer: The trainer whose module and callbacks have the hooks.
        share: A function that exchanges the sizes of all gradients; all ranks call it together.

    Raises:
        ValueError: This rank has other such hooks than global rank 0.
    """

    def __init__(self, trainer: Trainer, share: Callable[[], None]) -> None:
        found = [
            (owner, hook)
            for owner in owners_of_hooks(trainer)
            for hook in _HOOKS
            if hasattr(owner, hook) and is_users_hook(owner, hook)
        ]
        names = [f"{type(owner).__qualname__}.{hook}" for owner, hook in found]
        refuse_others(trainer, names, "compare gradients before the hooks that may read them")

        def share_first(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            share()
            return plain(*args, **kwargs)

        self._wrapped = [WrappedHook(owner, hook, share_first) for owner, hook in found]

    @property
    def is_any(self) -> bool:
        """Whether there is such a hook."""
        return bool(self._wrapped)

    def remove(self) -> None:
        """Give the module and the callbacks their own hooks back."""
        for wrapped in reversed(self._wrapped):
            wrapped.remove()
        self._wrapped.clear()
