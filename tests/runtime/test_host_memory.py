import pytest
import torch

from lightning_pipeoffload.runtime import host_memory
from lightning_pipeoffload.runtime.host_memory import HostMemory, HostMemoryError, piece_sizes


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
    memory = HostMemory(pinned=False, budget=8192)
    memory.take(8192)
    with pytest.raises(HostMemoryError, match="the budget is 0.000 GiB; offload less"):
        memory.take(1)


def test_the_machine_does_not_swap(monkeypatch):
    monkeypatch.setattr(host_memory, "machine_memory", lambda: (100_000, 6000))
    with pytest.raises(HostMemoryError, match="would swap"):
        HostMemory(pinned=False).take(4096)


def test_what_a_validation_allocates_can_be_trained_with():
    with torch.inference_mode():
        slab = HostMemory(pinned=False).take(64)
    assert not any(part.is_inference() for _, part in slab.parts(0, 64))
