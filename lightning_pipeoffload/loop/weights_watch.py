"""Between two batches, weights that a shared out step has changed may still be on their way."""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # private: hooks on every optimizer's step
    _global_optimizer_pre_hooks,
)

from lightning_pipeoffload.loop.hooks.users_hooks import users_hooks
from lightning_pipeoffload.runtime.weights_under_way import SettlingMode, WeightsUnderWay

# From the step of one batch to the first F of the next.
_HOOKS = (
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "on_exception",
)  # fmt: skip


class WeightsWatch:
    """Lets weights come while the next batch begins, unless code of the user's runs meanwhile.

    What Lightning, its callbacks and the data do between batches is watched: a call of torch that
    is given such a weight waits for it.

    Args:
        trainer: The trainer, whose training starts.
        weights: The weights that are under way.
    """

    def __init__(self, trainer: Trainer, weights: WeightsUnderWay) -> None:
        self._weights = weights
        self._mode = SettlingMode(weights)
        self._is_watching = False
        weights.may_wait = not (
            users_hooks(trainer, _HOOKS)
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or any(map(_looks_at_weights, trainer.optimizers))
        )

    def start(self) -> None:
        """Watch, from the end of a batch on."""
        if self._weights:
            self._mode.__enter__()
            self._is_watching = True

    def stop(self) -> None:
        """Watch no longer: a batch begins."""
        if self._is_watching:
            self._mode.__exit__(None, None, None)
            self._is_watching = False

    def settle(self) -> None:
        """Have all weights."""
        self.stop()
        self._weights.settle()


def _looks_at_weights(optimizer: Optimizer) -> bool:
    """Whether more than a step of torch's runs between a step and its closure, or after it."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return not is_torchs or any(len(registered) > 1 for registered in hooks)
