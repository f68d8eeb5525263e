"""The processes of a pipeline, as Lightning starts and ends them: what is no business of a step.

Lightning repeats this part in each of its own strategies; here it is apart, below
:class:`~lightning_pipeoffload.PipeOffloadStrategy`.
"""

from __future__ import annotations

import secrets
import signal
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,  # private: as Lightning's own strategies
    _init_dist_connection,  # private: as Lightning's own strategies
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher,  # private: as Lightning's own strategies
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_pipeoffload.collectives import PipelineGroup
from lightning_pipeoffload.failure import FailureBoard, connect_store, say
from lightning_pipeoffload.runtime.transport import PeerLostError
from lightning_pipeoffload.settings import PipelineSettings

_SIGTERM_STATUS = 128 + signal.SIGTERM  # as a shell reports it
_SIGINT_STATUS = 128 + signal.SIGINT
_REFUSED_STATUS = 2  # as pipeoffload-train ends when its configuration is refused


class PipelineProcesses(ParallelStrategy):
    """Starts one process for each rank, lets them talk, and ends them together."""

    settings: PipelineSettings
    num_nodes = 1
    _process_group_backend: str | None = None
    _timeout: timedelta | None = default_pg_timeout
    _group: PipelineGroup | None = None
    _board: FailureBoard | None = None
    _metrics_store: Store | None = None

    @property
    def place(self) -> str:
        """Where in the plan this rank is; empty between steps."""
        return ""

    @property
    def group(self) -> PipelineGroup:
        """The pipeline's processes.

        Raises:
            RuntimeError: before they are connected.
        """
        if self._group is None:
            raise RuntimeError("the pipeline's processes are not connected yet")
        return self._group

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
        return False

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        num_ranks = self.settings.num_ranks(self.num_nodes * self.num_processes)
        self.settings.provisional_schedule(num_ranks)  # refuses here, before processes start
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self._set_world_ranks()
        assert self.cluster_environment is not None
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout)
        if self._group is None:
            schedule = self.settings.provisional_schedule(self.settings.num_ranks(self.world_size))
            self._group = PipelineGroup(schedule, self.global_rank, self.root_device)
        if self.world_size > 1:
            self._watch(self._group)

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        global_rank = self.node_rank * self.num_processes + self.local_rank
        self.cluster_environment.set_global_rank(global_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _watch(self, group: PipelineGroup) -> None:
        """Watch the other ranks, and share metrics with them, for one fit or evaluation."""
        run = group.broadcast(secrets.token_hex(8), group.root)
        self._metrics_store = connect_store(run, self._timeout)
        children = getattr(self.launcher, "procs", ())
        store = connect_store(run, self._timeout)
        self._board = FailureBoard(store, self.global_rank, self.world_size, children)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._refuse_inside_step("barrier")
        self.group.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._refuse_inside_step("broadcast")
        return self.group.broadcast(obj, src)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        self._refuse_inside_step("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the replicas, of which there is one."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._refuse_inside_step("reduce_boolean_decision")
        return self.group.agree(decision, all)

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step is running right now."""
        return False

    def _refuse_inside_step(self, name: str) -> None:
        if self.is_in_step:
            raise RuntimeError(
                f"{name}() inside a step would wait for ever: the other ranks have left the step, "
                f"or are not there yet; call it in a hook such as on_train_batch_end"
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):  # Lightning's own would end with status 0
            exception.code = _SIGTERM_STATUS
        if isinstance(exception, KeyboardInterrupt):
            self._interrupt()
        board, self._board = self._board, None
        if board is None:
            return
        if isinstance(exception, (PeerLostError, dist.DistError)):
            self._finalize_loggers()
            board.stop_because_of_others(_first_line(exception))
        what = _describe(exception)
        if self.place:
            say(f"global rank {self.global_rank} failed in {self.place}")
            what = f"{what} (in {self.place})"
        board.report(what, self._status_after(exception))

    def _status_after(self, exception: BaseException) -> int:
        if isinstance(exception, SIGTERMException):
            return _SIGTERM_STATUS
        assert self.lightning_module is not None
        is_refusal = (
            isinstance(exception, ValueError) and not self.lightning_module.trainer.global_step
        )
        return _REFUSED_STATUS if is_refusal else 1

    def _interrupt(self) -> NoReturn:
        """End at Ctrl-C, which every process of a terminal gets; Lightning would with status 1.

        Raises:
            SystemExit: always.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._finalize_loggers()
        board, self._board = self._board, None
        if board is not None:
            board.report("interrupted", _SIGINT_STATUS)
        raise SystemExit(_SIGINT_STATUS)

    def _finalize_loggers(self) -> None:
        assert self.lightning_module is not None
        for logger in self.lightning_module.trainer.loggers:
            logger.finalize("failed")

    @override
    def teardown(self) -> None:
        board, self._board = self._board, None
        if board is not None:  # nobody leaves while another still watches
            self.group.barrier()
            board.stop()
        super().teardown()


def _describe(exception: BaseException) -> str:
    if isinstance(exception, SIGTERMException):
        return "told to stop by SIGTERM"
    return f"{type(exception).__name__}: {_first_line(exception)}"


def _first_line(exception: BaseException) -> str:
    return next(iter(str(exception).splitlines()), "")
