"""A notebook runs a pipeline of one rank; more are processes that it cannot start."""

import lightning as L
import pytest
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import fits


@pytest.fixture(autouse=True)
def _in_a_notebook(monkeypatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)


def _trainer(devices):
    return L.Trainer(**fits.SILENT, devices=devices, strategy=PipeOffloadStrategy())


def test_one_rank_runs_in_a_notebook():
    assert _trainer(1).world_size == 1


@pytest.mark.parametrize("variables", [{}, {"LOCAL_RANK": "0"}])  # as a fit before it leaves them
def test_more_ranks_are_refused_in_a_notebook(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="a notebook cannot start the 2 ranks of a pipeline"):
        _trainer(2)


def test_ranks_that_others_have_started_may_be_interactive(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_RANK": "0",
                        "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert _trainer(2).world_size == 2
