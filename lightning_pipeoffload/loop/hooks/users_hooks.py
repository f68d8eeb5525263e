"""Which hooks of a module and of a trainer's callbacks are the user's own.

What Lightning and this package ship with is known to do on every rank what it does on one; a user's
hook may look at gradients of which some are still to come, or at what is on another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer

# Of this package what the user is given to train are demos, which are as a user's own.
_KNOWN = ("lightning.", "lightning_pipeoffload.callbacks.")
_BETWEEN_BATCHES = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
)


def owners_of_hooks(trainer: Trainer) -> list[Any]:
    """Return the module and, after it, the callbacks."""
    return [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined] # set at run time


def is_users_hook(owner: object, hook: str) -> bool:
    """Whether the user has written what ``owner`` does at a hook, in a class or on the instance."""
    return not getattr(getattr(owner, hook), "__module__", "").startswith(_KNOWN)


def hooks_between_batches(trainer: Trainer) -> tuple[str, ...]:
    """List the user's hooks that run between batches whose gradients add up.

    They may look at gradients, or change parameters, that backwards still to come will use.
    """
    return users_hooks(trainer, _BETWEEN_BATCHES)


def users_hooks(trainer: Trainer, hooks: Sequence[str]) -> tuple[str, ...]:
    """List those of some hooks that the user has written, for a module, its data or a callback."""
    data = trainer.datamodule  # type: ignore[attr-defined] # set at run time
    return tuple(
        f"{type(owner).__name__}.{hook}"
        for owner in (*owners_of_hooks(trainer), data)
        for hook in hooks
        if hasattr(owner, hook) and is_users_hook(owner, hook)
    )


def refuse_others(trainer: Trainer, mine: list[str], what_ranks_do: str) -> None:
    """Refuse other hooks than those of global rank 0; all ranks call it.

    Args:
        trainer: The trainer of this rank.
        mine: The names of this rank's hooks, or of their owners, in their order.
        what_ranks_do: What ranks do that needs the same ones.

    Raises:
        ValueError: This rank has others.
    """
    root: list[str] = trainer.strategy.broadcast(mine)
    if mine != root:
        raise ValueError(
            f"the ranks of a pipeline {what_ranks_do}; these are those of "
            f"{', '.join(root) or 'none'} on global rank 0, of {', '.join(mine) or 'none'} on "
            f"global rank {trainer.global_rank}; give every rank the same module and callbacks"
        )
