"""The first of two runs that make a module in parts: without values, to learn who needs which.

It finds the chain of blocks and how it is cut, and which stages need each parameter, by its place
in the order in which parameters appear. Then all is as it was before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeoffload.runtime.cut.block_chain import find_chain
from lightning_pipeoffload.runtime.cut.partition import (
    Stage,
    costs_by_size,
    cut,
    find_segments,
)
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.making.parameter_shape import ParameterShape
from lightning_pipeoffload.runtime.making.registered_parameters import (
    Appearance,
    RegisteredParameters,
    parameters_in,
    tied_names,
)
from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.shapes.operations import draws_by_shape
from lightning_pipeoffload.runtime.shapes.remote_tensor import RemoteTensor
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly, shape_only_leaves
from lightning_pipeoffload.runtime.shapes.step_rules import StepRules, ValueNeededError
from lightning_pipeoffload.runtime.users_code.snapshot import unchanged
from lightning_pipeoffload.runtime.users_code.sources import Generators
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot, find_slots
from lightning_pipeoffload.runtime.users_code.users_lines import (
    calling_line,
    in_brackets,
    running_frames,
    users_line,
)

log = logging.getLogger(__name__)

Stages = frozenset[int]
_MOST_ASKED = 32
_READS_VALUES = (
    "configure_model reads the values of many parameters (%s), so every rank makes the whole "
    "module first; leave that out, or compute in place (parameter.mul_(...)), for each rank to "
    "make its own part only"
)


@dataclass(frozen=True)
class Blueprint:
    """How a module is made in parts.

    Attributes:
        appeared: The parameters in the order in which they appear.
        needed: The stages that need each while the module is made.
        counts: The number of blocks of each stage.
        first_names: The first name of each parameter, by each of its names.
        owners: The stages that have each parameter and buffer from then on, by name.
    """

    appeared: Sequence[Appearance]
    needed: Sequence[Stages]
    counts: Sequence[int]
    first_names: dict[str, str]
    owners: dict[str, Stages]


def draw_blueprint(
    module: nn.Module,
    configure: Callable[[], object],
    stage_ranks: Sequence[int],
    blocks: str | Sequence[str] | None = None,
    split: str | Sequence[int] = "auto",
) -> Blueprint | None:
    """Run what makes a module, and leave everything as it was.

    Args:
        module: The user's.
        configure: Makes its layers.
        stage_ranks: The rank of each stage.
        blocks: See :func:`.block_chain.find_chain`.
        split: See :func:`.partition.cut`.

    Returns:
        What it showed; None: it makes no parameters, or reads the values of so many that each rank
        has to make all.

    Raises:
        ValueError: The module cannot be cut, or reads a whole model from files.
    """
    asked: set[int] = set()  # whose values something has asked for
    while True:
        with _as_before(module):
            draft = _Draft(module, asked)
            try:
                with draft.following():
                    configure()
            except ValueNeededError as error:
                more = draft.indices(error.origins) - asked
                if not more:
                    raise
                asked |= more
                if len(asked) > _MOST_ASKED:
                    log.warning(_READS_VALUES, users_line(error))
                    return None
                continue
            return draft.examine(stage_ranks, blocks, split)


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Give the module's attributes, and the generators, their state back."""
    with forked_randomness(), Generators(module).kept(), unchanged(module):
        yield


class _Draft(RegisteredParameters):
    """A run that makes shapes.

    Args:
        module: The user's; its parameters are shapes from now on.
        real: The places, in the order of appearance, of those that are to have values.
    """

    def __init__(self, module: nn.Module, real: set[int]) -> None:
        super().__init__(module)
        self._module = module
        self._real = real
        self.rules = StepRules(observe=_refuse_unknown_draws)
        self._labels: dict[str, int] = {}
        self._shapes: dict[int, Tensor] = {}
        for slot in parameters_in(module):
            index = self.index_of(slot.tensor)
            if index is not None and not isinstance(slot.tensor, RemoteTensor):
                shape = self._stand_in(index, slot.tensor)
                slot.module.__dict__[slot.kind][slot.attribute] = shape

    @override
    def take(self, index: int, parameter: Tensor) -> Tensor:
        _refuse_pretrained()
        is_left_remote = index < self.num_found and isinstance(parameter, RemoteTensor)
        if index in self._real or is_left_remote:
            return parameter
        return self._shape(index, parameter)

    @override
    def take_copy(self, index: int, parameter: Tensor) -> Tensor | None:
        is_real = index in self._real and not isinstance(parameter, ShapeOnly)
        return None if is_real else self._shape(index, parameter)

    def _index_in(self, slot: Slot) -> int | None:
        found = slot.tensor
        while isinstance(found, ParameterShape) and found.stands_in_for is not None:
            found = found.stands_in_for
        return self.index_of(found)

    def indices(self, origins: frozenset[str]) -> set[int]:
        """Return the places in the order of appearance that origins tell of."""
        return {self._labels[origin] for origin in origins if origin in self._labels}

    def examine(
        self,
        stage_ranks: Sequence[int],
        blocks: str | Sequence[str] | None,
        split: str | Sequence[int],
    ) -> Blueprint | None:
        """Say what the run has shown."""
        slots = {slot.name: slot for slot in parameters_in(self._module)}
        indices = {name: self._index_in(slot) for name, slot in slots.items()}
        known = {name: index for name, index in indices.items() if index is not None}
        if all(index < self.num_found for index in known.values()):
            return None
        chain = find_chain(self._module, blocks)
        segments = find_segments(self._module, chain, StepRecord(len(chain) + 1))
        costs = costs_by_size(self._module, chain, segments)
        stages = cut(chain, costs, stage_ranks, split)
        owners = self._find_owners(segments, stages)
        return Blueprint(
            self.appeared,
            self._find_needed(known, owners, len(stages)),
            [len(stage.blocks) for stage in stages],
            tied_names(self._module),
            owners,
        )

    def _find_owners(
        self, segments: Mapping[str, set[int]], stages: Sequence[Stage]
    ) -> dict[str, Stages]:
        everywhere = frozenset(range(len(stages)))
        return {
            slot.name: everywhere
            if slot.kind == "_buffers"
            else frozenset(s.index for s in stages if s.segments & segments[slot.name])
            for slot in find_slots(self._module)
        }

    def _find_needed(
        self, indices: Mapping[str, int], owners: Mapping[str, Stages], num_stages: int
    ) -> list[Stages]:
        """Say which stages need each parameter; what is dropped again may be what others copy."""
        everywhere = frozenset(range(num_stages))
        of_all = self._real | (set(range(len(self.appeared))) - {*indices.values()})
        for slot in find_slots(self._module):
            if slot.kind == "_buffers" and isinstance(slot.tensor, ShapeOnly):
                of_all |= self.indices(slot.tensor.origins)
        needed = [everywhere if i in of_all else frozenset() for i in range(len(self.appeared))]
        for name, index in indices.items():
            needed[index] |= owners[name]
        return needed

    def _shape(self, index: int, parameter: Tensor) -> Tensor:
        if index not in self._shapes:
            label = f"{self.appeared[index].name} of {self.appeared[index].owner} ({index})"
            self._labels[label] = index
            shape = ParameterShape.in_place_of(parameter, label, self)
            self._shapes[index] = shape
        return self._shapes[index]


def _refuse_unknown_draws(func: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> None:
    """Ask for the values on which it depends how many random numbers an operation draws."""
    if not draws_by_shape(func):
        origins = (leaf.origins for leaf in shape_only_leaves(args))
        raise ValueNeededError(f"{func.overloadpacket.__name__}()", frozenset().union(*origins))


def _refuse_pretrained() -> None:
    """Refuse what reads a whole model on every rank.

    Raises:
        ValueError: Such a function is running.
    """
    if any(frame.f_code.co_name == "from_pretrained" for frame in running_frames()):
        raise ValueError(
            f"from_pretrained in configure_model reads the whole model on every rank"
            f"{in_brackets(calling_line())}: make the model from its configuration (from_config) "
            f"and call lightning_pipeoffload.load_weights(self, path), which reads what each rank "
            f"owns"
        )
