"""What several processes would make of a large module is said before they are started."""

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_pipeoffload.processes import launcher
from lightning_pipeoffload.runtime.memory.host_memory import MachineMemory

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
