"""Brings the pieces that replicas have of a tensor to replica 0, which writes it, when it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.checkpoints.parted_tensor import PartedTensor
from lightning_pipeoffload.checkpoints.requests import Requests
from lightning_pipeoffload.checkpoints.value_places import leaves_with_places
from lightning_pipeoffload.runtime.message_links import as_bytes
from lightning_pipeoffload.runtime.replicas import Replicas
from lightning_pipeoffload.runtime.stored_tensor import value_of
from lightning_pipeoffload.runtime.transport import blaming_peers


class PieceExchange:
    """The pieces in a checkpoint, of which all replicas make one at a time, each of its own.

    Args:
        checkpoint: This replica's checkpoint.
        replicas: This rank's counterparts.
    """

    def __init__(self, checkpoint: dict[str, Any], replicas: Replicas) -> None:
        self._replicas = replicas
        leaves = (leaf for _, leaf in leaves_with_places(checkpoint))
        # In one order on all replicas.
        self._parted = [leaf for leaf in leaves if isinstance(leaf, PartedTensor)]
        self._numbers = {id(leaf): number for number, leaf in enumerate(self._parted)}
        if self._parted:  # so there are other replicas
            self._requests = Requests(replicas.host, replicas.counterparts[0])

    def bring(self, leaf: Any) -> Any:
        """Return the value of what a checkpoint has, on replica 0 while others answer."""
        if not isinstance(leaf, PartedTensor):
            return value_of(leaf)
        whole = torch.empty(leaf.shape, dtype=leaf.dtype)
        with blaming_peers("lost a replica while collecting a checkpoint"):
            for start, end, replica in leaf.pieces:
                room = whole.view(-1)[start:end]
                if replica == self._replicas.own:
                    room.copy_(_flat_values(leaf))
                else:
                    self._fetch(self._numbers[id(leaf)], replica, room)
        return whole

    def _fetch(self, number: int, replica: int, room: Tensor) -> None:
        owner = self._replicas.counterparts[replica]
        self._requests.ask(number, owner)
        dist.recv(as_bytes(room), owner, group=self._replicas.host.host_group)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Let the other replicas answer, on replica 0, until the block ends."""
        try:
            yield
        finally:
            if self._parted:
                self._requests.end(self._replicas.counterparts)

    def answer(self) -> None:
        """Send replica 0 what it asks for, until it has written all."""
        with blaming_peers("lost replica 0 while it wrote a checkpoint"):
            for number in self._requests.asked() if self._parted else ():
                values = as_bytes(_flat_values(self._parted[number]).contiguous())
                writer, group = self._replicas.counterparts[0], self._replicas.host.host_group
                dist.send(values, writer, group=group)


def _flat_values(leaf: PartedTensor) -> Tensor:
    assert leaf.held is not None
    return leaf.held.detach().cpu().reshape(-1)
