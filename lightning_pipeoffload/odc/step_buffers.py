"""The buffers that steps change, the same on all ranks after each minibatch.

Such as the running statistics of a BatchNorm, which are of the texts that a rank has seen. What the
first rank that has changed a buffer has made of it counts, as replica 0's does in a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class StepBuffers:
    """The buffers that a checkpoint has. Others are constants mostly, which a rank may extend.

    Args:
        module: The user's module.
        device: The device of this rank.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._slots = {
            f"{path}.{key}": (part, key)
            for path, part in module.named_modules()
            for key in part._buffers
            # Private: which buffers no state dict has.
            if key not in part._non_persistent_buffers_set
        }
        self._before = self._now()

    def open(self) -> None:
        """Note what there is before a minibatch."""
        self._before = self._now()

    def changed(self) -> dict[str, Tensor]:
        """Return what this rank's steps have changed since, for other processes."""
        return {
            name: buffer.detach().cpu()
            for name, (buffer, version) in self._now().items()
            if not _is_same(self._before.get(name), buffer, version)
        }

    def settle(self, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over what other ranks have changed.

        Args:
            ranks: What each rank has changed.
        """
        first = {name: value for rank in reversed(ranks) for name, value in rank.items()}
        for name, value in first.items():
            part, key = self._slots[name]
            own = part._buffers[key]
            if own is not None and own.shape == value.shape:
                own.detach().copy_(value)
            else:
                part._buffers[key] = value.to(self._device)

    def _now(self) -> dict[str, tuple[Tensor, int]]:
        found = {name: part._buffers.get(key) for name, (part, key) in self._slots.items()}
        return {name: (own, own._version) for name, own in found.items() if own is not None}


def _is_same(before: tuple[Tensor, int] | None, buffer: Tensor, version: int) -> bool:
    return before is not None and before[0] is buffer and before[1] == version
