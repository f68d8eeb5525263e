"""The folders of Hydra's jobs, and the processes of a sweep.

A process can start the ranks of one training only, and they start it again by its own command
line. So each job of ``--multirun`` is a command of its own:

    pipeoffload-train -m schedule=1f1b,zb_h1      Hydra's sweeper, no training
      pipeoffload-train schedule=1f1b             job 0: global rank 0, in multirun/.../0
        pipeoffload-train schedule=1f1b           its global rank 1
      pipeoffload-train schedule=zb_h1            job 1, when job 0 has ended
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_OF_SWEEP = ("hydra.mode=", "hydra.sweep", "hydra.run.dir=")
_RUN = "PIPEOFFLOAD_RUN"
"""The environment variable by which conf/train.yaml names a run's folder; else by the time."""
_INTERACTIVE = ("bash", "interactive")
"""Names of Slurm jobs that Lightning ignores, for a shell runs in them."""


class SweepJobError(Exception):
    """A job of a sweep has failed."""


def name_folder_by_slurm_step() -> None:
    """Name the folder by Slurm's job and step, where srun has started the ranks.

    Each rank composes the configuration by itself, at another second; a requeued job finds its
    folder again.
    """
    if _is_task_of_srun():
        step = f"{os.environ['SLURM_JOB_ID']}/{os.environ['SLURM_STEP_ID']}"
        os.environ.setdefault(_RUN, step)


def _is_task_of_srun() -> bool:
    is_interactive = os.environ.get("SLURM_JOB_NAME") in _INTERACTIVE
    return "SLURM_STEP_ID" in os.environ and not is_interactive


def runs_in_sweeper_process() -> bool:
    """Whether Hydra runs this job of a sweep in the sweeper's own process."""
    from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415 - Hydra is an extra
    from hydra.types import RunMode  # noqa: PLC0415

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return False
    return str(HydraConfig.get().launcher["_target_"]).endswith(".BasicLauncher")


def run_job_in_subprocess(module: str) -> None:
    """Run this job of a sweep as ``python -m module``, in the folder that Hydra has made for it.

    Raises:
        SweepJobError: The command failed; its error is on the screen.
    """
    from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415 - Hydra is an extra

    job = HydraConfig.get()
    hydra_overrides = [word for word in job.overrides.hydra if not word.startswith(_OF_SWEEP)]
    folder = f"hydra.run.dir='{job.runtime.output_dir}'"
    words = [*_flags(sys.argv[1:]), *job.overrides.task, *hydra_overrides, folder]
    done = subprocess.run([sys.executable, "-m", module, *words])
    if done.returncode:
        chosen = " ".join(job.overrides.task)
        raise SweepJobError(
            f"job {job.job.num} ({chosen}) ended with status {done.returncode}; its folder is "
            f"{job.runtime.output_dir}"
        )


def _flags(words: Sequence[str]) -> list[str]:
    """Return the words that are neither overrides nor ``-m``, such as --config-dir."""
    is_override = [not word.startswith("-") and ("=" in word or word[0] in "+~") for word in words]
    flags = [word for word, skipped in zip(words, is_override, strict=True) if not skipped]
    return [word for word in flags if word not in ("-m", "--multirun")]


@contextmanager
def removing_unused_folder() -> Iterator[None]:
    """Remove the run's folder where a ValueError comes before anything was written to it.

    It stays where srun has started the ranks, for others may be about to write to it.
    """
    try:
        yield
    except ValueError:
        if os.environ.get("LOCAL_RANK", "0") == "0" and not _is_task_of_srun():
            _remove_unused()
        raise


def _remove_unused() -> None:
    from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415 - Hydra is an extra

    if not HydraConfig.initialized():
        return
    job = HydraConfig.get()
    folder, subdir = Path(job.runtime.output_dir), job.output_subdir
    if not subdir or {path.name for path in folder.iterdir()} != {subdir}:
        return
    shutil.rmtree(folder)
    start = Path(job.runtime.cwd)
    for parent in folder.parents:
        if parent == start or start not in parent.parents:
            return
        with suppress(OSError):  # another run's folder is in it
            parent.rmdir()
