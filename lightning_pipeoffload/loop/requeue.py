"""Lightning's requeueing under Slurm, after a step that all ranks agree on.

Lightning saves inside the signal handler, wherever a rank happens to be, and the ranks of a
pipeline are never at the same place. Here the handler leaves a note, and the threads that look for
failures pass it on, whatever their ranks are doing. Each says after which step its own rank is
going to ask; all save after the last of these steps, which no rank can have passed.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import (  # type: ignore[attr-defined] # exported at run time
    HashStore,
    Store,
)

from lightning_pipeoffload.metrics.shared_metrics import SharedMetricsConnector
from lightning_pipeoffload.processes.failure_board import FailureBoard
from lightning_pipeoffload.processes.last_words import say
from lightning_pipeoffload.runtime.groups import PipelineGroup

_WANTED = "requeue/wanted"
_STEP = "requeue/step/"


class Requeue:
    """One rank's part in saving and requeueing, which a fit does once.

    Args:
        trainer: The trainer whose fit or evaluation it is.
        environment: Slurm's environment, which says which signal it is.
    """

    def __init__(self, trainer: Trainer, environment: SLURMEnvironment) -> None:
        self._trainer = trainer
        self._environment = environment
        self._steps = [f"{_STEP}{rank}" for rank in range(trainer.world_size)]
        self._has_signal = False
        self._asks = False
        self._is_agreed = threading.Event()
        self._last_step = 0
        self._is_over = False

    def note_signal(self, signum: int, frame: FrameType | None) -> None:
        """Note that the signal has come; called by Python as its handler."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            if self._trainer.is_global_zero:
                say(f"signal {signum} is ignored: only a fit is saved and requeued")
            return
        self._has_signal = True
        if len(self._steps) == 1:
            self.look(HashStore())

    def look(self, store: Store) -> str | None:
        """Tell the other ranks of the signal, and hear of it; in a thread of its own.

        Args:
            store: The run's store.
        """
        if self._has_signal:
            store.set(_WANTED, "")
        if not self._asks and store.check([_WANTED]):
            self._asks = True  # first: the step that is under way may end before it is counted
            store.set(self._steps[self._trainer.global_rank], str(self._trainer.global_step + 1))
        if self._asks and not self._is_agreed.is_set() and store.check(self._steps):
            self._last_step = max(int(store.get(key)) for key in self._steps)
            self._is_agreed.set()
        return None

    def end_batch(self) -> None:
        """Save and requeue if a batch's optimizer step, which is over, is the one agreed on."""
        if self._asks and self._trainer.training and not self._is_over:
            self._is_agreed.wait()  # for those threads, never for a rank's work
            if self._trainer.global_step >= self._last_step:
                self._save_and_requeue()

    def end_training(self, group: PipelineGroup) -> None:
        """Save and requeue if that is still to be done; all ranks call it after the last batch."""
        is_told = self._has_signal or self._asks
        if group.world.agree(is_told and not self._is_over, unanimous=False):
            self._save_and_requeue()
        self._is_over = True

    def _save_and_requeue(self) -> None:
        self._is_over = True
        connector = self._trainer._signal_connector
        # Private: what Lightning does in its handler.
        save_and_requeue: Any = type(connector)._slurm_sigusr_handler_fn
        save_and_requeue(connector, self._environment.requeue_signal, None)


def join_requeue(
    trainer: Trainer,
    environment: ClusterEnvironment | None,
    connector: SharedMetricsConnector,
    board: FailureBoard | None,
) -> Requeue | None:
    """Take the place of Lightning's handler, if there is going to be one.

    Args:
        trainer: The trainer whose loops are joined already.
        environment: The environment that started the processes.
        connector: The trainer's connector of metrics.
        board: The board whose thread passes notes on; None with one rank.
    """
    if not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
        return None
    requeue = Requeue(trainer, environment)
    # Private: Lightning's own saves there and then.
    trainer._signal_connector._slurm_sigusr_handler_fn = (  # type: ignore[method-assign]
        requeue.note_signal  # type: ignore[assignment]
    )
    connector.at_batch_end = (*connector.at_batch_end, requeue.end_batch)
    if board is not None:
        board.also_look = (*board.also_look, requeue.look)
    return requeue
