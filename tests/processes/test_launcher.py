"""Where ranks are started and meet; what is said when some cannot come, or memory is short."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import pytest
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch import nn

from lightning_pipeoffload import OnDemandStrategy, PipeOffloadStrategy
from lightning_pipeoffload.processes import failure_board, launcher
from lightning_pipeoffload.processes.launcher import LaunchedProcesses
from lightning_pipeoffload.processes.pipeline_processes import warn_of_split_tensor_groups
from lightning_pipeoffload.runtime.memory import MachineMemory
from tests.support import fits


@pytest.fixture(autouse=True)
def _no_started_processes(monkeypatch):
    """What stands for processes here is none of the tests that follow."""
    monkeypatch.setattr(launcher.JointLauncher, "started", [])


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


def test_tensor_groups_on_two_machines_are_warned_of(recwarn):
    for within_machines in ((4, 8, 2), (2, 1, 1), (1, 4, 2)):
        warn_of_split_tensor_groups(*within_machines)
    assert not recwarn
    with pytest.warns(UserWarning, match="tensor_parallel_size=8 does not divide the 4 devices"):
        warn_of_split_tensor_groups(8, 4, 2)


TASK = {"STEP_ID": "0", "PROCID": "0", "LOCALID": "0"}
INTERACTIVE = {**TASK, "STEP_ID": "4294967290", "STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("variables", "is_refused"),
    [
        ({}, True),  # salloc
        ({"STEP_ID": "4294967294", "PROCID": "0", "STEP_NUM_TASKS": "1"}, True),  # batch script
        (INTERACTIVE, True),  # salloc where it starts the shell by srun
        ({**INTERACTIVE, "JOB_NAME": "interactive"}, False),
        (TASK, False),
        ({**TASK, "STEP_NUM_TASKS": "2"}, False),
    ],
)
def test_a_process_of_slurm_without_the_other_ranks_is_refused(monkeypatch, variables, is_refused):
    job = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0", "JOB_ID": "7"}
    for name, value in {**job, **variables}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    expected = pytest.raises(ValueError, match="2 ranks, but .* srun --nodes=1 --ntasks-per-node=2")
    with expected if is_refused else nullcontext():
        L.Trainer(accelerator="cpu", devices=2, logger=False, strategy=PipeOffloadStrategy())


def test_a_trainer_that_has_started_no_ranks_claims_none():
    before = dict(os.environ)
    L.Trainer(accelerator="cpu", devices=2, logger=False, strategy=PipeOffloadStrategy())
    assert os.environ == before


def test_a_long_wait_for_other_ranks_is_told(monkeypatch):
    monkeypatch.setattr(failure_board, "_CONNECT_SECONDS", 0.0)
    said = Queue()
    monkeypatch.setattr(failure_board, "print_error_line", said.put)
    board = failure_board.FailureBoard(0, 4, LaunchedProcesses(0, 0, ()))
    line = said.get(timeout=1000)
    board.stop()
    assert "global rank 0 still waits for all 4 ranks to connect" in line


@pytest.mark.parametrize("name", ["", "-", "-c"])
def test_a_script_that_is_no_file_starts_no_processes(monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = L.Trainer(**options, devices=2, strategy=PipeOffloadStrategy())
    with pytest.raises(ValueError, match="devices=2 needs 2 processes, which run the script"):
        trainer.fit(L.LightningModule())


@pytest.mark.parametrize("main", ["script", "renamed", "module"])
def test_ranks_start_as_the_first_process_did_though_the_folder_has_changed(
    monkeypatch, tmp_path, main
):
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(launcher, "_STARTED_IN", tmp_path)
    monkeypatch.setattr(sys, "argv", ["name" if main == "renamed" else "train.py", "--seed=1"])
    module = sys.modules["__main__"]
    monkeypatch.setattr(
        module, "__spec__", SimpleNamespace(name="a.b") if main == "module" else None
    )
    monkeypatch.setattr(module, "__file__", str(tmp_path / "train.py"), raising=False)
    started = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **_: started.append((words[1:], os.getcwd()))
    )
    before = os.getcwd(), sys.argv[0]
    _trainer(2).strategy.launcher._call_children_scripts()
    command = ["-m", "a.b"] if main == "module" else [str(tmp_path / "train.py")]
    assert started == [([*command, "--seed=1"], str(tmp_path))]
    assert (os.getcwd(), sys.argv[0]) == before


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)


def _trainer(devices):
    return L.Trainer(**fits.SILENT, devices=devices, strategy=PipeOffloadStrategy())


def test_one_rank_runs_in_a_notebook(notebook):
    assert _trainer(1).world_size == 1


@pytest.mark.parametrize("variables", [{}, {"LOCAL_RANK": "0"}])  # as a fit before it leaves them
def test_more_ranks_of_odc_are_refused_in_a_notebook(monkeypatch, notebook, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"a notebook starts ranks of strategy='pipeoffload' on"):
        L.Trainer(**fits.SILENT, devices=2, strategy=OnDemandStrategy())


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


class _Interrupted(L.Callback):
    def on_train_start(self, trainer, pl_module):
        raise KeyboardInterrupt


def _fit_until_ctrl_c():
    with pytest.raises(SystemExit) as ended:
        fits.trainer(1, {}, callbacks=[_Interrupted()]).fit(fits.Net(), fits.loader())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return ended.value.code, os.environ.get("WORLD_SIZE")


def test_ctrl_c_takes_back_the_size_of_the_world(ranks):
    assert ranks(1).run(_fit_until_ctrl_c) == [(130, None)]


MIB = 1 << 20


class Large(nn.Module):
    """Of 2 MiB, one of its two weights tied."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(512, 1024, bias=False)
        self.down = nn.Linear(512, 1024, bias=False)
        self.down.weight = self.up.weight


@pytest.fixture
def free(monkeypatch):
    def have(num_bytes):
        machine = MachineMemory(num_bytes * 2, num_bytes)
        monkeypatch.setattr(launcher, "machine_memory", lambda: machine)

    return have


def test_copies_that_take_more_than_half_are_warned_of(free, caplog):
    free(15 * MIB)
    launcher.warn_of_copies(Large(), 4)
    assert "Large has 2.00 MiB, which each of this machine's 4 processes makes" in caplog.text
    assert "8.00 MiB of the 15.00 MiB that are free" in caplog.text
    assert "    def configure_model(self):\n        if self.model is None:" in caplog.text


@pytest.mark.parametrize(("num_processes", "megabytes"), [(4, 16), (1, 1)])
def test_nothing_is_said_where_they_fit_or_there_is_one(free, caplog, num_processes, megabytes):
    free(megabytes * MIB)
    launcher.warn_of_copies(Large(), num_processes)
    assert not caplog.text


@pytest.mark.parametrize(("local_rank", "warns"), [(0, True), (1, False)])
def test_a_machines_first_process_says_it_once(free, caplog, monkeypatch, local_rank, warns):
    free(MIB)
    environment = SimpleNamespace(local_rank=lambda: local_rank, validate_settings=_nothing)
    environment.creates_processes_externally = True
    joint = launcher.JointLauncher(environment, 4, 1, _nothing, _nothing)
    for _ in range(2):
        joint.launch(_nothing, trainer=SimpleNamespace(lightning_module=Large()))
    assert caplog.text.count("which each of this machine") == warns


def _nothing(*args, **kwargs):
    """Do nothing."""
