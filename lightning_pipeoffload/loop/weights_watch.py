"""Between two batches, weights that a step has changed may not be final yet.

Those that replicas share out may still be on their way, and those of a step that has not waited for
the norm of all gradients may be taken back.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # private: hooks on every optimizer's step
    _global_optimizer_pre_hooks,
)

from lightning_pipeoffload.loop.hooks.users_hooks import users_hooks
from lightning_pipeoffload.optimizers.kept_step import is_torchs
from lightning_pipeoffload.runtime.weights_under_way import SettlingMode, WeightsUnderWay

# From the step of one batch to the first F of the next.
_HOOKS = (
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "on_exception",
)  # fmt: skip


class WeightsWatch:
    """Lets weights become final while the next batch begins.

    What Lightning, its callbacks, the user's hooks and the data do between batches is watched: a
    call of torch that is given such a weight waits for it.

    Args:
        *weights: The weights that are not final yet.
    """

    def __init__(self, *weights: WeightsUnderWay) -> None:
        self._weights = weights
        self._mode = SettlingMode(*weights)
        self._is_watching = False

    def start(self) -> None:
        """Watch, from the end of a step on."""
        if any(self._weights) and not self._is_watching:
            self._mode.start()
            self._is_watching = True

    def stop(self) -> None:
        """Watch no longer: a batch begins."""
        if self._is_watching:
            self._mode.stop()
            self._is_watching = False


def may_travel(trainer: Trainer) -> bool:
    """Whether weights may come while the next batch begins: no code of the user's runs meanwhile.

    Args:
        trainer: The trainer, whose training starts.
    """
    return not (users_hooks(trainer, _HOOKS) or any(map(is_watched, trainer.optimizers)))


def is_watched(optimizer: Optimizer) -> bool:
    """Whether more than a step of torch's runs between a step and its closure, or after it."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return (
        bool(of_all) or not is_torchs(optimizer) or any(len(registered) > 1 for registered in hooks)
    )
