"""The processes of a pipeline, as Lightning starts and ends them: what is no business of a step.

Lightning repeats this part in each of its own strategies; here it is apart, below
:class:`~lightning_pipeoffload.PipeOffloadStrategy`.
"""

from __future__ import annotations

import os
import secrets
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,  # private: as Lightning's own strategies
    _init_dist_connection,  # private: as Lightning's own strategies
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import HashStore, Store  # type: ignore[attr-defined] # exported at run time
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.processes.between_runs import BetweenRuns
from lightning_pipeoffload.processes.collectives import Collectives
from lightning_pipeoffload.processes.data_parallel import forget_replica, tell_replica
from lightning_pipeoffload.processes.failure_board import FailureBoard
from lightning_pipeoffload.processes.failure_cause import (
    SIGINT_STATUS,
    SIGTERM_STATUS,
    first_line,
    status_after,
)
from lightning_pipeoffload.processes.launcher import JointLauncher
from lightning_pipeoffload.processes.meeting import Meeting
from lightning_pipeoffload.processes.rank_differences import describe_settings, refuse_differences
from lightning_pipeoffload.processes.run_store import connect_store
from lightning_pipeoffload.processes.siblings import LaunchedProcesses
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.randomness import RandomnessReplay
from lightning_pipeoffload.runtime.transport import says_peer_lost
from lightning_pipeoffload.schedule import Schedule

# Where a hook needs all ranks, and one is not on its way, nobody waits longer.
_PATIENCE = timedelta(seconds=60)


class PipelineProcesses(Collectives):
    """Starts one process for each rank, lets them talk, and ends them together."""

    settings: PipelineSettings
    num_nodes = 1
    _process_group_backend: str | None = None
    _timeout: timedelta | None = default_pg_timeout
    _board: FailureBoard | None = None
    _has_broken_off = False
    _metrics_store: Store | None = None
    _meeting: Meeting | None = None

    @property
    def place(self) -> str:
        """Where in the plan this rank is; empty between steps."""
        return ""

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether replicas share the data, so that Lightning gives each its part."""
        return self.num_replicas > 1

    @property
    def num_replicas(self) -> int:
        """The number of replicas of the pipeline."""
        return self.settings.num_replicas(self.num_nodes * self.num_processes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.group.num_replicas, "rank": self.group.replica}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        num_ranks = self.settings.num_ranks(self.num_nodes * self.num_processes)
        self.settings.provisional_schedule(num_ranks)  # refuses here, before processes start
        if not self.cluster_environment.creates_processes_externally:
            self._refuse_unnamed_node()
        self._launcher = JointLauncher(
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

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._set_world_ranks()
        self._has_failed = False
        BetweenRuns.end()
        if self.world_size > 1:
            self._launched = LaunchedProcesses(
                self.global_rank, self.local_rank, JointLauncher.started
            )
            self._board = FailureBoard(
                self.global_rank, self.world_size, self._launched, self._timeout
            )
        assert self.cluster_environment is not None
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        options: dict[str, Any] = {"timeout": self._timeout}
        if self.world_size == 1:
            options["store"] = HashStore()  # a rank alone meets nobody, and needs no port for that
        _init_dist_connection(self.cluster_environment, backend, **options)
        if self._group is not None and self._has_broken_off:
            self._group.renew()
        self._has_broken_off = False
        if self._group is None:
            schedule = self.settings.provisional_schedule(self.settings.num_ranks(self.world_size))
            self._refuse_other_settings(schedule)
            self._group = PipelineGroup(
                schedule,
                self.global_rank,
                self.root_device,
                self._timeout,
                self.num_replicas,
                self.settings.rank_order,
            )
        tell_replica(self._group.replica, self._group.num_replicas)
        if self.world_size > 1:
            self._connect(self._group)
        self.agree_on_randomness()  # a module may be made between here and ``setup``

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        global_rank = self.node_rank * self.num_processes + self.local_rank
        self.cluster_environment.set_global_rank(global_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _refuse_other_settings(self, schedule: Schedule) -> None:
        """Compare what decides on the pipeline's groups, without any of them."""
        if self.world_size > 1:
            group = dist.new_group(timeout=self._timeout, backend="gloo")
            refuse_differences(describe_settings(self.settings, schedule), group)
            dist.destroy_process_group(group)

    def _connect(self, group: PipelineGroup) -> None:
        """Hear of the other ranks' failures and metrics, for one fit or evaluation."""
        run = group.world.broadcast(secrets.token_hex(8), 0)
        self._metrics_store = connect_store(run, self._timeout)
        patience = min(self._timeout or _PATIENCE, _PATIENCE)
        self._meeting = Meeting(
            connect_store(run, self._timeout), self.global_rank, group.global_ranks, patience
        )
        assert self._board is not None
        self._board.place_of = group.place_of
        self._board.connect(connect_store(run, self._timeout))

    def agree_on_randomness(self) -> None:
        """Let every rank's global generators go on from where global rank 0's are."""
        replay = self.broadcast(RandomnessReplay())
        replay.restore()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Let a Ctrl-C end with a shell's status, not with Lightning's 1; all else is told by now.

        Raises:
            SystemExit: The exception is a Ctrl-C.
        """
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
            if self._tell(board, exception):
                self._break_off()
            if isinstance(exception, SystemExit) and exception.code in (None, 0):
                exception.code = 1

    def _fail_elsewhere(self, exception: Exception) -> None:
        """End the run because of what the thread that publishes metrics has met."""
        if self._board is not None:
            self._board.fail(exception, "while publishing metrics")

    def _break_off(self) -> None:
        """Leave a run that every rank leaves by the same exception; another may follow."""
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
            self.group.world.barrier()
            self._board.stop()
            self._board = None
            self._rest()
