"""Starts the ranks of a machine, as Lightning does for a script, and lets them leave together.

That is either when each is done, or when one has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from typing_extensions import override

from lightning_pipeoffload.processes.copies_warning import warn_of_copies
from lightning_pipeoffload.processes.free_port import free_port
from lightning_pipeoffload.processes.siblings import signing_as_launcher
from lightning_pipeoffload.runtime.shapes.remote_tensor import explain_remote
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError


class JointLauncher(_SubprocessScriptLauncher):
    """Calls ``leave`` when a run is done, its last hooks included, or ``fail`` if it is not.

    Lightning ends a strategy before the hooks ``on_fit_end`` and ``teardown``: a rank that fails in
    them still has to stop the others. And it tells the strategy of an exception after callbacks,
    which may wait for the other ranks: those that save a checkpoint then.

    Args:
        environment: Who starts processes; if it is not this launcher, it starts none.
        num_processes: The number of processes of this machine.
        num_nodes: The number of machines.
        leave: A function that waits for the other ranks.
        fail: A function that tells them of an exception.

    Raises:
        ValueError: Slurm's batch script has started this process alone.

    Attributes:
        started: The processes that this one has started, by whichever launcher; later trainers use
            them too.
    """

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        leave: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        _refuse_without_srun(environment, num_processes * num_nodes)
        self._leave, self._fail = leave, fail
        self._has_launched = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._warn_once(kwargs["trainer"])
        try:
            with self._signing():
                result = super().launch(function, *args, **kwargs)
            self._leave()
        except _TunerExitException:
            self._leave()
            raise
        except ValueNeededError as error:  # in a hook: a step's own is explained where it runs
            explained = RuntimeError(explain_remote(error))
            self._fail(explained)
            raise explained from error
        except BaseException as exception:
            self._fail(exception)
            raise
        return result

    def _warn_once(self, trainer: Trainer) -> None:
        """Warn of what each process makes of the module, before this one starts any."""
        if not self._has_launched and self.cluster_environment.local_rank() == 0:
            warn_of_copies(trainer.lightning_module, self.num_processes)
        self._has_launched = True

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook can run this, which is the only place where Lightning asks.

        Raises:
            ValueError: A notebook cannot start the ranks; Lightning's own message would be of
                ddp_notebook.
        """
        # Of one rank before it, Lightning's own environment says that others start processes.
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
        """Leave out the processes, which are nobody's but this one's."""
        return {**self.__dict__, "procs": []}

    @override
    def _call_children_scripts(self) -> None:
        if self.num_processes > 1:
            _refuse_without_script(self.num_processes)
            os.environ.setdefault("MASTER_PORT", str(free_port()))
        super()._call_children_scripts()
        self.started.extend(self.procs)

    def _signing(self) -> AbstractContextManager[None]:
        if self.num_processes == 1 or not self._starts_processes:
            return nullcontext()
        return signing_as_launcher()


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
    """Refuse to be a rank in Slurm's batch script, where Lightning would wait for the others.

    Raises:
        ValueError: This is one process, and not a task of several.
    """
    is_script = os.environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in os.environ
    if num_ranks > 1 and is_script and isinstance(environment, SLURMEnvironment):
        raise ValueError(
            f"{num_ranks} ranks, but the batch script has started this process without srun, and "
            f"nothing starts the others; write srun --kill-on-bad-exit=1 before the command"
        )
