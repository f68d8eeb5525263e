"""Starts the ranks of a machine as Lightning does for a script, and ends them together.

They watch each other before they can communicate. The first process of a machine starts the others
as its children: it reads their exit statuses, and they detect its end.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import (
    _ChildProcessObserver,  # private: it kills this process, without a word, when a child has ended
)
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher,  # private: as Lightning's own strategies
)
from lightning.pytorch.utilities.exceptions import (
    _TunerExitException,  # private: how a learning rate finder ends a fit that has not failed
)
from torch import nn
from typing_extensions import override

from lightning_pipeoffload.processes.failure import (
    POLL_SECONDS,
    SIGINT_STATUS,
    Failure,
    failure_of_ended_process,
    print_error_line,
)
from lightning_pipeoffload.processes.run_store import free_port
from lightning_pipeoffload.runtime.memory import machine_memory
from lightning_pipeoffload.runtime.shapes import ShapeOnly, ValueNeededError, remote_read_message
from lightning_pipeoffload.schedule import bytes_text

log = logging.getLogger(__name__)

# Timeout for the cause of a rank's abort to be announced.
_CAUSE_SECONDS = 5.0

_LAUNCHER = "PIPEOFFLOAD_LAUNCHER"
# As long as nobody has changed it: relative paths of the command line begin there.
_STARTED_IN = Path.cwd()

_COPIES_ADVICE = """\
%s has %s, which each of this machine's %d processes makes as a whole: %s of the %s that are free. \
Made in configure_model, each makes its own part only:
    def configure_model(self):
        if self.model is None:  # which __init__ sets
            self.model = ...  # what __init__ has made there until now"""


@contextmanager
def exporting_launcher_pid() -> Iterator[None]:
    """Pass the id of this process, the launcher, to processes that are started inside."""
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_LAUNCHER, None)


class LaunchedProcesses:
    """One process's record of the other processes of its machine.

    Args:
        global_rank: The global rank of this process.
        local_rank: The local rank of this process.
        children: Processes that this one launched, for the global ranks after its own.
    """

    def __init__(
        self, global_rank: int, local_rank: int, children: Sequence[subprocess.Popen[bytes]]
    ) -> None:
        self._global_rank, self._first = global_rank, global_rank - local_rank
        self._launcher = int(os.environ.get(_LAUNCHER, "0")) if local_rank else 0
        self._aborted_at: dict[int, float] = {}
        self._children = dict(enumerate(children, start=global_rank + 1))
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):
                thread._child_processes = []

    def first_rank_of_next_machine(self, world_size: int) -> int | None:
        """Return the rank after those of this machine, as far as this process launched them.

        None: this process was launched by another one, or there are no more ranks.
        """
        if self._launcher:
            return None
        following = max(self._children, default=self._global_rank) + 1
        return following if following < world_size else None

    def find_launcher_failure(self) -> Failure | None:
        """Return the failure of the process that launched this one, if it is gone."""
        if not self._launcher or os.getppid() == self._launcher:
            return None
        return Failure(f"global rank {self._first}, which is gone", is_gone=True)

    def find_child_failure(self, is_connecting: bool) -> Failure | None:
        """Return the failure of a child that should not have ended.

        Args:
            is_connecting: Whether the ranks are not connected yet: then no rank may end, not even
                with status 0; later a rank may end regularly a moment before the others.
        """
        for global_rank, child in self._children.items():
            has_ended = child.poll() is not None and (is_connecting or child.returncode)
            is_aborted = child.returncode == -signal.SIGABRT
            if has_ended and (not is_aborted or self._is_only_cause(global_rank)):
                return failure_of_ended_process(child, global_rank)
        return None

    def _is_only_cause(self, global_rank: int) -> bool:
        """Return whether there is no other failure since a rank's abort was detected.

        NCCL's watchdog aborts a rank that waits for a lost one, maybe before the loss is detected.
        """
        first_seen = self._aborted_at.setdefault(global_rank, time.monotonic())
        return time.monotonic() - first_seen > _CAUSE_SECONDS

    @property
    def has_children(self) -> bool:
        """Whether this process launched others."""
        return bool(self._children)

    def kill(self, global_ranks: Sequence[int]) -> None:
        """Kill the given ranks, as far as this process has launched them."""
        for global_rank in global_ranks:
            if global_rank in self._children and not self.has_ended(global_rank):
                self._children[global_rank].send_signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill all ranks that this process launched."""
        self.kill(list(self._children))

    def kill_launcher(self) -> None:
        """Kill the process that launched this one, if it still runs."""
        if self._launcher and self.find_launcher_failure() is None:
            os.kill(self._launcher, signal.SIGKILL)

    def has_ended(self, global_rank: int) -> bool:
        """Return whether a rank is known to have ended."""
        child = self._children.get(global_rank)
        return child is not None and child.poll() is not None


class BetweenRunsWatcher:
    """Watches the launched ranks between two calls of the trainer, in a thread of the launcher.

    When one of them fails, all end, as with Lightning's own launcher: the next call would wait for
    it for ever.

    Args:
        global_rank: The global rank of this process.
        launched: The ranks to watch.
        patience: How long this process may go on after that, in seconds; it ends by itself if all
            ranks have raised an exception that nobody catches.
    """

    _current: ClassVar[BetweenRunsWatcher | None] = None

    def __init__(
        self, global_rank: int, launched: LaunchedProcesses, patience: float = 0.0
    ) -> None:
        self.end()
        self._patience = patience
        BetweenRunsWatcher._current = self
        self._global_rank, self._launched = global_rank, launched
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="between-runs", daemon=True).start()

    @classmethod
    def end(cls) -> None:
        """Stop watching the other processes: a run starts, whose failure board does."""
        if cls._current is not None:
            cls._current._is_over.set()
            cls._current = None

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            failure = self._launched.find_child_failure(is_connecting=False)
            if failure is not None and not self._is_over.wait(self._patience):
                self._launched.kill_all()
                print_error_line(
                    f"global rank {self._global_rank} stops because of {failure.cause}"
                )
                os._exit(failure.status)


class JointLauncher(_SubprocessScriptLauncher):
    """Calls ``end`` after a run's last hook, or ``fail`` when it has raised an exception.

    Lightning ends a strategy before the hooks ``on_fit_end`` and ``teardown``, and passes it an
    exception only after callbacks, which may wait for other ranks to save a checkpoint.

    Args:
        environment: The cluster environment; if it starts processes, this launcher starts none.
        num_processes: The number of processes of this machine.
        num_nodes: The number of machines.
        end: A function that waits for the other ranks.
        fail: A function that reports an exception to the other ranks.

    Raises:
        ValueError: Slurm's batch script has started only this process.

    Attributes:
        started: The processes that all launchers of this process have started; later trainers use
            them too.
        is_tuned: Whether a learning rate finder or the like has ended the last run.
    """

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        end: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        _refuse_without_srun(environment, num_processes, num_nodes)
        self._end, self._fail = end, fail
        self._has_launched = self.is_tuned = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._warn_once(kwargs["trainer"])
        starts = self.num_processes > 1 and self._starts_processes
        self.is_tuned = False
        try:
            with exporting_launcher_pid() if starts else nullcontext():
                result = super().launch(function, *args, **kwargs)
            self._end()
        except _TunerExitException:
            self.is_tuned = True
            self._end()
            raise
        except ValueNeededError as error:  # in a hook; those in a step are explained there
            explained = RuntimeError(remote_read_message(error))
            self._fail(explained)
            raise explained from error
        except BaseException as exception:
            self._fail(exception)
            raise
        return result

    def _warn_once(self, trainer: Trainer) -> None:
        """Warn of copies of a large module, before this process starts any other."""
        if not self._has_launched and self.cluster_environment.local_rank() == 0:
            warn_of_copies(trainer.lightning_module, self.num_processes)
        self._has_launched = True

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook can run this; Lightning reads it in notebooks only.

        Raises:
            ValueError: A notebook cannot start the ranks; Lightning's own message would advise
                ddp_notebook.
        """
        # After a run of one rank, LightningEnvironment reports that others start processes.
        is_local = isinstance(self.cluster_environment, LightningEnvironment)
        starts_processes = is_local or self._starts_processes
        num_ranks = self.num_processes * self.num_nodes
        if num_ranks > 1 and starts_processes:
            raise ValueError(
                f"a notebook starts ranks of strategy='pipeoffload' on its own machine only, not "
                f"these {num_ranks}, each of which runs the script from its beginning; use "
                f"devices=1, or write the code to a .py file and run !python file.py"
            )
        return True

    def restore_exception_hooks(self) -> None:
        """Restore what stays replaced until an exception's hooks have run."""

    def interrupt_exception(self) -> BaseException:
        """Return the exception of a process whose trainer was interrupted: the shell's status."""
        return SystemExit(SIGINT_STATUS)

    @property
    def _starts_processes(self) -> bool:
        return not self.cluster_environment.creates_processes_externally

    def __getstate__(self) -> dict[str, Any]:
        """Omit the processes, which cannot be pickled."""
        return {**self.__dict__, "procs": []}

    @override
    def _call_children_scripts(self) -> None:
        if self.num_processes > 1:
            _refuse_without_script(self.num_processes)
            os.environ.setdefault("MASTER_PORT", str(free_port()))
        with _as_originally_launched():
            super()._call_children_scripts()
        self.started.extend(self.procs)


@contextmanager
def _as_originally_launched() -> Iterator[None]:
    """Start processes as this one was: in its first folder, with its script."""
    folder, name = Path.cwd(), sys.argv[0]
    os.chdir(_STARTED_IN)
    sys.argv[0] = str(_script() or name)
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv[0] = name


def _script() -> Path | None:
    """Return the absolute path of the script that runs, if there is one."""
    names = sys.argv[0], getattr(sys.modules["__main__"], "__file__", None)
    paths = [Path(_STARTED_IN, name) for name in names if name]
    return next((path for path in paths if path.is_file()), None)


def _refuse_without_script(num_processes: int) -> None:
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    if is_module or _script():
        return
    raise ValueError(
        f"devices={num_processes} needs {num_processes} processes, which run the script that this "
        f"one runs, and it runs none: it was read from standard input or `python -c`; write it to "
        f"a file, start it with torchrun, or fork them: strategy='pipeoffload_notebook'"
    )


def _refuse_without_srun(
    environment: ClusterEnvironment, num_processes: int, num_nodes: int
) -> None:
    """Refuse to wait for ranks that Slurm does not start: a batch script and salloc start one."""
    if not isinstance(environment, SLURMEnvironment):
        return
    num_ranks = num_processes * num_nodes
    has_step = "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ
    if has_step and int(os.environ.get("SLURM_STEP_NUM_TASKS", num_ranks)) >= num_ranks:
        return
    started = "started only this process by srun" if has_step else "not started this one by srun"
    raise ValueError(
        f"{num_ranks} ranks, but Slurm has {started}, and nothing starts the others; write srun "
        f"--nodes={num_nodes} --ntasks-per-node={num_processes} --kill-on-bad-exit=1 before the "
        f"command, or SLURM_JOB_NAME=interactive for ranks of one machine without srun"
    )


def warn_of_copies(module: nn.Module, num_processes: int) -> None:
    """Warn if the copies of a module take more than half of the machine's free memory."""
    tensors = {id(t): t for t in chain(module.parameters(), module.buffers())}
    held = (t for t in tensors.values() if t.device.type == "cpu" and not isinstance(t, ShapeOnly))
    size = sum(tensor.nbytes for tensor in held)
    machine = machine_memory()
    needed = num_processes * size
    if num_processes > 1 and machine.total and needed > machine.available / 2:
        sizes = bytes_text(size), num_processes, bytes_text(needed), bytes_text(machine.available)
        log.warning(_COPIES_ADVICE, type(module).__name__, *sizes)
