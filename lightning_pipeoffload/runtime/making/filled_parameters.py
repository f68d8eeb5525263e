"""Gives parameters values from elsewhere, from files say, while their module is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.making.registered_parameters import parameters_in
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


@torch.no_grad()
def fill_parameters(module: nn.Module, read: Callable[[Sequence[str]], Tensor]) -> None:
    """Fill the parameters that this rank makes; called in ``configure_model``.

    In the first run of ``configure_model``, on shapes, nothing is read; in the second what this
    rank needs, one parameter after the other.

    Args:
        module: The user's module, or a part of it, that has all its layers by now.
        read: A function that returns a value by all the names that a parameter has in ``module``;
            it is converted to the parameter's dtype and device.
    """
    names: dict[int, list[str]] = {}
    for slot in parameters_in(module):
        names.setdefault(id(slot.tensor), []).append(slot.name)
    for slot in parameters_in(module):
        found = names.pop(id(slot.tensor), None)
        if found is None:  # another name of one that has been filled
            continue
        if isinstance(slot.tensor, ShapeOnly):
            slot.tensor.zero_()  # a write, for those who follow them
        else:
            slot.tensor.copy_(read(found))
