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


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n"
MACHINE = (1_024_000, 614_400)
FOLDERS = {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@pytest.fixture(params=[1, 2])
def version(request):
    return request.param


@pytest.fixture
def root(tmp_path, version):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    other = "4:memory:/job/step" if version == 1 else "0::/job/step"
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpuset:/\n{other}\n")
    return tmp_path


def add_group(root, version, path, limit, usage=0, cached=0):
    folder = root / FOLDERS[version] / path
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, usage_file, row = NAMES[version]
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / usage_file).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"cache 7\n{row} {cached}\n")


def test_a_machine_without_limits(root):
    assert machine_memory(root) == MACHINE


@pytest.mark.parametrize("path", ["job/step", "job", ""])
def test_a_group_or_a_parent_of_it_limits(root, version, path):
    add_group(root, version, path, 5000, usage=2000, cached=500)
    assert machine_memory(root) == (5000, 3500)


def test_the_narrowest_counts(root, version):
    add_group(root, version, "job/step", 9000, usage=100)
    add_group(root, version, "job", 10_000, usage=9500)
    assert machine_memory(root) == (9000, 500)


def test_no_limit_is_none(root, version):
    add_group(root, version, "job", "max" if version == 2 else 2**63 - 4096)
    assert machine_memory(root) == MACHINE


def test_a_system_that_does_not_tell(tmp_path):
    assert machine_memory(tmp_path) == (0, 0)
