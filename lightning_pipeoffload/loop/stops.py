"""What stops all ranks, and what they do by global rank 0's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_pipeoffload.loop.exchange import Exchange
from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.users_code import WrappedHook


class JointStop:
    """``trainer.should_stop`` of any rank, for all ranks.

    A stop that all ranks set takes effect after this batch, one that some ranks set after the next:
    at the end of a batch each rank sends whether it wants to stop, and reads the vectors of the
    batch before. Only a rank that wants to stop waits for those of this batch, since all may want
    it. A stop that a step sets after the blocks, on the last stage, reaches the others before they
    end that batch.
    """

    def __init__(self, trainer: Trainer, exchange: Exchange, is_root: bool) -> None:
        self._trainer, self._exchange, self._is_root = trainer, exchange, is_root
        self._wants = self._any_stopped = False
        self._num_steps = 0

    def start_batch(self, num_microbatches: int) -> None:
        self.wants_stop()  # of the same batch, if an optimizer evaluates it again
        self._num_steps = num_microbatches if self._is_root else 0
        if not self._is_root:
            self._exchange.start_root_broadcast()

    def count_ended_step(self) -> None:
        """Count a microbatch whose step has come to its end; called on the last stage."""
        self._num_steps -= 1
        if self._num_steps == 0:
            self._exchange.start_root_broadcast(self._wants or self._trainer.should_stop)

    def wants_stop(self) -> bool:
        """Whether this rank wants to stop, or the last stage's step did."""
        if self._exchange.receive_root_broadcast():
            self._wants = True
        return self._wants or self._trainer.should_stop

    def record(self, any_stops: bool) -> None:
        """Count at the batch's end what was read in the middle of it."""
        self._any_stopped = self._any_stopped or any_stops

    def end_batch(self, wants: bool, any_stopped: bool) -> None:
        """Set ``should_stop`` as all ranks do.

        Args:
            wants: What this rank has sent after this batch.
            any_stopped: Whether any rank wanted to stop after the batch before.
        """
        any_stopped, self._any_stopped = any_stopped or self._any_stopped, False
        stops = any_stopped or (wants and self._exchange.all_ranks_want_stop())
        self._trainer.should_stop = stops
        self._wants = wants and not stops

    def set_should_stop(self, any_stops: bool) -> None:
        """Set ``should_stop`` where ranks have waited for each other."""
        self._trainer.should_stop = any_stops
        self._wants = self._any_stopped = False


class RankZeroClocks:
    """Saves and validates by global rank 0's clock, a batch after it is due.

    Lightning's ``ModelCheckpoint(train_time_interval=...)`` makes all ranks wait for global rank 0
    at each batch, and a ``val_check_interval`` of time reads a clock on each rank::

        global rank 0   end of batch 7: its clock is due    end of batch 8: saves
        other ranks     end of batch 7: not due             end of batch 8: 7 was due, save

    A Timer stops its own rank, and :class:`JointStop` the others.
    """

    _OF_VALIDATION = 1

    def __init__(self, trainer: Trainer, exchange: Exchange) -> None:
        self._trainer: Any = trainer
        self._exchange = exchange
        self._due = 0
        self._validates = False
        self._wrapped: list[WrappedHook] = []
        bit = self._OF_VALIDATION
        for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
            if isinstance(callback, Timer):
                self._intercept_broadcast(callback, bool)
            elif isinstance(callback, ModelCheckpoint):
                interval = callback._train_time_interval  # private: nothing else says it
                bit *= 2
                if interval:
                    self._intercept_broadcast(callback, partial(self._skips, bit))
                elif interval is not None:  # of no length: after each batch
                    self._intercept_broadcast(callback, bool)

    def _intercept_broadcast(self, callback: Any, answer: Callable[[bool], bool]) -> None:
        """Answer the broadcast in a callback's hook without the other ranks."""

        def run(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._trainer.strategy.answering_next_broadcast(answer):
                return plain(*args, **kwargs)

        self._wrapped.append(WrappedHook(callback, "on_train_batch_end", run))

    def _skips(self, bit: int, skips: bool) -> bool:
        return not self._is_due(bit, not skips)

    def _is_due(self, bit: int, is_due_here: bool) -> bool:
        """Whether a clock of global rank 0 was due after the batch before."""
        if self._exchange.wait_for_flags().due_clocks & bit:
            self._due &= ~bit
            return True
        if is_due_here and self._trainer.is_global_zero:
            self._due |= bit
        return False

    def update_due_clocks(self) -> int:
        """Decide whether to validate; return which clocks are due, on global rank 0, else none."""
        interval = self._trainer._val_check_time_interval  # private, and the other: as Lightning
        if interval is not None:
            is_due = time.monotonic() - self._trainer._last_val_time >= interval
            # An interval of no length is over on all ranks.
            self._validates = not interval or self._is_due(self._OF_VALIDATION, is_due)
        return self._due

    def deciding(self) -> AbstractContextManager[None]:
        """Lightning decides in here whether to validate, and asks no clock."""
        # No time is as long as NaN.
        interval = -math.inf if self._validates else math.nan
        return replaced(self._trainer, "_val_check_time_interval", interval)

    def remove(self) -> None:
        while self._wrapped:
            self._wrapped.pop().remove()
