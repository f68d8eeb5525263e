"""Tells each rank what the others have of the module and its optimizers, without the values."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_pipeoffload.checkpoints.replica_values import states_of_replicas
from lightning_pipeoffload.checkpoints.value_places import shapes_of
from lightning_pipeoffload.optimizers.optimizer_state import GroupNames, groups_with, plain_layout
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


class StateCollector:
    """Lists states over the ranks of one pipeline.

    Args:
        pipeline: This rank's part of the module.
        group: The pipeline's processes.
    """

    def __init__(self, pipeline: Pipeline, group: PipelineGroup) -> None:
        self._pipeline = pipeline
        self._ranks = group

    def module_state(self) -> dict[str, Any]:
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
            if owners[name] in (None, self._ranks.rank) and not isinstance(value, ShapeOnly)
        }

    def _of_all(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Return all ranks' entries: values where this rank is the lowest that has one."""
        rank = self._ranks.global_rank
        listed = self._ranks.gather(shapes_of(mine, rank))
        parts = dict(zip(self._ranks.global_ranks, listed, strict=True))
        parts[rank] = mine
        found: dict[str, Any] = {}
        for writer in sorted(parts, reverse=True):
            found |= parts[writer]
        return found

    def optimizer_state(
        self, optimizer: Optimizer, names: GroupNames, is_shared_out: bool
    ) -> dict[str, Any]:
        """Return the plain optimizer's state dict; what other ranks have of it is shape-only.

        Args:
            optimizer: The optimizer of this rank's parameters.
            names: The names of the whole module's parameters in each of its groups.
            is_shared_out: Whether each replica steps with a part of the parameters.
        """
        mine = self._named_state(optimizer)
        if is_shared_out:
            mine = states_of_replicas(mine, self._ranks)
        return plain_layout(optimizer, names, self._of_all(mine))

    def optimizer_part(self, optimizer: Optimizer, names: GroupNames) -> dict[str, Any]:
        """Return what is this rank's to write of the plain optimizer's state, by parameter name.

        Args:
            optimizer: The optimizer of this rank's parameters.
            names: The names of the whole module's parameters in each of its groups.
        """
        state = self._named_state(optimizer)
        part: dict[str, Any] = {}
        anything = self._ranks.world.agree(bool(state), unanimous=False)
        if state or not anything:
            part["state"] = state
        if self._ranks.is_root:
            part["param_groups"] = groups_with(optimizer.param_groups, names)
        return part

    def _named_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        parameters = self._pipeline.tensors.canonical_parameters()
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        return {name_of[id(p)]: state for p, state in optimizer.state.items()}
