"""The places in a module tree that hold a parameter or a buffer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """A place in the module tree that holds a parameter or a buffer."""

    name: str
    module: nn.Module
    attribute: str
    kind: str  # the dict of the module it is in: "_parameters" or "_buffers"

    @property
    def path(self) -> str:
        """The part of the name that is the module's, up to the attribute."""
        return self.name.removesuffix(self.attribute)

    @property
    def tensor(self) -> Tensor:
        """The tensor that is in the place."""
        found: Tensor = self.module.__dict__[self.kind][self.attribute]
        return found

    def put(self, tensor: Tensor) -> None:
        """Replace the tensor, without what ``setattr`` of a module does."""
        self.module.__dict__[self.kind][self.attribute] = tensor


def find_slots(module: nn.Module) -> list[Slot]:
    """List the parameters and buffers of ``module`` in the order of registration."""
    return [
        Slot(f"{path}.{attribute}" if path else attribute, child, attribute, kind)
        for path, child in module.named_modules()
        for kind in ("_parameters", "_buffers")
        for attribute, tensor in child.__dict__[kind].items()
        if tensor is not None
    ]
