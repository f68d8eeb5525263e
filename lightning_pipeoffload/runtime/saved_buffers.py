"""Buffers that a checkpoint has are replica 0's on every replica, as under DistributedDataParallel.

Running statistics of a BatchNorm, for example, are of the data that a replica has read.
"""

from __future__ import annotations

from lightning_pipeoffload.runtime.cut.ownership import Ownership
from lightning_pipeoffload.runtime.replicas import Replicas


class SavedBuffers:
    """The persistent buffers of one rank; the others are mostly large constants: masks, angles."""

    def __init__(self, replicas: Replicas, ownership: Ownership) -> None:
        self._replicas = replicas
        # Private: the buffers that no state dict has.
        self._slots = [
            slot
            for slot in ownership.slots
            if slot.kind == "_buffers"
            and slot.attribute not in slot.module._non_persistent_buffers_set
            and ownership.is_local(slot.name)
        ]

    def copy_first(self) -> None:
        """Give them replica 0's values; all replicas call it after a step."""
        if self._slots:
            self._replicas.copy_first_together([slot.tensor for slot in self._slots])
