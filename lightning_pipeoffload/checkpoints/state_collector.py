"""Brings the parts of the module and its optimizers together on global rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.optimizer_groups import GroupNames
from lightning_pipeoffload.optimizers.optimizer_state import groups_with, plain_layout
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.transport import blaming_peers


class StateCollector:
    """Gathers states over the ranks of one pipeline.

    Args:
        pipeline: This rank's part of the module.
        group: The pipeline's processes.
    """

    def __init__(self, pipeline: Pipeline, group: PipelineGroup) -> None:
        self._pipeline = pipeline
        self._ranks = group
        self._global_ranks = group.global_ranks
        self._root = group.root

    def module_state(self, whole: bool) -> dict[str, Any]:
        """Return the state dict under the plain module's keys, in its order.

        What this rank is not the one to write is shape-only.

        Args:
            whole: Whether global rank 0 is to have all of it.
        """
        mine = self._part()
        with blaming_peers("lost a rank while collecting the module's state"):
            state = {}
            for name, (owner, shape) in self._list_entries(mine).items():
                value = mine[name] if owner == self._ranks.global_rank else shape
                state[name] = self._ranks.bring(value, owner) if whole else value
            return state

    def _part(self) -> dict[str, Any]:
        """Return the entries that this rank can write: its own, and what belongs to no stage."""
        state = self._pipeline.module.state_dict()
        owners = {name: self._pipeline.tensors.owner_of(name) for name in state}
        return {
            name: value
            for name, value in state.items()
            if owners[name] in (None, self._ranks.rank) and not isinstance(value, ShapeOnly)
        }

    def _list_entries(self, mine: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
        """Say of every entry which global rank writes it (the root, if it can), and its shape."""
        listed = self._ranks.gather({name: _to_meta(value) for name, value in mine.items()})
        by_rank = sorted(zip(self._global_ranks, listed, strict=True), reverse=True)
        found = {
            name: (rank, value)
            for rank, part in by_rank
            for name, value in shapes_of(part, rank).items()
        }
        place = {name: place for place, name in enumerate(self._pipeline.tensors.names)}
        return {name: found[name] for name in sorted(found, key=lambda n: place.get(n, len(place)))}

    def optimizer_state(self, optimizer: Optimizer, names: GroupNames) -> dict[str, Any]:
        """Return the plain optimizer's state dict; elsewhere than on global rank 0 only the groups.

        Args:
            optimizer: The optimizer of this rank's parameters.
            names: The names of the whole module's parameters in each of its groups.
        """
        local = self._named_state(optimizer)
        parts: list[Any] | None = None
        if self._ranks.is_root:
            parts = [None] * len(self._global_ranks)
        with blaming_peers("lost a rank while collecting an optimizer's state"):
            dist.gather_object(local, parts, dst=self._root, group=self._ranks.host_group)
        states = {name: state for part in parts or () for name, state in part.items()}
        return plain_layout(optimizer, names, states)

    def optimizer_part(self, optimizer: Optimizer, names: GroupNames) -> dict[str, Any]:
        """Return what is this rank's to write of the plain optimizer's state, by parameter name.

        Args:
            optimizer: The optimizer of this rank's parameters.
            names: The names of the whole module's parameters in each of its groups.
        """
        state = self._named_state(optimizer)
        part: dict[str, Any] = {}
        anything = self._ranks.agree(bool(state), unanimous=False)
        if state or not anything:
            part["state"] = state
        if self._ranks.is_root:
            part["param_groups"] = groups_with(optimizer.param_groups, names)
        return part

    def _named_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        parameters = self._pipeline.tensors.canonical_parameters()
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        return {name_of[id(p)]: _on_cpu(state) for p, state in optimizer.state.items()}


def shapes_of(state: Mapping[str, Any], global_rank: int) -> dict[str, Any]:
    """Return a state dict's entries without their values, which are on ``global_rank``."""
    host = torch.device("cpu")
    shapes = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            origin = frozenset((f"{name} (on global rank {global_rank})",))
            shapes[name] = ShapeOnly(_to_meta(value), host, origin)
    return shapes


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
