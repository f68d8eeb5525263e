"""Brings the parts of the module and its optimizers together on global rank 0, and apart again.

Keys are the plain module's; an optimizer's state has the plain optimizer's layout. So a checkpoint
loads into the plain module, and into a pipeline of another size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.collectives import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.transport import blaming_peers


class StateCollector:
    """Gathers states over the ranks of one pipeline.

    Args:
        pipeline: this rank's part.
        group: the pipeline's processes.
    """

    def __init__(self, pipeline: Pipeline, group: PipelineGroup) -> None:
        self._pipeline = pipeline
        self._ranks = group
        self._group = group.host_group
        self._global_ranks = group.global_ranks
        self._root = group.root

    def module_state(self, whole: bool) -> dict[str, Any]:
        """Return the state dict under the plain module's keys, in its order.

        What this rank is not the one to write is shape-only.

        Args:
            whole: whether global rank 0 is to have all of it.
        """
        mine = self._part()
        with blaming_peers("lost a rank while collecting the module's state"):
            state = {}
            for name, (owner, shape) in self._list_entries(mine).items():
                value = mine[name] if owner == dist.get_rank() else shape
                state[name] = self._bring(value, owner) if whole else value
            return state

    def _part(self) -> dict[str, Any]:
        """Return the entries that this rank can write: its own, and what belongs to no stage."""
        state = self._pipeline.module.state_dict()
        owners = {name: self._pipeline.owner_of(name) for name in state}
        return {
            name: value
            for name, value in state.items()
            if owners[name] in (None, self._ranks.rank) and not isinstance(value, ShapeOnly)
        }

    def _list_entries(self, mine: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
        """Say of every entry which global rank writes it, and its shape; the root if it can."""
        listed = self._ranks.gather({name: _to_meta(value) for name, value in mine.items()})
        by_rank = sorted(zip(self._global_ranks, listed, strict=True), reverse=True)
        found = {
            name: (rank, value)
            for rank, part in by_rank
            for name, value in shapes_of(part, rank).items()
        }
        place = {name: place for place, name in enumerate(self._pipeline.names)}
        return {name: found[name] for name in sorted(found, key=lambda n: place.get(n, len(place)))}

    def _bring(self, value: Any, owner: int) -> Any:
        """Let the root have a value; the one that has it sends."""
        me = dist.get_rank()
        if not isinstance(value, Tensor) or me not in (owner, self._root):
            return value
        if owner == self._root:
            return value.cpu()
        if me == owner:
            dist.send(value.cpu().contiguous(), self._root, group=self._group)
            return value
        received = torch.empty(value.shape, dtype=value.dtype)
        dist.recv(received, owner, group=self._group)
        return received

    def optimizer_state(self, optimizer: Optimizer, names: list[list[str]]) -> dict[str, Any]:
        """Return the plain optimizer's state dict; elsewhere than on global rank 0 only the groups.

        Args:
            optimizer: of this rank's parameters.
            names: of the whole module's parameters in each of its groups.
        """
        local = self._named_state(optimizer)
        parts: list[Any] | None = None
        if dist.get_rank() == self._root:
            parts = [None] * len(self._global_ranks)
        with blaming_peers("lost a rank while collecting an optimizer's state"):
            dist.gather_object(local, parts, dst=self._root, group=self._group)
        states = {name: state for part in parts or () for name, state in part.items()}
        return _plain_layout(optimizer, names, states)

    def optimizer_part(self, optimizer: Optimizer, names: list[list[str]]) -> dict[str, Any]:
        """Return what is this rank's to write of the plain optimizer's state, by parameter name.

        Args:
            optimizer: of this rank's parameters.
            names: of the whole module's parameters in each of its groups.
        """
        state = self._named_state(optimizer)
        part: dict[str, Any] = {}
        anything = self._ranks.agree(bool(state), unanimous=False)
        if state or not anything:
            part["state"] = state
        if self._ranks.is_root:
            part["param_groups"] = _groups(optimizer, names)
        return part

    def _named_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        parameters = self._pipeline.canonical_parameters()
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        return {name_of[id(p)]: _on_cpu(state) for p, state in optimizer.state.items()}


def _plain_layout(
    optimizer: Optimizer, names: list[list[str]], states: Mapping[str, Any]
) -> dict[str, Any]:
    order = [name for group in names for name in group]
    index = {name: place for place, name in enumerate(order)}
    places = [[index[name] for name in group] for group in names]
    return {
        "state": {index[name]: states[name] for name in order if name in states},
        "param_groups": _groups(optimizer, places),
    }


def _groups(optimizer: Optimizer, members: Sequence[Sequence[str | int]]) -> list[dict[str, Any]]:
    """Return the optimizer's groups with these members."""
    return [
        {**group, "params": list(whole)}
        for group, whole in zip(optimizer.param_groups, members, strict=True)
    ]


def shapes_of(state: Mapping[str, Any], global_rank: int) -> dict[str, Any]:
    """Return a state dict's entries without their values, which are on ``global_rank``."""
    host = torch.device("cpu")
    shapes = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            origin = frozenset((f"{name} (on global rank {global_rank})",))
            shapes[name] = ShapeOnly(_to_meta(value), host, origin)
    return shapes


def name_optimizer_state(state: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Return a plain optimizer's state dict with names in place of the parameters' numbers.

    Args:
        state: of an optimizer that has all parameters.
        names: of the parameters in each group.
    """
    order = [name for group in names for name in group]
    groups = zip(state["param_groups"], names, strict=True)
    return {
        "state": {order[place]: entry for place, entry in state["state"].items()},
        "param_groups": [{**group, "params": list(members)} for group, members in groups],
    }


def load_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    names: list[list[str]],
    parameters: Mapping[str, Tensor],
) -> None:
    """Load what this rank owns of a plain optimizer's state dict.

    Args:
        optimizer: of this rank's parameters.
        state: of the whole.
        names: of the whole module's parameters in each group.
        parameters: this rank's, by name.

    Raises:
        ValueError: the state is of other groups.
    """
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != [len(group) for group in names]:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {saved} parameters, this one of "
            f"{[len(group) for group in names]}; resume with the same configure_optimizers"
        )
    place_of = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    local: dict[int, Any] = {}
    groups = []
    for group, members, own in zip(
        state["param_groups"], names, optimizer.param_groups, strict=True
    ):
        for index, name in zip(group["params"], members, strict=True):
            if name in parameters and index in state["state"]:
                local[place_of[id(parameters[name])]] = state["state"][index]
        groups.append({**group, "params": [place_of[id(p)] for p in own["params"]]})
    optimizer.load_state_dict({"state": local, "param_groups": groups})


def name_groups(optimizers: Sequence[Optimizer], module: nn.Module) -> list[list[list[str]]]:
    """Name the parameters in each group of each optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def fill_groups(
    optimizers: Sequence[Optimizer], module: nn.Module, names: list[list[list[str]]]
) -> None:
    """Put the parameters of these names into the groups of each optimizer."""
    parameters = dict(module.named_parameters())
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in members]


def forget_foreign(optimizers: Sequence[Optimizer]) -> None:
    """Let optimizers forget the shapes that stood for other ranks' parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not isinstance(p, ShapeOnly)]
        for parameter in [p for p in optimizer.state if isinstance(p, ShapeOnly)]:
            del optimizer.state[parameter]


def prune_optimizer(optimizer: Optimizer, kept: set[int]) -> None:
    """Let an optimizer forget the parameters whose id is not in ``kept``."""
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept]
    for parameter in [p for p in optimizer.state if id(p) not in kept]:
        del optimizer.state[parameter]


def load_module_state(
    module: nn.Module, state: Mapping[str, Any], names: list[str], strict: bool
) -> None:
    """Load what this rank owns of a whole state dict; ``strict`` is judged on the whole.

    Raises:
        RuntimeError: as ``Module.load_state_dict``.
    """
    missing, unexpected = set(names) - set(state), set(state) - set(names)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the checkpoint does not fit {type(module).__name__}: missing {sorted(missing)}, "
            f"unexpected {sorted(unexpected)}"
        )
    local = module.state_dict(keep_vars=True)
    module.load_state_dict({k: v for k, v in state.items() if k in local}, strict=False)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
