"""The state of a module and its optimizers that are spread over ranks, as a checkpoint has it.

Keys are the plain module's; an optimizer's state has the plain optimizer's layout. So a checkpoint
loads into the plain module, and into a pipeline of another size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_pipeoffload.checkpoints.replica_values import States, states_of_replicas
from lightning_pipeoffload.checkpoints.value_places import shapes_of
from lightning_pipeoffload.optimizers.optimized_parameters import OptimizedParameters
from lightning_pipeoffload.optimizers.optimizer_state import (
    GroupNames,
    groups_with,
    load_optimizer_state,
    plain_layout,
)
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


class SplitState:
    """What a checkpoint has of a module that is split.

    Args:
        pipeline: This rank's part of the module.
        group: The pipeline's processes.
        parameters: The parameters of the optimizers.
    """

    def __init__(
        self, pipeline: Pipeline, group: PipelineGroup, parameters: OptimizedParameters
    ) -> None:
        self._pipeline = pipeline
        self._parameters = parameters
        self._group = group

    @property
    def is_split(self) -> bool:
        """Whether other ranks' parts have been left to them."""
        return self._pipeline.is_split

    def of_module(self) -> dict[str, Any]:
        """Return the state dict under the plain module's keys, in its order.

        What this rank is not the one to write is shape-only.
        """
        found = self._of_all(self._part())
        place = {name: place for place, name in enumerate(self._pipeline.tensors.names)}
        return {n: found[n] for n in sorted(found, key=lambda n: place.get(n, len(place)))}

    def _part(self) -> dict[str, Any]:
        """Return the entries that this rank can write: its own, and what belongs to no stage."""
        state = self._pipeline.module.state_dict()
        owners = {name: self._pipeline.tensors.owner_of(name) for name in state}
        return {
            name: value
            for name, value in state.items()
            if owners[name] in (None, self._group.rank) and not isinstance(value, ShapeOnly)
        }

    def _of_all(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Return all ranks' entries: values where this rank is the lowest that has one."""
        rank = self._group.global_rank
        listed = self._group.gather(shapes_of(mine, rank))
        parts = dict(zip(self._group.global_ranks, listed, strict=True))
        parts[rank] = mine
        found: dict[str, Any] = {}
        for writer in sorted(parts, reverse=True):
            found |= parts[writer]
        return found

    def of_optimizer(self, optimizer: Optimizer, by_name: bool) -> dict[str, Any]:
        """Return the plain optimizer's state; what other ranks have of it is shapes, or left out.

        Args:
            optimizer: One of the trainer's optimizers.
            by_name: Whether it is to be this rank's part, by the names of the parameters.
        """
        names = self._parameters.names_in(optimizer)
        mine = self._named_state(optimizer)
        if by_name:
            return self._part_of_optimizer(optimizer, names, mine)
        if self._parameters.shares_of(optimizer) is not None:
            mine = states_of_replicas(mine, self._group)
        return plain_layout(optimizer, names, self._of_all(mine))

    def _part_of_optimizer(
        self, optimizer: Optimizer, names: GroupNames, state: States
    ) -> dict[str, Any]:
        part: dict[str, Any] = {}
        anything = self._group.world.agree(bool(state), unanimous=False)
        if state or not anything:
            part["state"] = state
        if self._group.is_root:
            part["param_groups"] = groups_with(optimizer.param_groups, names)
        return part

    def _named_state(self, optimizer: Optimizer) -> States:
        parameters = self._pipeline.tensors.canonical_parameters()
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        return {name_of[id(p)]: state for p, state in optimizer.state.items()}

    def load_module(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load what this rank owns of a whole state dict; ``strict`` is judged on the whole.

        Raises:
            RuntimeError: Keys or shapes do not fit, as in ``Module.load_state_dict``.
        """
        module, names = self._pipeline.module, self._pipeline.tensors.names
        missing, unexpected = set(names) - set(state), set(state) - set(names)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the checkpoint does not fit {type(module).__name__}: missing {sorted(missing)}, "
                f"unexpected {sorted(unexpected)}"
            )
        own = self._own_keys()
        module.load_state_dict({k: v for k, v in state.items() if k in own}, strict=False)

    def _own_keys(self) -> set[str]:
        state = self._pipeline.module.state_dict(keep_vars=True)
        return {key for key, value in state.items() if not isinstance(value, ShapeOnly)}

    def load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what this rank owns of the plain optimizers' states.

        Raises:
            ValueError: The states are of other groups.
        """
        own = self._pipeline.tensors.canonical_parameters()
        for (optimizer, names), state in zip(self._parameters.named(), states, strict=True):
            shares = self._parameters.shares_of(optimizer)
            load_optimizer_state(optimizer, state, names, own, shares)
