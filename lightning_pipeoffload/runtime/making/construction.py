"""Constructs a module in two runs, so that a rank allocates only values that its stages need.

The first run, the blueprint, makes shapes. It finds the chain of blocks, its cut, and the stages
that need each parameter, by the order in which parameters appear. Then all state is restored. The
second run makes the values that the rank needs. It draws the random numbers of all other values
too, and discards them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeoffload.runtime.cut import (
    BlockChain,
    CallOrder,
    SegmentCosts,
    Stage,
    StageMemoryLimits,
    StepRecord,
    costs_by_size,
    cut,
    find_chain,
    find_segment_uses,
)
from lightning_pipeoffload.runtime.making.registered_parameters import (
    ParameterRegistration,
    ParameterShape,
    RegisteredParameters,
    canonical_names,
    parameter_slots,
)
from lightning_pipeoffload.runtime.shapes import (
    RemoteTensor,
    ShapeOnly,
    StepRules,
    ValueNeededError,
    has_known_draw_count,
    local_part,
    shape_only_leaves,
    sync_layer_quant_state,
    written_arguments,
)
from lightning_pipeoffload.runtime.users_code import (
    Slot,
    find_slots,
    in_brackets,
    restoring_attributes,
    running_frames,
    running_user_line,
    users_line,
)

log = logging.getLogger(__name__)
aten = torch.ops.aten

Stages = frozenset[int]


@dataclass(frozen=True)
class Blueprint:
    """The assignment of a module's parameters to stages, found before any has a value.

    Attributes:
        appeared: The parameters in the order in which they appear.
        needed: The stages that need each of these parameters during construction.
        counts: The number of blocks of each stage.
        first_names: The first name of each parameter, by each of its names.
        owners: The stages that own each parameter and buffer afterwards, by name.
    """

    appeared: Sequence[ParameterRegistration]
    needed: Sequence[Stages]
    counts: Sequence[int]
    first_names: dict[str, str]
    owners: dict[str, Stages]


# The first run


def make_blueprint(
    module: nn.Module,
    configure: Callable[[], object],
    stage_ranks: Sequence[int],
    blocks: str | Sequence[str] | None = None,
    split: str | Sequence[int] = "auto",
    slowness: Sequence[float] = (),
    memory: Sequence[float] = (),
) -> Blueprint | None:
    """Run ``configure`` on shapes, and restore all state.

    Args:
        module: The user's module.
        configure: Makes its layers.
        stage_ranks: The rank of each stage.
        blocks: See :func:`.block_chain.find_chain`.
        split: See :func:`.partition.cut`.
        slowness: See there.
        memory: Bytes of each stage's device; (): all have as many.

    Returns:
        None if it makes no parameters, or reads the value of one: then each rank has to make all.

    Raises:
        ValueError: The module cannot be cut, or reads a whole model from files.
    """
    with restoring_attributes(module):
        draft = _BlueprintRun(module)
        try:
            with draft.tracking_parameters():
                configure()
        except ValueNeededError as error:
            if not draft.indices(error.origins):
                raise
            log.warning(
                "configure_model reads a value: %s%s, so every rank makes the whole module first; "
                "to make only its own part on each rank, do not read values, or compute in place "
                "(parameter.mul_(...))",
                error,
                in_brackets(users_line(error)),
            )
            return None
        return draft.build_blueprint(stage_ranks, blocks, split, slowness, memory)


class _BlueprintRun(RegisteredParameters):
    """The first run, which makes shapes; parameters of ``module`` become shapes too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._module = module
        self.rules = StepRules(observe=self._observe)
        self._read: set[str] = set()
        self._sources: dict[int, frozenset[str]] = {}
        for slot in parameter_slots(module):
            index = self.index_of(slot.tensor)
            if index is not None:
                shape = self.keep_or_replace(index, slot.tensor)
                slot.put(shape)

    @override
    def keeps_value(self, index: int, parameter: Tensor) -> bool:
        _refuse_pretrained()
        # Remote tensors of an earlier run stay.
        return index < self.num_found and isinstance(parameter, RemoteTensor)

    @override
    def label(self, index: int) -> str:
        return f"{super().label(index)} ({index})"

    @override
    def record_sources(self, index: int, origins: frozenset[str]) -> None:
        self._sources[index] = origins

    def _observe(self, func: torch._ops.OpOverload, args: tuple[Any, ...], _: Any) -> None:
        """Record the parameters that an operation reads but does not write; detach() reads none."""
        _refuse_value_dependent_draws(func, args)
        if func is not aten.detach.default:
            written = [*shape_only_leaves([*written_arguments(func, args)])]
            written_origins = frozenset[str]().union(*(leaf.origins for leaf in written))
            for leaf in shape_only_leaves(args):
                self._read |= leaf.origins - written_origins

    def indices(self, origins: Set[str]) -> set[int]:
        """Return the indices of the parameters with these origins."""
        return {index for index, shape in self._shapes.items() if shape.origins & origins}

    def _index_in(self, slot: Slot) -> int | None:
        index, tensor = self.index_of(slot.tensor), local_part(slot.tensor)
        if index is None and isinstance(tensor, ParameterShape):  # made by to_empty, or divided
            return min(self.indices(tensor.origins), default=None)
        return index

    def build_blueprint(
        self,
        stage_ranks: Sequence[int],
        blocks: str | Sequence[str] | None,
        split: str | Sequence[int],
        slowness: Sequence[float],
        memory: Sequence[float],
    ) -> Blueprint | None:
        """Return the blueprint of the run; None if it has made no parameters."""
        indices = {slot.name: self._index_in(slot) for slot in parameter_slots(self._module)}
        registered = {name: index for name, index in indices.items() if index is not None}
        if all(index < self.num_found for index in registered.values()):
            return None
        chain, segments, costs = chain_and_costs_by_size(self._module, blocks)
        memory_limits = StageMemoryLimits.of_parameters(costs.parameters, memory)
        stages = cut(chain, costs, stage_ranks, split, slowness, memory_limits)
        owners = self._find_owners(segments, stages)
        return Blueprint(
            self.appeared,
            self._find_needing_stages(registered, owners, len(stages)),
            [len(stage.blocks) for stage in stages],
            canonical_names(self._module),
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

    def _find_needing_stages(
        self, indices: Mapping[str, int], owners: Mapping[str, Stages], num_stages: int
    ) -> list[Stages]:
        """Return the stages that need each parameter, including stages of tensors computed from it.

        All stages need a parameter that is read and then dropped, since others may be computed from
        it, and a parameter that buffers are computed from.
        """
        everywhere = frozenset(range(num_stages))
        of_all = self.indices(self._read) - {*indices.values()}
        for slot in find_slots(self._module):
            if slot.kind == "_buffers" and isinstance(slot.tensor, ShapeOnly):
                of_all |= self.indices(slot.tensor.origins)
        needed = [everywhere if i in of_all else frozenset() for i in range(len(self.appeared))]
        for name, index in indices.items():
            needed[index] |= owners[name]
        for index in reversed(self._sources):
            for source in self.indices(self._sources[index]):
                needed[source] |= needed[index]
        return needed


def _refuse_value_dependent_draws(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """Raise an error if the number of random numbers that an operation draws depends on values."""
    if not has_known_draw_count(func):
        origins = (leaf.origins for leaf in shape_only_leaves(args))
        raise ValueNeededError(f"{func.overloadpacket.__name__}()", frozenset().union(*origins))


def _refuse_pretrained() -> None:
    """Raise ``ValueError`` if a running function reads a whole model on every rank."""
    if any(frame.f_code.co_name == "from_pretrained" for frame in running_frames()):
        raise ValueError(
            f"from_pretrained in configure_model reads the whole model on every rank"
            f"{in_brackets(running_user_line())}: make the model from its configuration "
            f"(from_config) and call lightning_pipeoffload.load_weights(self, path), which reads "
            f"what each rank owns"
        )


def chain_and_costs_by_size(
    module: nn.Module, blocks: str | Sequence[str] | None = None
) -> tuple[BlockChain, dict[str, set[int]], SegmentCosts]:
    """Estimate the work of a module in parts, before any step has run; see :func:`make_blueprint`.

    Returns:
        The blocks, the segments that need each parameter and buffer, by name, and their costs.
    """
    chain, slots = find_chain(module, blocks), find_slots(module)
    segments = find_segment_uses(slots, chain, StepRecord(CallOrder.each_block_once(len(chain))))
    return chain, segments, costs_by_size(slots, chain, segments)


# The second run


@contextmanager
def constructing_local_stages(
    module: nn.Module, blueprint: Blueprint, local_stages: Collection[int], places: Sequence[str]
) -> Iterator[None]:
    """Construct layers within the context, with only the values that this rank needs.

    Args:
        module: The user's module, in the state in which the blueprint was made.
        blueprint: The blueprint of the code that runs within the context.
        local_stages: The stages of this rank.
        places: Stage and rank of each stage, for messages.

    Raises:
        ValueError: The code differs from the first run, or computes a value from a remote
            parameter.
    """
    parameters = _LocalStageParameters(module, blueprint, frozenset(local_stages))
    try:
        with parameters.tracking_parameters():
            yield
    except ValueNeededError as error:
        raise ValueError(f"{error}{in_brackets(users_line(error))}, {_ADVICE}") from error
    parameters.check_complete()
    _replace_remote_tensors(module, blueprint, frozenset(local_stages), places)


class _LocalStageParameters(RegisteredParameters):
    """The second run, which makes values for some stages only."""

    rules = StepRules()

    def __init__(self, module: nn.Module, blueprint: Blueprint, local_stages: Stages) -> None:
        super().__init__(module)
        self._blueprint = blueprint
        self._local_stages = local_stages

    def check_complete(self) -> None:
        """Raise ``ValueError`` if the first run had more parameters."""
        if len(self.appeared) < len(self._blueprint.appeared):
            raise ValueError(_explain_mismatch(self._blueprint.appeared[len(self.appeared)].name))

    @override
    def keeps_value(self, index: int, parameter: Tensor) -> bool:
        if self._blueprint.appeared[index : index + 1] != [self.appeared[index]]:
            raise ValueError(_explain_mismatch(super().label(index)))
        return index < self.num_found or bool(self._blueprint.needed[index] & self._local_stages)

    @override
    def label(self, index: int) -> str:
        return f"{super().label(index)}, which another rank makes"


def _replace_remote_tensors(
    module: nn.Module, blueprint: Blueprint, local_stages: Stages, places: Sequence[str]
) -> None:
    """Replace tensors of other ranks with remote tensors; a tied weight under all its names."""
    _refuse_blueprint_mismatch(module, blueprint, local_stages)
    slots = parameter_slots(module)
    by_shape: dict[int, Tensor] = {
        id(slot.tensor): slot.tensor for slot in slots if blueprint.owners[slot.name] & local_stages
    }
    for slot in slots:
        key = id(slot.tensor)
        if key not in by_shape:
            place = " and ".join(places[stage] for stage in sorted(blueprint.owners[slot.name]))
            origin = f"{slot.name} (of {place})"
            by_shape[key] = RemoteTensor.standing_for(slot, origin, slot.tensor.device)
        slot.put(by_shape[key])
        sync_layer_quant_state(slot)


def _refuse_blueprint_mismatch(
    module: nn.Module, blueprint: Blueprint, local_stages: Stages
) -> None:
    """Raise ``ValueError`` for a tensor that differs from the blueprint."""
    untied = canonical_names(module).items() ^ blueprint.first_names.items()
    if untied:
        raise ValueError(_explain_mismatch(min(untied)[0]))
    for slot in find_slots(module):
        if slot.name not in blueprint.owners:
            raise ValueError(_explain_mismatch(slot.name))
        if not blueprint.owners[slot.name] & local_stages:
            continue
        if isinstance(slot.tensor, ShapeOnly):
            origins = ", ".join(sorted(slot.tensor.origins)[:3])
            raise ValueError(f"{slot.name} is made from {origins}: {_ADVICE}")
        if slot.tensor.is_meta:
            raise ValueError(f"{slot.name} is on the meta device after configure_model: {_FILL}")


def _explain_mismatch(name: str) -> str:
    return (
        f"configure_model runs twice from the same state, but made different parameters: {name}; "
        f"the parameters may not depend on weights' values, files or clocks"
    )


_FILL = (
    "make it without torch.device('meta'), since each rank has only its own part anyway, or give "
    "it memory and values there (load_weights, or to_empty and the model's own initialization)"
)
_ADVICE = (
    "so that no rank can make it alone in configure_model: make that part in __init__, or give it "
    "a value of its own"
)
