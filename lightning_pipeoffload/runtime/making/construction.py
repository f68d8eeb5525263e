"""The second run that makes a module in parts: with values for what this rank needs.

Random numbers for all else are drawn as well, and dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeoffload.runtime.making.blueprint import Blueprint
from lightning_pipeoffload.runtime.making.parameter_shape import ParameterShape
from lightning_pipeoffload.runtime.making.registered_parameters import (
    RegisteredParameters,
    parameters_in,
    tied_names,
)
from lightning_pipeoffload.runtime.shapes.remote_tensor import RemoteTensor
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot, find_slots
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets, users_line


@contextmanager
def constructing(
    module: nn.Module, blueprint: Blueprint, local_stages: Collection[int], places: Sequence[str]
) -> Iterator[None]:
    """Let what runs inside make a module's layers, with the values that this rank needs.

    Args:
        module: The user's, as it was when the blueprint was drawn.
        blueprint: Of what is going to run.
        local_stages: The stages of this rank.
        places: Of the stages, for messages.

    Raises:
        ValueError: It makes something else than in its first run, or a value from one that is on
            another rank.
    """
    parameters = _PartedParameters(module, blueprint, local_stages)
    try:
        with parameters.following():
            yield
    except ValueNeededError as error:
        raise ValueError(f"{error}{in_brackets(users_line(error))}, {_ADVICE}") from error
    parameters.check_complete()
    _leave_remote(module, blueprint, frozenset(local_stages), places)


class _PartedParameters(RegisteredParameters):
    """A run that makes values for some stages only.

    Args:
        module: The user's.
        blueprint: Of the run.
        local_stages: The stages of this rank.
    """

    def __init__(
        self, module: nn.Module, blueprint: Blueprint, local_stages: Collection[int]
    ) -> None:
        super().__init__(module)
        self._blueprint = blueprint
        self._local_stages = frozenset(local_stages)
        self._shapes: dict[int, Tensor] = {}

    @override
    def take(self, index: int, parameter: Tensor) -> Tensor:
        return parameter if self._is_needed(index) else self._shape(index, parameter)

    @override
    def take_copy(self, index: int, parameter: Tensor) -> Tensor | None:
        return None if self._is_needed(index) else self._shape(index, parameter)

    def check_complete(self) -> None:
        """Compare with the first run.

        Raises:
            ValueError: It had more parameters.
        """
        if len(self.appeared) < len(self._blueprint.appeared):
            raise ValueError(_explain_other(self._blueprint.appeared[len(self.appeared)].name))

    def _is_needed(self, index: int) -> bool:
        self._compare(index)
        return index < self.num_found or bool(self._blueprint.needed[index] & self._local_stages)

    def _compare(self, index: int) -> None:
        found = self.appeared[index]
        if self._blueprint.appeared[index : index + 1] != [found]:
            raise ValueError(_explain_other(f"{found.name} of {found.owner}"))

    def _shape(self, index: int, parameter: Tensor) -> Tensor:
        if index not in self._shapes:
            found = self.appeared[index]
            origin = f"{found.name} of {found.owner}, which another rank makes"
            self._shapes[index] = ParameterShape.in_place_of(parameter, origin, self)
        return self._shapes[index]


def _leave_remote(
    module: nn.Module, blueprint: Blueprint, local_stages: frozenset[int], places: Sequence[str]
) -> None:
    """Let what other ranks own be shapes, a tied weight under all its names."""
    _refuse_missing(module, blueprint, local_stages)
    slots = parameters_in(module)
    shown = {
        id(slot.tensor): slot.tensor for slot in slots if blueprint.owners[slot.name] & local_stages
    }
    for slot in slots:
        if id(slot.tensor) in shown:
            found = shown[id(slot.tensor)]
        else:
            place = " and ".join(places[stage] for stage in sorted(blueprint.owners[slot.name]))
            origin = f"{slot.name} (of {place})"
            found = RemoteTensor.standing_for(slot, origin, slot.tensor.device)
            shown[id(slot.tensor)] = found
        slot.module.__dict__[slot.kind][slot.attribute] = found


def _refuse_missing(module: nn.Module, blueprint: Blueprint, local_stages: frozenset[int]) -> None:
    """Refuse what is not as the blueprint says.

    Raises:
        ValueError: Says what.
    """
    untied = tied_names(module).items() ^ blueprint.first_names.items()
    if untied:
        raise ValueError(_explain_other(min(untied)[0]))
    for slot in find_slots(module):
        if slot.name not in blueprint.owners:
            raise ValueError(_explain_other(slot.name))
        if blueprint.owners[slot.name] & local_stages and isinstance(slot.tensor, ShapeOnly):
            raise ValueError(_explain_missing(slot, slot.tensor))
        if blueprint.owners[slot.name] & local_stages and slot.tensor.is_meta:
            raise ValueError(f"{slot.name} is on the meta device after configure_model: {_FILL}")


def _explain_missing(slot: Slot, shape: ShapeOnly) -> str:
    origins = ", ".join(sorted(shape.origins)[:3])
    return f"{slot.name} is made from {origins}: {_ADVICE}"


def _explain_other(name: str) -> str:
    return (
        f"configure_model runs twice from the same state, and has not made the same parameters: "
        f"{name}; what it makes may not depend on weights' values, files or clocks"
    )


_FILL = (
    "make it without torch.device('meta'), of which each rank has its part only anyway, or give it "
    "memory and values there (to_empty, then the model's own initialization)"
)
_ADVICE = (
    "so that no rank can make it alone in configure_model: make that part in __init__, or give it "
    "a value of its own"
)
