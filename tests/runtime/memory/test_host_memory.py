import pytest
import torch

from lightning_pipeoffload.runtime.memory import host_memory
from lightning_pipeoffload.runtime.memory.host_memory import (
    HostBudget,
    HostMemory,
    HostMemoryError,
    piece_sizes,
)
from lightning_pipeoffload.runtime.memory.machine_memory import MachineMemory


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000, 100_000, 1_234_567, 2**20, 3 * 2**28 + 1])
def test_pieces_are_powers_of_two_and_waste_little(num_bytes):
    sizes = piece_sizes(num_bytes)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert num_bytes <= sum(sizes) <= max(num_bytes * 9 / 8, num_bytes + 4096)


def test_a_range_may_cross_pieces():
    slab = HostMemory(pinned=False).take(4096 + 8192)
    found = list(slab.parts(8000, 9000))
    assert [(offset, len(part)) for offset, part in found] == [(0, 192), (192, 808)]


def test_pieces_are_reused():
    memory = HostMemory(pinned=False)
    for _ in range(3):
        memory.take(10_000).give_back()
    assert memory.num_allocations == len(piece_sizes(10_000))
    assert memory.allocated_bytes == sum(piece_sizes(10_000))


def test_the_budget_is_kept():
    memory = HostMemory(pinned=False, budget=HostBudget.given(8192))
    memory.take(8192)
    with pytest.raises(HostMemoryError, match=r"host_memory_limit is 0\.01 MiB; offload less"):
        memory.take(1)


@pytest.fixture
def machine(monkeypatch):
    def of(total, available):
        found = MachineMemory(total, available)
        monkeypatch.setattr(host_memory, "machine_memory", lambda: found)

    return of


def test_the_machine_does_not_swap(machine):
    machine(100_000, 6000)
    with pytest.raises(HostMemoryError, match="would swap"):
        HostMemory(pinned=False).take(4096)


@pytest.mark.parametrize(("ranks", "share"), [(1, 25_000), (4, 6250)])
def test_ranks_share_what_the_machine_has_left(machine, ranks, share):
    machine(100_000, 30_000)
    budget = HostBudget.share_of_machine(ranks)
    assert budget.num_bytes == share
    with pytest.raises(HostMemoryError, match="is a rank's share of the .* left for"):
        HostMemory(pinned=False, budget=budget).take(28_000)


def test_a_full_machine_has_no_share_and_an_unknown_one_no_limit(machine):
    machine(100_000, 1000)
    assert HostBudget.share_of_machine(2).num_bytes == 0
    machine(0, 0)
    assert HostBudget.share_of_machine(2) is None


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0.00 MiB"), (3 << 19, "1.50 MiB"), ((5 << 30) + 1, "5,120.01 MiB")]
)
def test_amounts_are_in_one_unit(num_bytes, text):
    assert HostBudget.given(num_bytes).origin == f"host_memory_limit is {text}"


def test_what_a_validation_allocates_can_be_trained_with():
    with torch.inference_mode():
        slab = HostMemory(pinned=False).take(64)
    assert not any(part.is_inference() for _, part in slab.parts(0, 64))
