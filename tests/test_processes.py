"""Starting the ranks: what is said when some of them cannot come."""

from queue import Queue

import lightning as L
import pytest

from lightning_pipeoffload import PipeOffloadStrategy, failure
from lightning_pipeoffload.launched import LaunchedProcesses

NODE = {"MASTER_ADDR": "node1", "MASTER_PORT": "12910", "NODE_RANK": "0"}


def make_trainer():
    options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    return L.Trainer(**options, devices=1, num_nodes=2, strategy=PipeOffloadStrategy())


@pytest.mark.parametrize("missing", NODE)
def test_several_nodes_are_refused_where_nothing_tells_them_apart(monkeypatch, missing):
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    make_trainer()
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=rf"num_nodes=2, but .* with {missing} set"):
        make_trainer()


def test_a_long_wait_for_other_ranks_is_told(monkeypatch):
    monkeypatch.setattr(failure, "_PATIENCE_SECONDS", 0.0)
    said = Queue()
    monkeypatch.setattr(failure, "say", said.put)
    board = failure.FailureBoard(0, 4, LaunchedProcesses(0, 0, ()))
    line = said.get(timeout=200)
    board.stop()
    assert "global rank 0 still waits for all 4 ranks to connect" in line
