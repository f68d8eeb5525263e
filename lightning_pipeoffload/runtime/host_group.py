"""Processes that tell each other what their hosts know: those of a pipeline, or all of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.transport import blaming_peers

_NO_LIMIT = timedelta(days=7)


class HostGroup:
    """Processes with a group over gloo.

    Args:
        group: That process group.

    Attributes:
        host_group: That process group; another one when the processes connect anew.
    """

    def __init__(self, group: Any) -> None:
        self.host_group = group

    def barrier(self) -> None:
        """Wait for all of them."""
        with blaming_peers("lost a rank in a barrier"):
            dist.barrier(group=self.host_group)

    def broadcast(self, obj: Any, src: int) -> Any:
        """Return the object of global rank ``src``."""
        box = [obj]
        with blaming_peers("lost a rank in a broadcast"):
            dist.broadcast_object_list(box, src, group=self.host_group)
        return box[0]

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all of them, in the order of their global ranks."""
        found: list[Any] = [None] * dist.get_world_size(self.host_group)
        with blaming_peers("lost a rank while gathering"):
            dist.all_gather_object(found, obj, group=self.host_group)
        return found

    def agree(self, decision: bool, unanimous: bool) -> bool:
        """Return whether all, or else any, of them say yes."""
        votes = self.gather(decision)
        return all(votes) if unanimous else any(votes)


class World(HostGroup):
    """All processes of a run, those of every replica.

    Args:
        mesh: The processes.

    Attributes:
        size: How many there are.
        side_group: Another process group, whose collectives run beside those of a step.
    """

    def __init__(self, mesh: RankMesh) -> None:
        super().__init__(mesh.make_world_group(backend="gloo"))
        self.size = mesh.world_size
        self.side_group = mesh.make_world_group(backend="gloo")
        self._mesh = mesh

    @contextmanager
    def waiting_as_long_as_it_takes(self) -> Iterator[None]:
        """Do inside what takes some longer than others, and wait for all of them, without limit."""
        if self.size == 1:
            yield
            return
        group = self._mesh.make_world_group(backend="gloo", timeout=_NO_LIMIT)
        yield
        with blaming_peers("lost a rank while it compiled"):
            dist.barrier(group=group)
        dist.destroy_process_group(group)

    # The group's own method: that of torch.distributed takes twice as long.

    def start_telling(self, number: int) -> Callable[[], int]:
        """Return a function that waits for the number of global rank 0."""
        return start_sharing(self.side_group, number, 0)


def start_sharing(group: Any, number: int, root: int) -> Callable[[], int]:
    """Return a function that waits for the number that the rank ``root`` of a group has."""
    box = torch.tensor([int(number)])
    return waiting(group.broadcast(box, root), box)


def waiting(work: Any, box: Tensor) -> Callable[[], int]:
    """Return a function that waits for a number that is on its way."""

    def wait() -> int:
        with blaming_peers("lost a rank while agreeing with it"):
            work.wait()
        return int(box)

    return wait
