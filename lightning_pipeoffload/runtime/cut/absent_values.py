"""What a module lacks on this rank when its pipeline has left it, and how it becomes whole again.

Loading a state dict gives it real tensors in place of the shapes, so that any trainer can go on
with it; using it without them is refused with what to do, where results would be shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_pipeoffload.runtime.shapes.foreign_tensor import ForeignTensor
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot, find_slots


class AbsentValues:
    """The shapes in a module that no pipeline has in charge.

    Args:
        module: The user's module.
        unsaved: Buffers that no state dict has, by name, as they were when the module was cut.
    """

    def __init__(self, module: nn.Module, unsaved: Mapping[str, Tensor]) -> None:
        self._module = module
        self._unsaved = unsaved
        self._shapes = [(slot, slot.tensor) for slot in absent_in(module)]
        self._made: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        for holder in {id(slot.module): slot.module for slot, _ in self._shapes}.values():
            self._hooks.append(holder.register_load_state_dict_pre_hook(self._make_room))
            self._hooks.append(holder.register_forward_pre_hook(self._refuse))

    def leave(self) -> None:
        """Let the module have its shapes, and nothing else of this."""
        self._remove_hooks()
        for slot, shape in self._shapes:
            slot.module.__dict__[slot.kind][slot.attribute] = shape

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _make_room(
        self, holder: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Let a module have real tensors for what is going to be loaded into it."""
        for slot in [s for s in absent_in(self._module) if s.module is holder]:
            loaded = state.get(prefix + slot.attribute)
            if slot.name in self._unsaved:
                holder.__dict__[slot.kind][slot.attribute] = self._unsaved[slot.name].clone()
            # What does not fit is refused where it is loaded.
            elif getattr(loaded, "shape", None) == slot.tensor.shape:
                make_real(slot, self._made)
        self.settle()

    def settle(self) -> None:
        """Take the hooks away, if nothing is absent any more."""
        if not absent_in(self._module):
            self._remove_hooks()

    def _refuse(self, holder: nn.Module, args: Any) -> None:
        if any(slot.module is holder for slot in absent_in(self._module)):
            raise RuntimeError(explain_absent(self._module))


def absent_in(module: nn.Module) -> list[Slot]:
    """List where a module has shapes only."""
    return [slot for slot in find_slots(module) if isinstance(slot.tensor, ForeignTensor)]


def settle(module: nn.Module) -> None:
    """Let no hook wait for values in a module that has them all."""
    hooks = [hook for part in module.modules() for hook in part._forward_pre_hooks.values()]
    for waiting in [getattr(hook, "__self__", None) for hook in hooks]:
        if isinstance(waiting, AbsentValues):
            waiting.settle()


def make_real(slot: Slot, made: dict[int, Tensor]) -> Tensor:
    """Put a real tensor, whose values are still to come, where a shape is.

    Args:
        slot: The place of the shape in its module.
        made: The tensors so far by identity of the shape; tied weights have the same.
    """
    shape = slot.tensor
    if id(shape) not in made:
        with torch.inference_mode(False):
            tensor = torch.empty(shape.shape, dtype=shape.dtype)
            is_parameter = slot.kind == "_parameters"
            made[id(shape)] = nn.Parameter(tensor, shape.requires_grad) if is_parameter else tensor
        if isinstance(shape, ForeignTensor):
            shape.became = made[id(shape)]
    slot.module.__dict__[slot.kind][slot.attribute] = made[id(shape)]
    return made[id(shape)]


def explain_absent(module: nn.Module) -> str:
    """Say what a module lacks, and what to do."""
    names = [slot.name for slot in absent_in(module)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{more} of {type(module).__name__} are on other ranks since it was "
        f"trained over a pipeline; load its checkpoint (ckpt_path=..., or load_state_dict), or go "
        f"on with a pipeline over the same ranks"
    )
