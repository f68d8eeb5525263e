"""The values of a module that every rank still has whole, in a step that runs whole.

Before the first training batch the root's values count. Each rank gets those that it needs: tensors
that all ranks read, and those of the units that it runs. What a run writes into tensors, such as a
counter in a buffer, is afterwards in the module of every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.runtime.shapes import quantize_if_4bit
from lightning_pipeoffload.runtime.users_code import Slot


class RootValues:
    """Copies of the root's values on each rank, from one run to the next.

    Args:
        group: The ranks.
    """

    def __init__(self, group: PipelineGroup) -> None:
        self._group = group
        # By name: the rank's own tensor and its version when it was copied, and the copy.
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}

    @contextmanager
    def swapped_in(self, needed: Sequence[tuple[Slot, int | None]]) -> Iterator[None]:
        """Put the root's values into slots; all ranks enter.

        Args:
            needed: Slots, each with the rank that needs its value; None: all do.
        """
        if self._group.agree_on_any(any(self._is_stale(slot) for slot, _ in needed)):
            for slot, rank in needed:
                self._copy(slot, rank)
        before = [(slot, slot.tensor) for slot, _ in needed]
        versions = {}
        for slot, _ in needed:
            copied = self._copies[slot.name][2]
            slot.put(copied)
            versions[slot.name] = _version(copied)
        now: dict[str, Tensor] = {}
        try:
            yield
            now = {slot.name: slot.tensor for slot, _ in needed}
        finally:
            for slot, tensor in before:
                slot.put(tensor)
        self._broadcast_writes(needed, now, versions)

    def _is_stale(self, slot: Slot) -> bool:
        of_tensor, version, _ = self._copies.get(slot.name, (None, 0, None))
        return of_tensor is not slot.tensor or version != _version(slot.tensor)

    def _copy(self, slot: Slot, rank: int | None) -> None:
        tensor = slot.tensor
        quantize_if_4bit(tensor, tensor.device)
        with torch.inference_mode(False):  # so that writes are counted
            copied = self._group.broadcast_to_devices(tensor, None)
        copied = copied if rank in (None, self._group.rank) else tensor
        self._copies[slot.name] = tensor, _version(tensor), copied

    def _broadcast_writes(
        self,
        needed: Sequence[tuple[Slot, int | None]],
        now: dict[str, Tensor],
        versions: dict[str, int],
    ) -> None:
        """Put what the run has written or assigned into the module, on all ranks."""
        rank = self._group.rank
        written: dict[str, Tensor] = {}  # of this rank's units, and by code that all ranks run
        for slot, of in needed:
            value, copied = now[slot.name], self._copies[slot.name][2]
            is_written = value is not copied or _version(value) != versions[slot.name]
            if value is not None and is_written and of in (None, rank):
                written[slot.name] = value
        if not self._group.agree_on_any(bool(written)):
            return
        shapes = {name: (value.shape, value.dtype) for name, value in written.items()}
        of_ranks = self._group.gather(shapes)
        for slot, of in needed:
            described = of_ranks[rank if of is None else of].get(slot.name)
            if described is None:
                continue
            if of == rank or of is None:
                value = written[slot.name]
            else:
                value = torch.empty(described[0], dtype=described[1], device="meta")
            with torch.inference_mode(False):  # so that later writes are counted
                if of is not None:
                    value = self._group.broadcast_to_devices(value, of)
                value = value.clone() if value.is_inference() else value
                _put(slot, value)
                copied = value if of in (None, rank) else slot.tensor
            self._copies[slot.name] = slot.tensor, _version(slot.tensor), copied


def _put(slot: Slot, value: Tensor) -> None:
    tensor = slot.tensor
    if tensor is not value and tensor.shape == value.shape:
        with torch.no_grad():
            tensor.copy_(value)
    elif tensor is not value:
        slot.put(value.to(tensor.device))


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written; 0 for one that counts no writes."""
    return 0 if tensor.is_inference() else tensor._version
