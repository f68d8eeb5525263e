"""Hooks of an epoch's end, whose logged values the next hook may decide on.

Every rank runs every hook, as under any strategy. What one logs counts as it is on the root, so the
root publishes after each.
"""

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

_KINDS = ("train", "validation", "test", "predict")
_EPOCH_END = (
    *(f"on_{kind}_epoch_end" for kind in _KINDS),
    *(f"on_{kind}_end" for kind in (*_KINDS, "fit")),
)
# Each with a message of its own, which all ranks have to take.
_BATCH_END = tuple(f"on_{kind}_batch_end" for kind in _KINDS)


class EndHooks:
    """The hooks at epochs' ends of a module and of a trainer's callbacks.

    Args:
        trainer: The trainer whose module and callbacks have the hooks.
        tick: A function that is called after each of them.
    """

    def __init__(self, trainer: Trainer, tick: Callable[[], None]) -> None:
        self._tick = tick
        found = [
            (owner, hook) for owner in _owners(trainer) for hook in _users_hooks(owner, _EPOCH_END)
        ]
        module = trainer.lightning_module
        if not is_users_hook(module, "on_train_epoch_end"):
            # After it callbacks decide on what other callbacks have logged.
            found.append((module, "on_train_epoch_end"))
        self._wrapped = [WrappedHook(owner, hook, self._run) for owner, hook in found]

    def _run(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        finally:
            self._tick()

    def remove(self) -> None:
        """Give the module and the callbacks their own hooks back."""
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped.clear()


def refuse_other_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that are not those of global rank 0; all ranks call it.

    Raises:
        ValueError: This rank has others; it raises there alone.
    """
    mine = [type(owner).__qualname__ for owner in _owners(trainer)]
    refuse_others(
        trainer, mine, "run hooks at the end of batches and epochs together, in one order"
    )


def _owners(trainer: Trainer) -> list[Any]:
    """Return the module, and the callbacks with hooks of the user's at ends."""
    module, *callbacks = owners_of_hooks(trainer)
    ends = (*_BATCH_END, *_EPOCH_END)
    return [module, *(callback for callback in callbacks if _users_hooks(callback, ends))]


def _users_hooks(owner: object, hooks: tuple[str, ...]) -> list[str]:
    return [hook for hook in hooks if is_users_hook(owner, hook)]
