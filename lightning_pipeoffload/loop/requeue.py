"""Lightning's requeueing under Slurm, after a step that all ranks agree on.

Lightning saves inside the signal handler, while the ranks of a pipeline are in different actions.
Here the handler sets a flag, and the threads that watch for failures pass it on, whatever their
ranks are doing. Each publishes after which step its own rank will ask; all save after the last of
these steps, which no rank can have passed.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, TypeGuard

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import (  # type: ignore[attr-defined] # exported at run time
    HashStore,
    Store,
)

from lightning_pipeoffload.processes import print_error_line
from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.comm import PipelineGroup

_WANTED = "requeue/wanted"
_STEP = "requeue/step/"


class Requeue:
    """One rank's part in saving and requeueing, which a fit does once."""

    def __init__(self, trainer: Trainer, environment: SLURMEnvironment, at_end: ExitStack) -> None:
        self._trainer, self._environment = trainer, environment
        connector = trainer._signal_connector
        # Private: Lightning's handler under Slurm, which saves there and then.
        self._save_now: Any = partial(type(connector)._slurm_sigusr_handler_fn, connector)
        at_end.enter_context(replaced(connector, "_slurm_sigusr_handler_fn", self.record_signal))
        self._steps = [f"{_STEP}{rank}" for rank in range(trainer.world_size)]
        self._has_signal = False
        self._asks = False
        self._is_agreed = threading.Event()
        self._last_step = 0
        self._is_over = False

    def record_signal(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal; Python calls it as the handler."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            if self._trainer.is_global_zero:
                print_error_line(f"signal {signum} is ignored: only a fit is saved and requeued")
            return
        self._has_signal = True
        if len(self._steps) == 1:
            self.poll(HashStore())

    def poll(self, store: Store) -> str | None:
        """Pass the signal on, and receive it; the thread that watches for failures calls it."""
        if self._has_signal:
            store.set(_WANTED, "")
        if not self._asks and store.check([_WANTED]):
            self._asks = True  # first: the step that runs may end before it is counted
            store.set(self._steps[self._trainer.global_rank], str(self._trainer.global_step + 1))
        if self._asks and not self._is_agreed.is_set() and store.check(self._steps):
            self._last_step = max(int(store.get(key)) for key in self._steps)
            self._is_agreed.set()
        return None

    def requeue_after_agreed_step(self) -> None:
        """Save and requeue if a batch's optimizer step, which is over, is the one agreed on."""
        if self._asks and self._trainer.training and not self._is_over:
            self._is_agreed.wait()  # for those threads, not for other ranks' work
            if self._trainer.global_step >= self._last_step:
                self._save_and_requeue()

    def requeue_if_requested(self, group: PipelineGroup) -> None:
        """Save and requeue if that is still to be done; all ranks call it after the last batch."""
        is_wanted = self._has_signal or self._asks
        if group.world.agree(is_wanted and not self._is_over, unanimous=False):
            self._save_and_requeue()
        self._is_over = True

    def _save_and_requeue(self) -> None:
        self._is_over = True
        self._save_now(self._environment.requeue_signal, None)


def requeues(environment: ClusterEnvironment | None) -> TypeGuard[SLURMEnvironment]:
    """Whether Slurm has started the processes, and a signal of it saves and requeues the run."""
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue
