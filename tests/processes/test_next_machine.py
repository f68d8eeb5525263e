"""A process that has ended on another machine is noticed by its connection alone."""

import time

from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_pipeoffload.processes.launcher import LaunchedProcesses
from lightning_pipeoffload.processes.next_machine import NextMachineConnection


def ended(machine, store, tries=500):
    for _ in range(tries):
        found = machine.find_ended(store)
        if found is not None:
            return found
        time.sleep(0.01)
    return None


def test_the_end_of_the_next_machine_is_found(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # nothing is sent there
    store = HashStore()
    first = NextMachineConnection(store, 0, 1)
    assert ended(first, store, 3) is None  # it does not listen yet
    second = NextMachineConnection(store, 1, None)
    assert ended(first, store, 3) is None
    second.close()
    assert ended(first, store) == 1
    first.close()
    assert ended(first, store, 3) is None


def test_a_machine_that_cannot_be_reached_is_not_watched():
    store = HashStore()
    store.set("address/1", "127.0.0.1 1")
    assert ended(NextMachineConnection(store, 0, 1), store, 3) is None


def test_a_launcher_watches_the_next_machine(monkeypatch):
    children = [object()] * 3
    first = LaunchedProcesses(4, 0, children)
    assert [first.first_rank_of_next_machine(size) for size in (8, 9)] == [None, 8]
    assert LaunchedProcesses(1, 1, ()).first_rank_of_next_machine(4) == 2  # torchrun has started it
    monkeypatch.setenv("PIPEOFFLOAD_LAUNCHER", "7")
    assert LaunchedProcesses(1, 1, ()).first_rank_of_next_machine(4) is None  # its launcher does
