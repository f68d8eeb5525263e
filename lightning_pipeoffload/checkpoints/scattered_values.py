"""Values of a checkpoint that ranks have as shapes in place of the others'.

Each rank makes the checkpoint of what it has: hooks saw it so, and may have changed it. Where
global rank 0 has a shape, another rank has the value in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.checkpoints.late_tensor import LateTensor
from lightning_pipeoffload.checkpoints.replica_values import ReplicaTensor
from lightning_pipeoffload.checkpoints.requests import Requests
from lightning_pipeoffload.checkpoints.value_places import (
    Place,
    leaves_with_places,
    with_values,
)
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.stored_tensor import StoredTensor, value_of
from lightning_pipeoffload.runtime.transport import blaming_peers


class ScatteredValues:
    """A checkpoint, on global rank 0 with what it lacks. All ranks make one at a time.

    Args:
        checkpoint: This rank's checkpoint. What a callback has given is left as it is, as it may
            be in use.
        group: The pipeline's processes.
        value_of: Returns the value of what this rank has in the checkpoint.

    Raises:
        RuntimeError: No rank has a value; all of them raise it.
    """

    def __init__(
        self,
        checkpoint: dict[str, Any],
        group: PipelineGroup,
        value_of: Callable[[Any], Any] = value_of,
    ) -> None:
        self._checkpoint = checkpoint
        self._value_of = value_of
        self._group = group
        self._requests = Requests(group, group.root)
        self._leaves = dict(leaves_with_places(checkpoint))
        absent = [place for place, leaf in self._leaves.items() if isinstance(leaf, ShapeOnly)]
        self._places: list[Place] = group.broadcast(absent, group.root)
        found = group.gather(self._number_values()) if self._places else []
        self._owners = [
            _owner(place, on_rank, group)
            for place, on_rank in zip(self._places, zip(*found, strict=True), strict=True)
        ]

    def _number_values(self) -> list[int | None]:
        """Number what this rank has; what is twice in memory that it shares has one number."""
        numbers: dict[Any, int] = {}
        leaves = [self._leaves.get(place) for place in self._places]
        return [
            numbers.setdefault(_memory_of(leaf), index) if _has_value(leaf) else None
            for index, leaf in enumerate(leaves)
        ]

    def bring(self) -> dict[str, Any]:
        """Return the checkpoint; on global rank 0 with all values, on the host."""
        values = {place: leaf.cpu() for place, leaf in self._leaves.items() if _is_elsewhere(leaf)}
        with blaming_peers("lost a rank while collecting a checkpoint"):
            for place, (owner, _) in zip(self._places, self._owners, strict=True):
                leaf = self._leaves.get(place)
                is_owner = owner == self._group.global_rank
                values[place] = self._group.bring(self._value_of(leaf) if is_owner else leaf, owner)
        return with_values(self._checkpoint, values) if self._group.is_root else self._checkpoint

    @contextmanager
    def coming(self) -> Iterator[dict[str, Any]]:
        """Give the checkpoint, whose values come to global rank 0 one by one as it writes them.

        The other ranks send them when the block ends.
        """
        if not self._group.is_root:
            yield self._checkpoint
            self._send_asked()
            return
        try:
            yield with_values(self._checkpoint, self._late_values())
        finally:
            self._requests.end(self._group.global_ranks)

    def _late_values(self) -> dict[Place, LateTensor]:
        made: dict[Any, LateTensor] = {}
        values = {}
        for place, leaf in self._leaves.items():
            if _is_elsewhere(leaf):
                late = LateTensor(leaf, partial(value_of, leaf))
                values[place] = made.setdefault(_memory_of(leaf), late)
        # One after the other into the same memory: much that comes and goes leaves holes in it.
        largest = max((self._leaves[place].nbytes for place in self._places), default=0)
        room = torch.empty(largest, dtype=torch.uint8)
        for place, (owner, number) in zip(self._places, self._owners, strict=True):
            leaf = self._leaves[place]
            late = LateTensor(leaf, partial(self._fetch, leaf, owner, number, room))
            values[place] = made.setdefault((owner, number), late)
        return values

    def _fetch(self, leaf: Tensor, owner: int, number: int, room: Tensor) -> Tensor:
        if owner == self._group.root:
            return self._value_of(leaf)
        with blaming_peers(f"lost global rank {owner} while writing a checkpoint"):
            self._requests.ask(number, owner)
            value: Tensor = self._group.bring(leaf, owner, room)
            return value

    def _send_asked(self) -> None:
        with blaming_peers("lost global rank 0 while it wrote a checkpoint"):
            for number in self._requests.asked():
                leaf = self._leaves[self._places[number]]
                self._group.bring(self._value_of(leaf), self._group.global_rank)


def _has_value(leaf: Any) -> bool:
    is_shape = isinstance(leaf, ShapeOnly) and not isinstance(leaf, ReplicaTensor)
    return isinstance(leaf, Tensor) and not is_shape


def _is_elsewhere(leaf: Any) -> bool:
    """Whether a tensor has a value that is not in this process's memory."""
    if (
        not isinstance(leaf, Tensor)
        or isinstance(leaf, ShapeOnly)
        or leaf.layout is not torch.strided
    ):
        return False
    return isinstance(leaf, StoredTensor) or leaf.device.type != "cpu"


def _memory_of(leaf: Any) -> Any:
    """Return what two tensors have in common that are one; a tied weight has many names."""
    if isinstance(leaf, (StoredTensor, ShapeOnly)):
        return id(leaf)
    if leaf.layout is not torch.strided or not leaf.numel():
        return id(leaf)
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()


def _owner(place: Place, on_rank: Sequence[int | None], group: PipelineGroup) -> tuple[int, int]:
    """Return the global rank that has a value, and the number that it has there."""
    for rank, number in zip(group.global_ranks, on_rank, strict=True):
        if number is not None:
            return rank, number
    name = "".join(f"[{key!r}]" for key in place)
    raise RuntimeError(
        f"the checkpoint was not saved: checkpoint{name} has a value on no rank; save what a "
        f"rank has computed from its own part of the module only"
    )
