"""What a microbatch's F saw of the tensors that steps write in place, for its B.

On one device a microbatch's backward follows its forward. Here forwards of others come in between,
and ``self.head.weight.data.mul_(0.99)`` would reach what autograd keeps of the earlier ones,
without a word where ``.data`` counts no version. So B finds in these tensors what F has left there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.cut.ownership import Ownership
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.snapshot import Attribute

# How autograd says that what it keeps was written: the shape, and how often.
_WRITTEN = re.compile(r"modified by an inplace operation: .*\[([\d, ]*)\]\].*is at version (\d+)")


def refuse_late_writes(error: RuntimeError, ownership: Ownership) -> None:
    """Say by name which buffer was written before a backward that reads it, if that is the error.

    Raises:
        RuntimeError: It is: the buffer was not written when the step was first run.
    """
    found = _WRITTEN.search(str(error))
    for slot in ownership.slots if found else ():
        tensor = slot.tensor
        if slot.kind != "_buffers" or isinstance(tensor, ShapeOnly):
            continue
        if found and found.groups() == (str([*tensor.shape])[1:-1], str(tensor._version)):
            raise RuntimeError(
                f"the step writes the buffer {slot.name} in place, which it did not when it was "
                f"first run, so other microbatches' backwards do not find what their forwards "
                f"have seen; write it in every step, the first one too, or assign a new tensor "
                f"(self.{slot.attribute} = self.{slot.attribute} * factor)"
            ) from error


class WrittenTensors:
    """The tensors that steps write in place, and that a backward may read.

    Args:
        last: The last of the rank's stages; the others have their own buffers and attributes in
            each F.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._weights: set[str] = set()
        self._attributes: set[Attribute] = set()

    def expect(self, weights: Iterable[str], attributes: Iterable[Attribute]) -> None:
        """Learn what a step writes."""
        self._weights.update(weights)
        self._attributes.update(attributes)

    def of_stage(self, stage: int, ownership: Ownership) -> list[Tensor]:
        """List the tensors that a stage writes."""
        if not self._weights and not self._attributes:
            return []
        weights = [
            slot.tensor
            for slot in ownership.slots
            if slot.name in self._weights and stage in ownership.owners[slot.name]
        ]
        others = self._attributes if stage == self._last else ()
        held = [vars(m).get(name, m._buffers.get(name)) for m, name in others]
        found = {id(tensor): tensor for tensor in (*weights, *tensors_in(held))}
        return [tensor for tensor in found.values() if not isinstance(tensor, ShapeOnly)]


class SeenValues:
    """What tensors hold at one moment."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Private: autograd compares versions. A new .data counts none, and is another storage.
        self._seen = [(t, t.data, t.detach().clone(), t._version) for t in tensors]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the tensors hold again what they held, inside."""
        now = SeenValues(tensor for tensor, *_ in self._seen)
        self._put()
        try:
            yield
        finally:
            now._put()

    def _put(self) -> None:
        for tensor, data, value, version in self._seen:
            data.copy_(value)
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
            # Private: the counter is shared by all views that autograd has saved.
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
