"""Starts the ranks of a machine, as Lightning does for a script, and ends them together."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher,  # private: as Lightning's own strategies
)
from lightning.pytorch.utilities.exceptions import (
    _TunerExitException,  # private: how a learning rate finder ends a fit that has not failed
)
from torch import nn
from typing_extensions import override

from lightning_pipeoffload.processes.launched_processes import signing_as_launcher
from lightning_pipeoffload.processes.run_store import free_port
from lightning_pipeoffload.runtime.memory.host_memory import machine_memory
from lightning_pipeoffload.runtime.shapes.remote_tensor import explain_remote
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError
from lightning_pipeoffload.schedule.quantities import bytes_text

log = logging.getLogger(__name__)

_COPIES_ADVICE = """\
%s has %s, which each of this machine's %d processes makes as a whole: %s of the %s that are free. \
Made in configure_model, each makes its own part only:
    def configure_model(self):
        if self.model is None:  # which __init__ sets
            self.model = ...  # what __init__ has made there until now"""


class JointLauncher(_SubprocessScriptLauncher):
    """Calls ``end`` after a run's last hook, or ``fail`` when it has raised an exception.

    Lightning ends a strategy before the hooks ``on_fit_end`` and ``teardown``, and passes an
    exception on to it after callbacks, which may wait for the other ranks to save a checkpoint.

    Args:
        environment: The cluster environment; if it starts processes, this launcher starts none.
        num_processes: The number of processes of this machine.
        num_nodes: The number of machines.
        end: A function that waits for the other ranks.
        fail: A function that passes an exception on to them.

    Raises:
        ValueError: Slurm's batch script has started this process alone.

    Attributes:
        started: The processes that all launchers of this process have started: later trainers use
            them too.
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
        _refuse_without_srun(environment, num_processes * num_nodes)
        self._end, self._fail = end, fail
        self._has_launched = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._warn_once(kwargs["trainer"])
        starts = self.num_processes > 1 and self._starts_processes
        try:
            with signing_as_launcher() if starts else nullcontext():
                result = super().launch(function, *args, **kwargs)
            self._end()
        except _TunerExitException:
            self._end()
            raise
        except ValueNeededError as error:  # in a hook; those in a step are explained there
            explained = RuntimeError(explain_remote(error))
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
        # After a run of one rank, LightningEnvironment says that others start processes.
        is_local = isinstance(self.cluster_environment, LightningEnvironment)
        starts_processes = is_local or self._starts_processes
        if self.num_processes * self.num_nodes > 1 and starts_processes:
            raise ValueError(
                f"a notebook cannot start the {self.num_processes} ranks of a pipeline, each of "
                f"which is a process that runs the script from its beginning; use devices=1 here, "
                f"or write the code to a .py file and run !python file.py"
            )
        return True

    @property
    def _starts_processes(self) -> bool:
        return not self.cluster_environment.creates_processes_externally

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the processes, which cannot be pickled."""
        return {**self.__dict__, "procs": []}

    @override
    def _call_children_scripts(self) -> None:
        if self.num_processes > 1:
            _refuse_without_script(self.num_processes)
            os.environ.setdefault("MASTER_PORT", str(free_port()))
        super()._call_children_scripts()
        self.started.extend(self.procs)


def _refuse_without_script(num_processes: int) -> None:
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    if is_module or Path(sys.argv[0]).is_file():
        return
    raise ValueError(
        f"devices={num_processes} needs {num_processes} processes, which run the script that this "
        f"one runs, and it runs none: it was read from standard input or `python -c`; write it to "
        f"a file, or start it with torchrun"
    )


def _refuse_without_srun(environment: ClusterEnvironment, num_ranks: int) -> None:
    """Refuse to be a rank in Slurm's batch script, where Lightning would wait for the others."""
    is_script = os.environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in os.environ
    if num_ranks > 1 and is_script and isinstance(environment, SLURMEnvironment):
        raise ValueError(
            f"{num_ranks} ranks, but the batch script has started this process without srun, and "
            f"nothing starts the others; write srun --kill-on-bad-exit=1 before the command"
        )


def warn_of_copies(module: nn.Module, num_processes: int) -> None:
    """Warn where a machine's copies of a module take more than half of its free memory."""
    tensors = {id(t): t for t in chain(module.parameters(), module.buffers())}
    held = (t for t in tensors.values() if t.device.type == "cpu" and not isinstance(t, ShapeOnly))
    size = sum(tensor.nbytes for tensor in held)
    machine = machine_memory()
    needed = num_processes * size
    if num_processes > 1 and machine.total and needed > machine.available / 2:
        sizes = bytes_text(size), num_processes, bytes_text(needed), bytes_text(machine.available)
        log.warning(_COPIES_ADVICE, type(module).__name__, *sizes)
