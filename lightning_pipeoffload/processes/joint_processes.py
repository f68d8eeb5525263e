"""Processes that wait for each other and therefore end together; the replica of a process.

The base class of both strategies' processes, of a pipeline and of ``odc``.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_pipeoffload.processes.failure import (
    EXIT_SECONDS,
    SIGTERM_STATUS,
    first_line,
    status_after,
)
from lightning_pipeoffload.processes.failure_board import FailureBoard
from lightning_pipeoffload.processes.launcher import BetweenRuns, JointLauncher, LaunchedProcesses
from lightning_pipeoffload.processes.run_store import end_connections
from lightning_pipeoffload.runtime.host_group import HostGroup
from lightning_pipeoffload.runtime.mesh import ProcessGroups
from lightning_pipeoffload.runtime.transport import says_peer_lost
from lightning_pipeoffload.runtime.users_code.replaced_methods import WrappedHook
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line, in_brackets

log = logging.getLogger(__name__)

# In the environment, which a loader's workers, forked or spawned, inherit.
_RANK, _SIZE = "PIPEOFFLOAD_DATA_PARALLEL_RANK", "PIPEOFFLOAD_DATA_PARALLEL_SIZE"


def data_parallel_rank() -> int:
    """Return the replica of this process; 0 without a pipeline.

    All ranks of a pipeline, which must read the same batches, and the workers of their loaders have
    the same replica.
    """
    return int(os.environ.get(_RANK, 0))


def data_parallel_size() -> int:
    """Return the number of replicas that divide the data; 1 without a pipeline."""
    return int(os.environ.get(_SIZE, 1))


def set_replica(replica: int, num_replicas: int) -> None:
    """Set the replica of this process and of those that it starts."""
    os.environ[_RANK], os.environ[_SIZE] = str(replica), str(num_replicas)


def forget_replica() -> None:
    """Undo :func:`set_replica`."""
    for name in (_RANK, _SIZE):
        os.environ.pop(name, None)


class NeedsOthersError(RuntimeError):
    """An operation of all ranks was called on a rank that has failed."""


class JointProcesses(ParallelStrategy):
    """Ends all ranks together, when one fails or when all are done.

    Attributes:
        board: Watches for failures of other ranks; None on one rank, and between runs.
    """

    num_nodes = 1
    # Connects all processes; None before the first run.
    _world: HostGroup | None = None
    _timeout: timedelta | None = default_pg_timeout
    board: FailureBoard | None = None
    _launched: LaunchedProcesses
    _has_failed = False
    _exception_hooks: Sequence[WrappedHook] = ()
    _warns = False
    _texts: Mapping[str, str] = MappingProxyType({})  # that all ranks have broadcast
    _why_alone = "the other ranks have left the step, or are not there yet"

    @property
    def place(self) -> str:
        """The place of this rank in its plan; empty between steps."""
        return ""

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step is running."""
        return False

    @property
    def num_processes(self) -> int:
        """Processes of this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _own_trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # Collective operations; before the first run there is no other rank to wait for

    @override
    def barrier(self, name: str | None = None) -> None:
        self._refuse_alone("barrier")
        if self._world is not None:
            self._world.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        is_text = isinstance(obj, str) and src == 0
        if is_text and self.is_in_step and obj in self._texts:
            return self._texts[obj]
        self._refuse_alone("broadcast")
        found = obj if self._world is None else self._world.broadcast(obj, src)
        if is_text:
            self._texts = {**self._texts, obj: found}
        return found

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._refuse_alone("reduce_boolean_decision")
        return decision if self._world is None else self._world.agree(decision, all)

    # Start

    def _make_launcher(self) -> JointLauncher:
        """Return the launcher of this machine's ranks.

        Raises:
            ValueError: The environment does not define the ranks of other machines.
        """
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._refuse_unnamed_node()
        return JointLauncher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            self._end_together,
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
        """Watch the other processes of this machine; no process group is needed yet."""
        self._has_failed = False
        BetweenRuns.end()
        if self.world_size > 1:
            children = JointLauncher.started
            self._launched = LaunchedProcesses(self.global_rank, self.local_rank, children)
            self.board = FailureBoard(
                self.global_rank, self.world_size, self._launched, self._timeout
            )

    # Regular end

    def give_back(self) -> None:
        """Restore the user's objects; called after the run's last hook."""
        forget_replica()

    def _end_together(self) -> None:
        self.give_back()
        if self.board is not None:  # no rank ends while another one still watches it
            if self._own_trainer.received_sigterm:  # in one of the last hooks
                raise SIGTERMException
            self.board.expect_end()
            assert self._world is not None
            self._world.barrier()
            self.board.stop()
            self.board = None
            self._watch_between_runs()

    def _watch_between_runs(self, patience: float = 0.0) -> None:
        if self._launched.has_children:
            BetweenRuns(self.global_rank, self._launched, patience)

    # Failure

    def _fail(self, exception: BaseException) -> None:
        """Report an exception to the other ranks; called before callbacks get it."""
        self.give_back()
        if isinstance(exception, SIGTERMException):  # Lightning's own would end with status 0
            exception.code = SIGTERM_STATUS
        is_interrupt = isinstance(exception, KeyboardInterrupt)
        if is_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_interrupt or says_peer_lost(exception):  # this process exits before Lightning does it
            for logger in self._own_trainer.loggers:
                logger.finalize("failed")
        board, self.board = self.board, None
        if board is None:
            return
        self._has_failed = True
        if says_peer_lost(exception):
            board.blame_others(first_line(exception))  # exits
        place = self.place if isinstance(exception, Exception) else ""
        status = status_after(exception, self._own_trainer.global_step > 0)
        is_of_all = board.report(exception, place, status)
        self._break_off(is_of_all)
        self._warns = self.global_rank == 0 or not is_of_all
        self._exception_hooks = [
            WrappedHook(callback, "on_exception", self._run_alone)
            for callback in self._own_trainer.callbacks
        ]
        if isinstance(exception, SystemExit) and exception.code in (None, 0):
            exception.code = 1

    def _break_off(self, is_of_all: bool) -> None:
        """End without waiting for ranks; after an error of all ranks, another run may follow."""
        if is_of_all:
            ProcessGroups.end(has_failed=True)
            end_connections()
            self._watch_between_runs(EXIT_SECONDS)

    def fail_elsewhere(self, exception: Exception) -> None:
        """End the run because the thread that publishes metrics has failed."""
        if self.board is not None:
            self.board.fail(exception, "while publishing metrics")

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Exit with the shell's status for Ctrl-C, not with Lightning's 1.

        Raises:
            SystemExit: The exception is a Ctrl-C.
            KeyboardInterrupt: It is one in an interpreter that has forked the ranks.
        """
        hooks, self._exception_hooks = self._exception_hooks, ()
        for hook in hooks:
            hook.remove()
        launcher: Any = self.launcher
        launcher.end_exception()
        if isinstance(exception, KeyboardInterrupt):
            assert self.cluster_environment is not None
            self.cluster_environment.teardown()  # which Lightning would call after this
            raise launcher.exit_after_interrupt()

    def _run_alone(self, plain: Callable[..., None], *args: Any) -> None:
        """Run a callback's ``on_exception`` until it calls an operation of all ranks."""
        try:
            plain(*args)
        except NeedsOthersError as error:
            if self._warns:
                log.warning(str(error))
            self._warns = False

    def _refuse_alone(self, name: str) -> None:
        """Refuse an operation of all ranks in which the other ranks do not take part.

        Raises:
            NeedsOthersError: This rank has failed.
            RuntimeError: This rank is in the middle of a step.
        """
        if self._has_failed:
            raise NeedsOthersError(
                f"{name}() needs all ranks, and they stop because this one has failed: nothing can "
                f"be saved on an exception; save every so many steps"
            )
        if self.is_in_step:
            raise RuntimeError(
                f"{name}() inside a step would wait for ever: {self._why_alone}"
                f"{in_brackets(calling_line())}; call it in a hook such as on_train_batch_end"
            )
