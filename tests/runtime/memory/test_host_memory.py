import pytest
import torch

from lightning_pipeoffload.runtime.memory import host_memory
from lightning_pipeoffload.runtime.memory.host_memory import (
    HostBudget,
    HostMemory,
    HostMemoryError,
    MachineMemory,
    machine_memory,
    piece_sizes,
)


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000, 100_000, 1_234_567, 2**20, 3 * 2**28 + 1])
def test_pieces_are_powers_of_two_and_waste_little(num_bytes):
    sizes = piece_sizes(num_bytes)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert num_bytes <= sum(sizes) <= max(num_bytes * 9 / 8, num_bytes + 4096)


def test_a_range_may_cross_pieces():
    slab = HostMemory(pinned=False).take(4096 + 8192)
    found = list(slab.parts(8000, 9000))
    assert [(offset, len(part)) for offset, part in found] == [(0, 192), (192, 808)]


def test_pieces_are_reused_and_the_budget_is_kept():
    memory = HostMemory(pinned=False, budget=HostBudget.given(sum(piece_sizes(10_000))))
    for _ in range(3):
        memory.take(10_000).give_back()
    assert memory.num_allocations == len(piece_sizes(10_000))
    assert memory.allocated_bytes == sum(piece_sizes(10_000))
    memory.take(10_000)
    with pytest.raises(HostMemoryError, match=r"host_memory_limit is 0\.02 MiB; offload less"):
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


@pytest.mark.parametrize(
    ("total", "available", "ranks", "share"),
    [(100_000, 30_000, 1, 25_000), (100_000, 30_000, 4, 6250), (100_000, 1000, 2, 0)],
)
def test_ranks_share_what_the_machine_has_left(machine, total, available, ranks, share):
    machine(total, available)
    budget = HostBudget.share_of_machine(ranks)
    assert budget.num_bytes == share
    with pytest.raises(HostMemoryError, match="is a rank's share of the .* left for"):
        HostMemory(pinned=False, budget=budget).take(28_000)


def test_a_machine_that_does_not_tell_has_no_limit(machine, tmp_path):
    assert machine_memory(tmp_path) == (0, 0)
    machine(0, 0)
    assert HostBudget.share_of_machine(2) is None


def test_what_a_validation_allocates_can_be_trained_with():
    with torch.inference_mode():
        slab = HostMemory(pinned=False).take(64)
    assert not any(part.is_inference() for _, part in slab.parts(0, 64))


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n"
MACHINE = (1_024_000, 614_400)
CGROUPS = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("sys/fs/cgroup", "memory.max", "memory.current"),
}
UNLIMITED = {1: 2**63 - 4096, 2: "max"}
GROUPS = {
    "none": ({}, MACHINE),
    "its own": ({"job/step": (5000, 2000, 500)}, (5000, 3500)),
    "a parent": ({"job": (5000, 2000, 500)}, (5000, 3500)),
    "the root": ({"": (5000, 2000, 500)}, (5000, 3500)),
    "the narrowest": ({"job/step": (9000, 100, 0), "job": (10_000, 9500, 0)}, (9000, 500)),
    "without a limit": ({"job": (None, 0, 0)}, MACHINE),
}


@pytest.mark.parametrize("version", CGROUPS)
@pytest.mark.parametrize(("groups", "expected"), GROUPS.values(), ids=GROUPS)
def test_limits_of_control_groups(tmp_path, version, groups, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    line = "4:memory:/job/step" if version == 1 else "0::/job/step"
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpuset:/\n{line}\n")
    root, limit_file, usage_file = CGROUPS[version]
    row = "total_inactive_file" if version == 1 else "inactive_file"
    for path, (limit, usage, cached) in groups.items():
        folder = tmp_path / root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{UNLIMITED[version] if limit is None else limit}\n")
        (folder / usage_file).write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"cache 7\n{row} {cached}\n")
    assert machine_memory(tmp_path) == expected
