"""What Slurm says of a job reaches the command that waits for it, and a rank's failure Slurm."""

import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import MissingConfigException
from submitit.slurm.slurm import SlurmJob

from lightning_pipeoffload.cli.configuration import _exiting_on_errors, configuration_directory
from lightning_pipeoffload.cli.job_folders import (
    SweepJobError,
    name_folder_by_slurm_step,
    removing_unused_folder,
)
from lightning_pipeoffload.cli.submitted_jobs import QueueWatcher, SubmittedJobs


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Let ``squeue`` say what is given; None: that Slurm's controller is away."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def say(lines):
        text = "exit 1" if lines is None else f"printf '{lines}'"
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "squeue").chmod(0o755)

    return say


def test_a_job_is_waited_for_until_it_is_completed(queue):
    watcher = QueueWatcher(Path("folder"))
    found = []
    for lines in (None, "7 PENDING", "7 COMPLETING", None, "8 FAILED\n7 COMPLETED"):
        queue(lines)
        found.append(watcher.is_done("7", "force"))
    assert found == [False, False, False, False, True]


@pytest.mark.parametrize("lines", ["7_0 COMPLETED\n7_1 FAILED", "7_1 TIMEOUT", "7_0 RUNNING", ""])
def test_a_job_that_ends_otherwise_ends_the_waiting(queue, lines):
    queue(lines)
    with pytest.raises(SweepJobError, match=r"job 7_1 ended as (FAILED|TIMEOUT|UNKNOWN); .*f/7_1"):
        QueueWatcher(Path("f")).is_done("7_1", "force")


def test_a_sweep_is_announced_once(capsys):
    watcher = QueueWatcher(Path("folder"))
    for job in ("7", "7_0", "7_1"):
        watcher.register_job(job)
    assert capsys.readouterr().err == "submitted to Slurm: job 7; output is in folder\n"


def test_a_rank_that_has_failed_ends_with_a_status(capsys):
    done = JobReturn(status=JobStatus.FAILED, overrides=[])
    done.return_value = RuntimeError("out of luck")
    with pytest.raises(SystemExit) as ended:
        SubmittedJobs().on_job_end(None, done)
    assert ended.value.code == 1
    assert "RuntimeError: out of luck" in capsys.readouterr().err
    SubmittedJobs().on_job_end(None, JobReturn(status=JobStatus.COMPLETED))


def test_what_cluster_slurm_asks_of_slurm(monkeypatch):
    monkeypatch.setattr(SlurmJob, "watcher", SlurmJob.watcher)
    with initialize_config_dir(str(configuration_directory()), version_base="1.3"):
        sizes = ["trainer.devices=4", "trainer.num_nodes=2", "hydra.sweep.dir=there"]
        config = compose("train", ["cluster=slurm", *sizes], return_hydra_config=True)
    assert config.hydra.mode.name == "MULTIRUN"
    asked = config.hydra.launcher
    assert (asked.nodes, asked.tasks_per_node) == (2, 4)
    assert asked.additional_parameters.signal.startswith("USR1@")  # Lightning's, not submitit's
    assert list(config.hydra.callbacks) == ["submitted_jobs"]
    SubmittedJobs().on_multirun_start(config)
    assert isinstance(SlurmJob.watcher, QueueWatcher)


def test_the_extra_is_named_where_it_is_missing(capsys):
    message = (
        "In 'hydra/config': Could not find 'hydra/launcher/submitit_slurm'\n\nAvailable: basic"
    )
    with pytest.raises(SystemExit) as ended, _exiting_on_errors("train"):
        raise MissingConfigException(message)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(": basic; pip install lightning-pipeoffload[slurm]\n")


# The folder of a run whose ranks Slurm has started is one, and stays after a requeue

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "pipeline"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, "7/0"),
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, None),  # a shell: one run after another
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "pipeline"}, None),
        ({**SLURM, "PIPEOFFLOAD_RUN": "mine"}, "mine"),
    ],
)
def test_a_folder_is_named_by_job_and_step(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name_folder_by_slurm_step()
    assert os.environ.get("PIPEOFFLOAD_RUN") == expected


def test_a_folder_that_other_ranks_write_to_is_left(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lightning_pipeoffload.cli.job_folders._remove_unused", pytest.fail)
    with pytest.raises(ValueError, match="refused"), removing_unused_folder():
        raise ValueError("refused")
