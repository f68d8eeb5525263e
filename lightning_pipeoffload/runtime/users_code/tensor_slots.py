"""Slots: the entries of a module tree that hold a parameter or a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """An entry of a module that holds a parameter or a buffer."""

    name: str
    module: nn.Module
    attribute: str
    kind: str  # "_parameters" or "_buffers", the dict of the module

    @property
    def path(self) -> str:
        """The name of the module with a trailing dot; "" for the root."""
        return self.name.removesuffix(self.attribute)

    @property
    def tensor(self) -> Tensor:
        """The tensor in the slot."""
        tensor: Tensor = self.module.__dict__[self.kind][self.attribute]
        return tensor

    def put(self, tensor: Tensor | None) -> None:
        """Replace the tensor without ``nn.Module.__setattr__``; None: the slot is empty."""
        self.module.__dict__[self.kind][self.attribute] = tensor


@contextmanager
def swapped(pairs: Iterable[tuple[Slot, Tensor]]) -> Iterator[None]:
    """Put tensors into slots within the context, and restore the previous tensors after it.

    If a pair has the tensor that is in the slot already, and code within the context assigns
    another one, that assignment stays.
    """
    before: list[tuple[Slot, Tensor, Tensor]] = []
    try:
        for slot, tensor in pairs:
            before.append((slot, slot.tensor, tensor))
            slot.put(tensor)
        yield
    finally:
        for slot, replaced, tensor in before:
            if tensor is not replaced or slot.tensor is tensor:
                slot.put(replaced)


def find_slots(module: nn.Module) -> list[Slot]:
    """List the parameters and buffers of ``module`` in the order of registration."""
    return [
        Slot(f"{path}.{attribute}" if path else attribute, child, attribute, kind)
        for path, child in module.named_modules()
        for kind in ("_parameters", "_buffers")
        for attribute, tensor in child.__dict__[kind].items()
        if tensor is not None
    ]
