"""Where the ranks are started: in a notebook one alone; and at which port they meet."""

import os
import socket
import subprocess
import sys
from unittest.mock import Mock

import lightning as L
import pytest
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import fits


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)


def _trainer(devices):
    return L.Trainer(**fits.SILENT, devices=devices, strategy=PipeOffloadStrategy())


def test_one_rank_runs_in_a_notebook(notebook):
    assert _trainer(1).world_size == 1


@pytest.mark.parametrize("variables", [{}, {"LOCAL_RANK": "0"}])  # as a fit before it leaves them
def test_more_ranks_are_refused_in_a_notebook(monkeypatch, notebook, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="a notebook cannot start the 2 ranks of a pipeline"):
        _trainer(2)


def test_ranks_that_others_have_started_may_be_interactive(monkeypatch, notebook):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_RANK": "0",
                        "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert _trainer(2).world_size == 2


def test_the_ranks_meet_at_a_port_that_the_system_gives_nobody(monkeypatch):
    started = Mock()
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(sys, "argv", [__file__])
    _trainer(2).strategy.launcher._call_children_scripts()
    ((_, options),) = started.call_args_list
    assert 15_000 <= int(options["env"]["MASTER_PORT"]) < 30_000


def _fit_while_the_port_is_taken():
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        trainer = L.Trainer(**fits.SILENT, devices=1, max_steps=1, strategy=PipeOffloadStrategy())
        trainer.fit(fits.Net(), fits.loader())
    return trainer.global_step


def test_one_rank_needs_no_port(ranks):
    assert ranks(1).run(_fit_while_the_port_is_taken) == [1]
