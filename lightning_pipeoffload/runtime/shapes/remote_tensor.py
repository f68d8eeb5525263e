"""What stands in the module where other stages have a parameter or a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_pipeoffload.runtime.shapes.known_size import KnownSize
from lightning_pipeoffload.runtime.shapes.remote_gradient import GRADIENT_OF, RemoteGradient
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets, users_line


@dataclass
class GradientAge:
    """Tells the parameters of other ranks, without a visit to each, what became of their gradients.

    Attributes:
        num_changes: The number of changes of all gradients together: backwards, what sets them to
            zero, clipping.
        are_none: Whether there are no gradients since the last change.
    """

    num_changes: int = 0
    are_none: bool = True

    def change(self, are_none: bool = False) -> None:
        """Note that what was known of gradients does not hold any more."""
        self.num_changes += 1
        self.are_none = are_none


class RemoteTensor(ShapeOnly):
    """A parameter or buffer that this rank, or the stage that runs, does not have.

    It stays in its place and under its name, so that the module is whole wherever code looks at it.

    Attributes:
        age: The age of the gradients of all such parameters of the rank.
        became: The real tensor in its place since, where a module was made whole again.
    """

    _is_param = False
    _grad: Tensor | None = None
    _grad_age = 0
    age = GradientAge()
    became: Tensor | None = None

    @classmethod
    def standing_for(cls, slot: Slot, origin: str, device: torch.device) -> Self:
        """Return what takes the place of the tensor in ``slot``.

        Args:
            slot: A place of the module.
            origin: The name of the tensor, and where it is.
            device: The device on which the rank computes; the module may be on the host still.
        """
        meta = cls.like(slot.tensor, origin).meta
        made = cls(meta, device, frozenset((origin,)), slot.tensor.requires_grad)
        # Private: isinstance(_, nn.Parameter) asks for it, and so do modules and optimizers.
        made._is_param = slot.kind == "_parameters"
        return made

    @override
    def written_from(self, origins: frozenset[str]) -> None:
        """Stay what it is: the one who has it writes it alike."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient's shape, with its norm where the ranks have told each other."""
        if self._grad_age != self.age.num_changes:
            self.know_gradient(not self.age.are_none and self.requires_grad)
        return self._grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._grad = gradient
        self._grad_age = self.age.num_changes

    def know_gradient(self, is_there: bool, size: KnownSize | None = None) -> None:
        """Take note of a gradient, of which ``size`` is known."""
        self.grad = RemoteGradient.of(self, size) if is_there else None

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        made = type(self)(self.meta, self.device, self.origins, self.requires_grad)
        made._is_param = self._is_param
        memo[id(self)] = made
        return made


def explain_remote(error: ValueNeededError) -> str:
    """Say where code outside of a step asked for a value of another rank, and what to do."""
    advice = (
        "its 2-norm and largest absolute value are on every rank in on_after_backward, "
        "on_before_optimizer_step and configure_gradient_clipping, where your module or callback "
        "overrides one of these, and stay so until it is clipped or written: compute it there; or "
        "call trainer.strategy.gather(parameter.grad) on all ranks to have its value"
        if any(origin.startswith(GRADIENT_OF) for origin in error.origins)
        else "call trainer.strategy.gather(parameter) on all ranks to have its value; an average "
        "of the weights starts from copy.deepcopy(module) before training, of which each rank "
        "averages its part"
    )
    return f"{error}{in_brackets(users_line(error))}, which is not on this rank: {advice}"
