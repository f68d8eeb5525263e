"""How much memory this machine has left for a process: the host's, or that of its container.

A container is told its limit by its control group, whose files differ between the two versions
that Linux has; a group's parents limit it as well. Cached files count as used there, though the
kernel gives them up when memory gets short.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")


class MachineMemory(NamedTuple):
    """Bytes of memory.

    Attributes:
        total: All of it; 0 where the system does not tell.
        available: What can be taken without swapping.
    """

    total: int
    available: int


class _Files(NamedTuple):
    """What one version of control groups calls its files, and a line of ``memory.stat``."""

    folder: str
    limit: str
    usage: str
    cached: str


_VERSION_1 = _Files(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def machine_memory(root: Path = _ROOT) -> MachineMemory:
    """Read what is there: the least of the machine and of each control group of this process.

    Args:
        root: The root of the file system.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return MachineMemory(0, 0)
    rows = _table(meminfo)
    machine = MachineMemory(1024 * rows["MemTotal:"], 1024 * rows["MemAvailable:"])
    found = [machine, *_control_groups(root)]
    return MachineMemory(min(m.total for m in found), min(m.available for m in found))


def _control_groups(root: Path) -> Iterator[MachineMemory]:
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            files = _VERSION_1 if controllers else _VERSION_2
            yield from _group_and_parents(root / files.folder, path, files)


def _group_and_parents(top: Path, path: str, files: _Files) -> Iterator[MachineMemory]:
    # Inside a container the path may be the host's, and the container's own group is the top.
    for part in ("/", *_prefixes(path)):
        memory = _read_group(top / part.strip("/"), files)
        if memory is not None:
            yield memory


def _prefixes(path: str) -> Iterator[str]:
    names = path.strip("/").split("/")
    return ("/".join(names[: n + 1]) for n in range(len(names)))


def _read_group(folder: Path, files: _Files) -> MachineMemory | None:
    limit = folder / files.limit
    if not limit.exists() or limit.read_text().strip() == "max":
        return None
    total = int(limit.read_text())
    used = int((folder / files.usage).read_text())
    cached = _table(folder / "memory.stat").get(files.cached, 0)
    return MachineMemory(total, max(0, total - used + cached))


def _table(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
