"""A strategy whose ranks wait for each other, and therefore end together."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_pipeoffload.processes.failure import SIGTERM_STATUS, exit_status, first_line
from lightning_pipeoffload.processes.launcher import JointLauncher
from lightning_pipeoffload.processes.processes import Processes
from lightning_pipeoffload.processes.replica import forget_replica
from lightning_pipeoffload.runtime.comm import is_lost_peer_error
from lightning_pipeoffload.runtime.users_code import WrappedHook, in_brackets, running_user_line

log = logging.getLogger(__name__)


class CollectiveAfterFailureError(RuntimeError):
    """An operation of all ranks was called on a rank that has failed."""


class JointStrategy(ParallelStrategy):
    """Ends all ranks together, when one fails or when all are done; for pipelines and ``odc``.

    Attributes:
        processes: This rank's connections to the others.
    """

    num_nodes = 1
    _timeout: timedelta | None = default_pg_timeout
    _steps_later = False  # whether the optimizer steps after a later batch
    _has_failed = False
    _exception_hooks: Sequence[WrappedHook] = ()
    _warns = False
    _texts: Mapping[str, str] = MappingProxyType({})  # that all ranks have broadcast
    _why_alone = "the other ranks have left the step, or are not there yet"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.processes = Processes()
        super().__init__(*args, **kwargs)

    @property
    def running_action(self) -> str:
        """The action of its plan that this rank runs; empty between steps."""
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
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    # Collective operations; before the first run there is no other rank to wait for

    @override
    def barrier(self, name: str | None = None) -> None:
        self._refuse_lone_collective("barrier")
        if self.processes.world is not None:
            self.processes.world.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        is_text = isinstance(obj, str) and src == 0
        if is_text and self.is_in_step and obj in self._texts:
            return self._texts[obj]
        self._refuse_lone_collective("broadcast")
        world = self.processes.world
        received = obj if world is None else world.broadcast(obj, src)
        if is_text:
            self._texts = {**self._texts, obj: received}
        return received

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._refuse_lone_collective("reduce_boolean_decision")
        world = self.processes.world
        return decision if world is None else world.agree(decision, all)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning trains in here on every batch after which it does not step."""
        self._steps_later = True
        try:
            yield
        finally:
            self._steps_later = False

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
        self._has_failed = False
        self.processes.watch(self.global_rank, self.local_rank, self.world_size, self._timeout)

    # Regular end

    def restore_user_objects(self) -> None:
        """Restore the user's objects; called after the run's last hook."""
        forget_replica()

    def _end_together(self) -> None:
        self.restore_user_objects()
        is_connected = self.processes.board is not None
        if is_connected and self._trainer.received_sigterm:  # in one of the last hooks
            raise SIGTERMException
        self.processes.end()

    # Failure

    def _fail(self, exception: BaseException) -> None:
        """Report an exception to the other ranks; called before callbacks get it."""
        self.restore_user_objects()
        if isinstance(exception, SIGTERMException):  # Lightning's own would end with status 0
            exception.code = SIGTERM_STATUS
        is_interrupt = isinstance(exception, KeyboardInterrupt)
        if is_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # This process exits before Lightning does it.
        if is_interrupt or is_lost_peer_error(exception):
            for logger in self._trainer.loggers:
                logger.finalize("failed")
        board = self.processes.pop_board()
        if board is None:
            return
        self._has_failed = True
        if is_lost_peer_error(exception):
            board.exit_for_lost_rank(first_line(exception))  # exits
        action = self.running_action if isinstance(exception, Exception) else ""
        status = exit_status(exception, self._trainer.global_step > 0)
        is_of_all = board.report(exception, action, status)
        self._end_if_common_error(is_of_all)
        self._warns = self.global_rank == 0 or not is_of_all
        self._exception_hooks = [
            WrappedHook(callback, "on_exception", self._run_until_collective)
            for callback in self._trainer.callbacks
        ]
        if isinstance(exception, SystemExit) and exception.code in (None, 0):
            exception.code = 1

    def _end_if_common_error(self, is_of_all: bool) -> None:
        """End without waiting for ranks; after an error of all ranks, another run may follow."""
        if is_of_all:
            self.processes.prepare_run_after_common_error()

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
        launcher.restore_exception_hooks()
        if isinstance(exception, KeyboardInterrupt):
            assert self.cluster_environment is not None
            self.cluster_environment.teardown()  # which Lightning would call after this
            raise launcher.interrupt_exception()

    def _run_until_collective(self, plain: Callable[..., None], *args: Any) -> None:
        """Run a callback's ``on_exception`` until it calls an operation of all ranks."""
        try:
            plain(*args)
        except CollectiveAfterFailureError as error:
            if self._warns:
                log.warning(str(error))
            self._warns = False

    def _refuse_lone_collective(self, name: str) -> None:
        """Refuse an operation of all ranks in which the other ranks do not take part.

        Raises:
            CollectiveAfterFailureError: This rank has failed.
            RuntimeError: This rank is in the middle of a step.
        """
        if self._has_failed:
            raise CollectiveAfterFailureError(
                f"{name}() needs all ranks, and they stop because this one has failed: nothing can "
                f"be saved on an exception; save every so many steps"
            )
        if self.is_in_step:
            raise RuntimeError(
                f"{name}() inside a step would wait for ever: {self._why_alone}"
                f"{in_brackets(running_user_line())}; call it in a hook such as on_train_batch_end"
            )
