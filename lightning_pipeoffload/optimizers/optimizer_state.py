"""An optimizer's groups and state in the plain optimizer's layout, by number or by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.narrowed_optimizer import OptimizerPartition
from lightning_pipeoffload.runtime import read_stored

GroupNames = list[list[str]]


def name_groups(optimizers: Sequence[Optimizer], module: nn.Module) -> list[GroupNames]:
    """Name the parameters in each group of each optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def set_group_parameters(
    optimizers: Sequence[Optimizer], module: nn.Module, names: Sequence[GroupNames]
) -> None:
    """Put the parameters of these names into the groups of each optimizer."""
    parameters = dict(module.named_parameters())
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in members]


def plain_state_dict(
    optimizer: Optimizer, names: GroupNames, states: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state dict that the optimizer of the plain module would have.

    Args:
        optimizer: The optimizer of one rank's parameters, with the options of the groups.
        names: The names of the whole module's parameters in each group.
        states: The states of parameters, by name.
    """
    order = [name for group in names for name in group]
    index = {name: place for place, name in enumerate(order)}
    places = [[index[name] for name in group] for group in names]
    return {
        "state": {index[name]: states[name] for name in order if name in states},
        "param_groups": replace_group_params(optimizer.param_groups, places),
    }


def replace_group_params(
    groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str | int]]
) -> list[dict[str, Any]]:
    """Return an optimizer's groups with these members."""
    return [{**group, "params": list(whole)} for group, whole in zip(groups, members, strict=True)]


def name_optimizer_state(state: Mapping[str, Any], names: GroupNames) -> dict[str, Any]:
    """Return a plain optimizer's state dict with names in place of the parameters' numbers.

    Args:
        state: The state of an optimizer that has all parameters.
        names: The names of the parameters in each group.
    """
    order = [name for group in names for name in group]
    return {
        "state": {order[place]: entry for place, entry in state["state"].items()},
        "param_groups": replace_group_params(state["param_groups"], names),
    }


def number_optimizer_state(state: Mapping[str, Any], names: GroupNames) -> dict[str, Any]:
    """Return a state dict with numbers in place of the parameters' names, as the plain one has.

    Args:
        state: An optimizer's state dict, by number or by name in any order.
        names: The names of the parameters in each group.

    Raises:
        ValueError: The state belongs to other parameters.
    """
    groups = state["param_groups"]
    _check_sizes(state, names)
    if not any(isinstance(name, str) for group in groups for name in group["params"]):
        return dict(state)
    for group, members in zip(groups, names, strict=True):
        others = set(group["params"]) - set(members)
        if others:
            raise ValueError(
                f"the checkpoint's optimizer has {sorted(others)[0]} in a group where this one has "
                f"{members[0]}; resume with the same configure_optimizers"
            )
    place_of = {
        name: place for place, name in enumerate(name for members in names for name in members)
    }
    numbers = [[place_of[name] for name in members] for members in names]
    return {
        "state": {place_of[name]: entry for name, entry in state["state"].items()},
        "param_groups": replace_group_params(groups, numbers),
    }


def _check_sizes(state: Mapping[str, Any], names: GroupNames) -> None:
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != [len(group) for group in names]:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {saved} parameters, this one of "
            f"{[len(group) for group in names]}; resume with the same configure_optimizers"
        )


def load_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    names: GroupNames,
    parameters: Mapping[str, Tensor],
    shares: OptimizerPartition | None = None,
) -> None:
    """Load this rank's part of a plain optimizer's state dict.

    Args:
        optimizer: The optimizer of this rank's parameters.
        state: The state of an optimizer of the whole module.
        names: The names of the whole module's parameters in each group.
        parameters: This rank's parameters, by name.
        shares: The parameters of each replica; None: all replicas step all.

    Raises:
        ValueError: The state belongs to other groups.
    """
    state = number_optimizer_state(state, names)
    place_of = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    local: dict[int, Any] = {}
    groups = []
    for group, members, local_group in zip(
        state["param_groups"], names, optimizer.param_groups, strict=True
    ):
        for index, name in zip(group["params"], members, strict=True):
            if name in parameters and index in state["state"]:
                parameter = parameters[name]
                if shares is None or shares.is_own(parameter):
                    local[place_of[id(parameter)]] = state["state"][index]
        groups.append({**group, "params": [place_of[id(p)] for p in local_group["params"]]})
    optimizer.load_state_dict({"state": local, "param_groups": groups})
    read_stored_states(optimizer)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def read_stored_states(optimizer: Optimizer) -> None:
    """Read the state tensors that are still in a checkpoint's file."""
    for state in optimizer.state.values():
        if isinstance(state, dict):
            state.update({name: read_stored(value) for name, value in state.items()})


def move_state_to_parameters(optimizer: Optimizer) -> None:
    """Move an optimizer's state to its parameters' devices; step counts stay on the host."""
    optimizer.load_state_dict(optimizer.state_dict())
