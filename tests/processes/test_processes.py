"""Starting the ranks: what is said when some of them cannot come."""

import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from queue import Queue
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.processes import failure_board
from lightning_pipeoffload.processes.launched_processes import LaunchedProcesses
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.schedule import build

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


@pytest.mark.parametrize(("step", "is_refused"), [({}, True), ({"SLURM_STEP_ID": "0"}, False)])
def test_a_batch_script_without_srun_is_refused(monkeypatch, step, is_refused):
    task = {"NTASKS": "2", "NTASKS_PER_NODE": "1", "NNODES": "2", "PROCID": "0", "LOCALID": "0"}
    slurm = {f"SLURM_{name}": value for name, value in task.items()}
    for name, value in {**slurm, "ENVIRONMENT": "BATCH", "SLURM_NODEID": "0", **step}.items():
        monkeypatch.setenv(name, value)
    expected = pytest.raises(ValueError, match="2 ranks, but .* write srun")
    with expected if is_refused else nullcontext():
        make_trainer()


@pytest.mark.parametrize("device", ["cpu", "meta"])  # on any accelerator each edge has a group
def test_no_group_waits_longer_than_the_timeout(monkeypatch, device):
    timeouts = []

    def new_group(ranks, timeout=None, **options):
        timeouts.append(timeout)
        return Mock()

    monkeypatch.setattr(dist, "get_backend_config", lambda: f"cpu:gloo,{device}:other")
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "new_group", new_group)
    seconds = timedelta(seconds=9)
    group = PipelineGroup(build("1f1b", 2, 4), 0, torch.device(device), seconds)
    tensors = Mock(ranks_sharing=lambda: [(0, 1)], shared_parameters=list, common_buffers=list)
    group.share(Mock(tensors=tensors))
    assert timeouts == [seconds] * {"cpu": 4, "meta": 5}[device]


def test_a_trainer_that_has_started_no_ranks_claims_none():
    before = dict(os.environ)
    L.Trainer(accelerator="cpu", devices=2, logger=False, strategy=PipeOffloadStrategy())
    assert os.environ == before


def test_a_long_wait_for_other_ranks_is_told(monkeypatch):
    monkeypatch.setattr(failure_board, "_CONNECT_SECONDS", 0.0)
    said = Queue()
    monkeypatch.setattr(failure_board, "say", said.put)
    board = failure_board.FailureBoard(0, 4, LaunchedProcesses(0, 0, ()))
    line = said.get(timeout=1000)
    board.stop()
    assert "global rank 0 still waits for all 4 ranks to connect" in line


@pytest.mark.parametrize("name", ["", "-", "-c"])
def test_a_script_that_is_no_file_starts_no_processes(monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = L.Trainer(**options, devices=2, strategy=PipeOffloadStrategy())
    with pytest.raises(ValueError, match="devices=2 needs 2 processes, which run the script"):
        trainer.fit(L.LightningModule())
