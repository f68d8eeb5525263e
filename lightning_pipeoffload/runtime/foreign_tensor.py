"""What stands in the module where other stages have a parameter or a buffer."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from lightning_pipeoffload.runtime.shape_only import ShapeOnly, ValueNeededError
from lightning_pipeoffload.runtime.slots import Slot
from lightning_pipeoffload.runtime.users_code import in_brackets, users_line


class ForeignTensor(ShapeOnly):
    """A parameter or buffer that this rank, or the stage that runs, does not have.

    It stays in its place and under its name, so that the module is whole wherever code looks at it.
    """

    _is_param = False

    @classmethod
    def standing_for(cls, slot: Slot, origin: str, device: torch.device) -> ForeignTensor:
        """Return what takes the place of the tensor in ``slot``.

        Args:
            slot: of the module.
            origin: names the tensor, and where it is.
            device: where the rank computes; the module may be on the host still.
        """
        meta = cls.like(slot.tensor, origin).meta
        made = cls(meta, device, frozenset((origin,)), slot.tensor.requires_grad)
        # Private: isinstance(_, nn.Parameter) asks for it, and so do modules and optimizers.
        made._is_param = slot.kind == "_parameters"
        return made

    @override
    def written_from(self, origins: frozenset[str]) -> None:
        """Stay what it is: the one who has it writes it alike."""

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> ForeignTensor:
        made = type(self)(self.meta, self.device, self.origins, self.requires_grad)
        made._is_param = self._is_param
        memo[id(self)] = made
        return made


def explain_foreign(error: ValueNeededError) -> str:
    """Say where code outside of a step asked for a value of another rank, and what to do."""
    return (
        f"{error}{in_brackets(users_line(error))}, which is not on this rank: call "
        f"trainer.strategy.gather(parameter) on all ranks to have its value; of a gradient the "
        f"2-norm and the largest absolute value are known everywhere"
    )
