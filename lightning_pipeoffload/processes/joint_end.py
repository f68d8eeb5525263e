"""How the processes of a run watch each other, and end together.

What strategies have in common whose ranks wait for each other: those of a pipeline, and those that
communicate on demand.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta

from lightning.pytorch import Callback
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_pipeoffload.processes.between_runs import BetweenRuns
from lightning_pipeoffload.processes.data_parallel import forget_replica
from lightning_pipeoffload.processes.exception_hooks import ExceptionHooks, NeedsOthersError
from lightning_pipeoffload.processes.failure_board import FailureBoard
from lightning_pipeoffload.processes.failure_cause import (
    SIGINT_STATUS,
    SIGTERM_STATUS,
    first_line,
    status_after,
)
from lightning_pipeoffload.processes.launcher import JointLauncher
from lightning_pipeoffload.processes.siblings import LaunchedProcesses
from lightning_pipeoffload.runtime.transport import says_peer_lost


class JointEnd(ParallelStrategy):
    """Lets every rank end when one fails, and leave when all are done."""

    num_nodes = 1
    _timeout: timedelta | None = default_pg_timeout
    _board: FailureBoard | None = None
    _has_failed = False
    _has_broken_off = False
    _launched: LaunchedProcesses
    _exception_hooks: ExceptionHooks | None = None

    @property
    def place(self) -> str:
        """Where in its work this rank is; empty between steps."""
        return ""

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step is running right now."""
        return False

    @property
    def num_processes(self) -> int:
        """Processes of this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    def meet(self) -> None:
        """Wait for all ranks.

        Raises:
            NotImplementedError: A strategy has no way to.
        """
        raise NotImplementedError

    def _make_launcher(self) -> JointLauncher:
        """Return what starts the ranks of this machine.

        Raises:
            ValueError: Nothing says where the ranks of other machines are.
        """
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._refuse_unnamed_node()
        return JointLauncher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            self._leave_together,
            self._fail,
        )

    def _refuse_unnamed_node(self) -> None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys():
            missing.append("NODE_RANK")
        if self.num_nodes > 1 and missing:
            raise ValueError(
                f"num_nodes={self.num_nodes}, but nothing has started this process as one of a "
                f"cluster's; start the script with srun or torchrun, or once on every node with "
                f"{', '.join(missing)} set"
            )

    def _watch(self) -> None:
        """Begin to watch the other processes of this machine; no process group is needed yet."""
        self._has_failed = False
        BetweenRuns.end()
        if self.world_size > 1:
            self._launched = LaunchedProcesses(
                self.global_rank, self.local_rank, JointLauncher.started
            )
            self._board = FailureBoard(
                self.global_rank, self.world_size, self._launched, self._timeout
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Let a Ctrl-C end with a shell's status, not with Lightning's 1; all else is told by now.

        Raises:
            SystemExit: The exception is a Ctrl-C.
        """
        if self._exception_hooks is not None:
            self._exception_hooks.give_back()
            self._exception_hooks = None
        if isinstance(exception, KeyboardInterrupt):
            raise SystemExit(SIGINT_STATUS)

    def give_back(self) -> None:
        """Leave the user's objects as they were; called after the run's last hook."""
        forget_replica()

    def _fail(self, exception: BaseException) -> None:
        self.give_back()
        if isinstance(exception, SIGTERMException):  # Lightning's own would end with status 0
            exception.code = SIGTERM_STATUS
        is_interrupt = isinstance(exception, KeyboardInterrupt)
        if is_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_interrupt or says_peer_lost(exception):  # Lightning will not come to it
            self._finalize_loggers()
        board, self._board = self._board, None
        if board is not None:
            self._has_failed = True
            is_of_all = self._tell(board, exception)
            self._break_off(is_of_all)
            says = self.global_rank == 0 or not is_of_all
            self._exception_hooks = ExceptionHooks(self._callbacks, says)
            if isinstance(exception, SystemExit) and exception.code in (None, 0):
                exception.code = 1

    @property
    def _callbacks(self) -> list[Callback]:
        assert self.lightning_module is not None
        callbacks: list[Callback] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined] # set at run time
        return callbacks

    def _refuse_after_failure(self, name: str) -> None:
        """Refuse what needs all ranks where this one has failed, and so nobody comes to it."""
        if self._has_failed:
            raise NeedsOthersError(
                f"{name}() needs all ranks, and they stop because this one has failed: nothing can "
                f"be saved on an exception; save every so many steps"
            )

    def _fail_elsewhere(self, exception: Exception) -> None:
        """End the run because of what the thread that publishes metrics has met."""
        if self._board is not None:
            self._board.fail(exception, "while publishing metrics")

    def _break_off(self, is_of_all: bool) -> None:
        """Wait for nobody any more; where every rank has raised the same another run may follow."""
        if is_of_all:
            self._has_broken_off = True
            self._rest()

    def _rest(self) -> None:
        if self._launched.has_children:
            BetweenRuns(self.global_rank, self._launched)

    def _tell(self, board: FailureBoard, exception: BaseException) -> bool:
        if says_peer_lost(exception):
            board.stop_because_of_others(first_line(exception))
        place = self.place if isinstance(exception, Exception) else ""
        assert self.lightning_module is not None
        has_trained = self.lightning_module.trainer.global_step > 0
        return board.report(exception, place, status_after(exception, has_trained))

    def _finalize_loggers(self) -> None:
        assert self.lightning_module is not None
        for logger in self.lightning_module.trainer.loggers:
            logger.finalize("failed")

    def _leave_together(self) -> None:
        self.give_back()
        if self._board is not None:  # nobody leaves while another still watches
            assert self.lightning_module is not None
            if self.lightning_module.trainer.received_sigterm:  # in one of the last hooks
                raise SIGTERMException
            self._board.expect_end()
            self.meet()
            self._board.stop()
            self._board = None
            self._rest()
