"""The folder of a run whose ranks Slurm has started is one, and stays after a requeue."""

import os

import pytest

from lightning_pipeoffload.cli.job_folders import name_folder_by_step, removing_unused_folder

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
    name_folder_by_step()
    assert os.environ.get("PIPEOFFLOAD_RUN") == expected


def test_a_folder_that_other_ranks_write_to_is_left(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lightning_pipeoffload.cli.job_folders._remove_unused", pytest.fail)
    with pytest.raises(ValueError, match="refused"), removing_unused_folder():
        raise ValueError("refused")
