"""Shows the whole module for a moment, so that code may freeze and group parameters by name.

A callback that unfreezes a backbone walks over ``module.parameters()`` and adds what it finds to
the optimizer; where it found only what its rank owns, ranks would come to differ in what trains and
in the optimizer's groups. So each is shown the parameters of the others too, as shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_pipeoffload.runtime.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.slots import Slot


@dataclass(frozen=True)
class ForeignParameter:
    """A parameter that this rank does not own.

    Attributes:
        slot: where it was.
        placeholder: what is there now.
        siblings: its module's parameters, in the order of registration.
    """

    slot: Slot
    placeholder: ShapeOnly
    siblings: tuple[str, ...]


@contextmanager
def shown_whole(
    foreign: Sequence[ForeignParameter], owned: Mapping[int, Tensor], identity: Mapping[str, int]
) -> Iterator[None]:
    """Register the parameters of other ranks as shapes, in the whole module's order.

    Args:
        foreign: the parameters of other ranks.
        owned: this rank's parameters by identity.
        identity: by name; tied weights have the same.
    """
    shown = dict(owned)
    for parameter in foreign:
        shown.setdefault(identity[parameter.slot.name], parameter.placeholder)
    modules = {id(parameter.slot.module): parameter.slot.module for parameter in foreign}
    own = {key: module.__dict__["_parameters"] for key, module in modules.items()}
    for parameter in foreign:
        slot, place = parameter.slot, parameter.slot.module.__dict__
        known = {**place["_parameters"], slot.attribute: shown[identity[slot.name]]}
        place["_parameters"] = {name: known[name] for name in parameter.siblings if name in known}
    try:
        with _EqualIsSame():
            yield
    finally:
        for key, module in modules.items():
            module.__dict__["_parameters"] = own[key]
        for parameter in foreign:
            trains = shown[identity[parameter.slot.name]].requires_grad
            parameter.placeholder.requires_grad_(trains)


class _EqualIsSame(TorchFunctionMode):
    """Answers ``torch.equal`` by identity.

    Lightning's BaseFinetuning asks by it whether an optimizer has a parameter already; by value no
    rank could tell, and two new norm layers would be taken for one.
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.equal:
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))
