import pytest

from lightning_pipeoffload.runtime.memory.machine_memory import machine_memory

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
