"""The buffers that a checkpoint has, as replica 0 has them on every replica.

Such as the running statistics of a BatchNorm, which are of the data that a replica has read. What
replica 0 has counts, as under DistributedDataParallel: for steps that read it, in validation and in
a checkpoint.
"""

from __future__ import annotations

from lightning_pipeoffload.runtime.cut.ownership import Ownership
from lightning_pipeoffload.runtime.replicas import Replicas


class SavedBuffers:
    """Those that one rank owns. Others are constants mostly, and large: masks, angles.

    Args:
        replicas: The rank's counterparts.
        ownership: What the rank owns.
    """

    def __init__(self, replicas: Replicas, ownership: Ownership) -> None:
        self._replicas = replicas
        # Private: which buffers no state dict has.
        self._slots = [
            slot
            for slot in ownership.slots
            if slot.kind == "_buffers"
            and slot.attribute not in slot.module._non_persistent_buffers_set
            and ownership.is_local(slot.name)
        ]

    def copy_first(self) -> None:
        """Let them have replica 0's values; all replicas call it after a step."""
        if self._slots:
            self._replicas.copy_first_together([slot.tensor for slot in self._slots])
