"""What callbacks decide by the clock at a batch's end, where no rank waits for another.

Lightning's Timer and ``ModelCheckpoint(train_time_interval=...)`` let all ranks wait for global
rank 0's clock there, batch after batch. Who runs out of time stops all ranks by itself. To save, as
all do after the same batch, they do what global rank 0 has told them a batch before, which has come
by then, since a batch takes every rank::

    global rank 0   end of batch 7: it is time      end of batch 8: saves
    other ranks     end of batch 7: not told so     end of batch 8: told of 7, save
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_pipeoffload.processes.wrapped_hook import WrappedHook
from lightning_pipeoffload.runtime.host_group import World

_HOOK = "on_train_batch_end"


class Clocks:
    """The callbacks of a trainer that go by the clock at a batch's end.

    Args:
        trainer: The trainer; its strategy's next broadcast can be answered otherwise.
        world: All processes.
    """

    def __init__(self, trainer: Trainer, world: World) -> None:
        self._strategy: Any = trainer.strategy
        self._wrapped: list[WrappedHook] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
            if isinstance(callback, Timer):
                self._wrap(callback, bool)
            elif isinstance(callback, ModelCheckpoint):
                interval = callback._train_time_interval  # private: nothing else says it
                if interval is not None:  # of no length: after each batch, whatever the clock says
                    self._wrap(callback, _SkipsTold(world) if interval else bool)

    def _wrap(self, callback: Any, decide: Callable[[bool], bool]) -> None:
        self._wrapped.append(WrappedHook(callback, _HOOK, partial(self._run, decide)))

    def _run(
        self, decide: Callable[[bool], bool], plain: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._strategy.answer = decide
        try:
            return plain(*args, **kwargs)
        finally:
            self._strategy.answer = None

    def remove(self) -> None:
        """Give the callbacks their own hooks back."""
        for wrapped in reversed(self._wrapped):
            wrapped.remove()
        self._wrapped.clear()


class _SkipsTold:
    """Whether it is not yet time to save, by global rank 0's clock a batch before."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: Callable[[], int] | None = None

    def __call__(self, skips: bool) -> bool:
        before, self._told = self._told, self._world.start_telling(skips)
        if before is None or before():
            return True
        self._told()  # of a time that this save is for
        self._told = None
        return False
