"""What only another replica keeps of an optimizer's state: replica 0 asks for it as it writes it.

::

    optimizer states   embed  layer 0  layer 1  head
    replica 0          value  shape    value    shape     writes the file
    replica 1          shape  value    shape    value     sends what it is asked for
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.checkpoints.requests import Requests
from lightning_pipeoffload.checkpoints.value_places import (
    Place,
    leaves_with_places,
    map_tensors,
    shapes_of,
)
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.message_links import as_bytes
from lightning_pipeoffload.runtime.replicas import Replicas
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.stored_tensor import value_of
from lightning_pipeoffload.runtime.transport import blaming_peers

States = dict[str, dict[str, Any]]


class ReplicaTensor(ShapeOnly):
    """The shape of a tensor of which one replica has the value.

    What a hook sees of it has a shape and no value, as what other ranks have.

    Attributes:
        source: That replica, which is not replica 0.
        held: The value, on that replica; None on others.
    """

    source: int
    held: Tensor | None

    @classmethod
    def of(cls, like: Tensor, source: int, held: Tensor | None) -> ReplicaTensor:
        """Make one of the shape and dtype of ``like``."""
        meta = torch.empty(like.shape, dtype=like.dtype, device="meta")
        origin = f"the optimizer's state (on replica {source})"
        made = cls(meta, torch.device("cpu"), frozenset((origin,)))
        made.source, made.held = source, held
        return made


def states_of_replicas(mine: States, group: PipelineGroup) -> States:
    """Return the states of one rank's parameters on all its replicas; all of them call it.

    Replica 0 has the values that it keeps, and for others a :class:`ReplicaTensor`.

    Args:
        mine: What this replica keeps, by parameter name.
        group: This process's groups.
    """
    found = group.replicas.gather(shapes_of(mine, group.global_rank))
    own = dict(leaves_with_places(mine))

    def tell(source: int, place: Place, shape: Tensor) -> Tensor:
        held = own[place] if source == group.replica else None
        if source:
            return ReplicaTensor.of(shape, source, held)
        return shape if held is None else held

    states: States = {}
    for source, theirs in enumerate(found):
        states |= map_tensors(partial(tell, source), theirs)
    return states


class ReplicaExchange:
    """The values that other replicas have of a checkpoint, of which all make one at a time.

    Args:
        checkpoint: This replica's checkpoint.
        replicas: This rank's counterparts.
    """

    def __init__(self, checkpoint: dict[str, Any], replicas: Replicas) -> None:
        self._replicas = replicas
        leaves = (leaf for _, leaf in leaves_with_places(checkpoint))
        # In one order on all replicas.
        self._elsewhere = [leaf for leaf in leaves if isinstance(leaf, ReplicaTensor)]
        self._numbers = {id(leaf): number for number, leaf in enumerate(self._elsewhere)}
        if self._elsewhere:  # so there are other replicas
            self._requests = Requests(replicas.host, replicas.counterparts[0])

    def bring(self, leaf: Any) -> Any:
        """Return the value of what a checkpoint has, on replica 0 while others answer."""
        if not isinstance(leaf, ReplicaTensor):
            return value_of(leaf)
        room = torch.empty(leaf.shape, dtype=leaf.dtype)
        owner = self._replicas.counterparts[leaf.source]
        with blaming_peers("lost a replica while collecting a checkpoint"):
            self._requests.ask(self._numbers[id(leaf)], owner)
            dist.recv(as_bytes(room), owner, group=self._replicas.host.host_group)
        return room

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Let the other replicas answer, on replica 0, until the block ends."""
        try:
            yield
        finally:
            if self._elsewhere:
                self._requests.end(self._replicas.counterparts)

    def answer(self) -> None:
        """Send replica 0 what it asks for, until it has written all."""
        with blaming_peers("lost replica 0 while it wrote a checkpoint"):
            for number in self._requests.asked() if self._elsewhere else ():
                held = self._elsewhere[number].held
                assert held is not None
                value = value_of(held).detach().cpu().contiguous()
                writer, group = self._replicas.counterparts[0], self._replicas.host.host_group
                dist.send(as_bytes(value), writer, group=group)
