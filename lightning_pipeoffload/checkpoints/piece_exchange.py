"""Brings the pieces that replicas have of a tensor to replica 0, which writes it, when it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.checkpoints.parted_tensor import PartedTensor
from lightning_pipeoffload.checkpoints.value_places import leaves_with_places
from lightning_pipeoffload.runtime.replicas import Replicas
from lightning_pipeoffload.runtime.stored_tensor import value_of
from lightning_pipeoffload.runtime.transport import blaming_peers

_DONE = -1  # asked for when all is written


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
                    self._ask(self._numbers[id(leaf)], replica)
                    self._replicas.receive(room, replica)
        return whole

    def _ask(self, number: int, replica: int) -> None:
        self._replicas.send(torch.tensor([number]), replica)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Let the other replicas answer, on replica 0, until the block ends."""
        try:
            yield
        finally:
            for replica in range(1, self._replicas.num) if self._parted else ():
                self._ask(_DONE, replica)

    def answer(self) -> None:
        """Send replica 0 what it asks for, until it has written all."""
        asked = torch.empty(1, dtype=torch.int64)
        with blaming_peers("lost replica 0 while it wrote a checkpoint"):
            while self._parted:
                self._replicas.receive(asked, 0)
                if int(asked) == _DONE:
                    return
                self._replicas.send(_flat_values(self._parted[int(asked)]), 0)


def _flat_values(leaf: PartedTensor) -> Tensor:
    assert leaf.held is not None
    return leaf.held.detach().cpu().reshape(-1)
