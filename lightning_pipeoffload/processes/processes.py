"""One rank's connections to the other ranks of a run, and what watches them.

::

    watch()       the other processes of this machine: BetweenRunsWatcher ends, FailureBoard begins
    set_groups()  the groups
    connect()     the run's store: the board reads it, ranks meet and publish numbers
    end()         all ranks have come to the end: the board ends, BetweenRunsWatcher begins
    prepare_run_after_common_error()
                  all ranks have raised the same: as end(), and nothing is shared with later runs
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from lightning_pipeoffload.processes.failure import EXIT_SECONDS, polls
from lightning_pipeoffload.processes.failure_board import FailureBoard
from lightning_pipeoffload.processes.launcher import (
    BetweenRunsWatcher,
    JointLauncher,
    LaunchedProcesses,
)
from lightning_pipeoffload.processes.run_store import (
    StoreBarrier,
    connect_store,
    drop_cached_connections,
)
from lightning_pipeoffload.runtime.comm import HostGroup, PipelineGroup, ProcessGroups

# Timeout for all ranks to reach a hook that needs them.
_PATIENCE = timedelta(seconds=60)
# Timeout for the main thread to raise the error of a thread, with its own traceback.
_OWN_ERROR_SECONDS = 1.0


class Processes:
    """The other ranks, as one rank's strategy knows them.

    It belongs to this process: a strategy that is copied or pickled gets a new one.

    Attributes:
        world: All ranks; None before the first run.
        group: Those of the pipeline; None before the first run, and with ``odc``.
        board: Watches for failures of other ranks; None on one rank, and between runs.
        metrics_store: The run's store, for numbers that ranks publish; None on one rank.
        barrier: Where ranks wait for each other in hooks; None on one rank.
    """

    world: HostGroup | None = None
    group: PipelineGroup | None = None
    board: FailureBoard | None = None
    metrics_store: Store | None = None
    barrier: StoreBarrier | None = None

    def __reduce__(self) -> Any:
        """Leave all of it in this process."""
        return Processes, ()

    def watch(
        self, global_rank: int, local_rank: int, world_size: int, timeout: timedelta | None
    ) -> None:
        """Watch the other processes of this machine; no process group is needed yet."""
        BetweenRunsWatcher.end()
        self._global_rank, self._timeout = global_rank, timeout
        if world_size > 1:
            self._launched = LaunchedProcesses(global_rank, local_rank, JointLauncher.started)
            self.board = FailureBoard(global_rank, world_size, self._launched, timeout)

    def set_groups(self, world: HostGroup, group: PipelineGroup | None = None) -> None:
        """Keep the groups that all ranks have made."""
        self.world, self.group = world, group

    def connect(self) -> None:
        """Open this rank's connections to the store of one run; all ranks call it."""
        if self.board is None:
            return
        assert self.world is not None
        run = self.world.broadcast(secrets.token_hex(8), 0)
        if self.group is not None:
            self.metrics_store = connect_store(run, "metrics", self._timeout)
            self.barrier = StoreBarrier(
                connect_store(run, "meeting", self._timeout),
                self._global_rank,
                self.group.global_ranks,
                min(self._timeout or _PATIENCE, _PATIENCE),
            )
        describe_rank = None if self.group is None else self.group.describe_rank
        self.board.connect(connect_store(run, "board", self._timeout), describe_rank)

    def pop_board(self) -> FailureBoard | None:
        """Return the board to the rank that has failed, which reports it; the run has none then."""
        board, self.board = self.board, None
        return board

    def end(self) -> None:
        """Wait for the other ranks, then stop watching them until the next run."""
        if self.board is None:
            return
        assert self.world is not None
        self.board.expect_end()
        self.world.barrier()  # no rank ends while another one still watches it
        self.board.stop()
        self.board = None
        self._watch_between_runs()

    def prepare_run_after_common_error(self) -> None:
        """Let another run follow after an error that all ranks have raised, waiting for none."""
        ProcessGroups.retire_current(has_failed=True)
        drop_cached_connections()
        self._watch_between_runs(EXIT_SECONDS)

    def _watch_between_runs(self, patience: float = 0.0) -> None:
        if self._launched.has_children:
            BetweenRunsWatcher(self._global_rank, self._launched, patience)

    def exit_for_thread_failure(
        self, exception: BaseException, doing: str = "while publishing metrics"
    ) -> None:
        """End the run because a thread has failed, unless the main thread fails within a second."""
        board = self.board
        for _ in polls(_OWN_ERROR_SECONDS):
            if self.board is not board:
                return
        if board is not None:
            board.exit_for_thread_failure(exception, doing)
