"""Jobs that Hydra gives to Slurm: a rank that fails ends its job, and the command that waits.

Hydra turns a job's exception into a result, and the command that submits it sees only global rank
0's. Where a job ends without a result, submitit asks Slurm's accounting, which not every cluster
has. The callback of this file, which conf/cluster/slurm.yaml names, mends both.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from lightning_pipeoffload.cli.job_folders import SweepJobError

_SECONDS_BETWEEN_QUERIES = 5.0
_ENDED_BADLY = {
    *("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT", "UNKNOWN"),
}


class SubmittedJobs(Callback):
    """Called by Hydra where it submits jobs, and where one has run."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make submitit ask Slurm's queue for its jobs."""
        SlurmJob.watcher = QueueWatcher(Path(str(config.hydra.launcher.submitit_folder)).parent)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Exit with a status that Slurm sees, if this rank has failed."""
        if job_return.status == JobStatus.FAILED:
            try:
                _ = job_return.return_value
            except Exception:
                traceback.print_exc()
            raise SystemExit(1)


class QueueWatcher(SlurmInfoWatcher):
    """Reads the states of jobs from the queue; submitit's own watcher asks ``sacct``.

    Args:
        folder: The folder of submitit, with one folder for the output of each job.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._announced: set[str] = set()
        self._states: dict[str, str] | None = None
        self._queried = float("-inf")

    def register_job(self, job_id: str) -> None:
        """Print that a job is submitted; the jobs of a sweep are registered one by one."""
        main_id = job_id.partition("_")[0]
        if main_id not in self._announced:
            sys.stderr.write(f"submitted to Slurm: job {main_id}; output is in {self._folder}\n")
        self._announced.add(main_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether a job without a result has ended.

        Raises:
            SweepJobError: It has failed.
        """
        state = self.get_state(job_id, mode)
        if state in _ENDED_BADLY:
            raise SweepJobError(
                f"Slurm job {job_id} ended as {state}; what its ranks wrote is in "
                f"{self._folder / job_id}"
            )
        return state == "COMPLETED"

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state of a job in Slurm's words; UNKNOWN if it has left the queue."""
        if mode == "force" or time.monotonic() - self._queried > _SECONDS_BETWEEN_QUERIES:
            self._query()
        return "PENDING" if self._states is None else self._states.get(job_id, "UNKNOWN")

    def _query(self) -> None:
        """Ask for all jobs of this user: for a job that is gone squeue would fail."""
        command = ["squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i %T"]
        done = subprocess.run(command, capture_output=True, text=True)
        self._queried = time.monotonic()
        if done.returncode == 0:  # else the controller is away for a while
            self._states = dict(line.split() for line in done.stdout.splitlines())
