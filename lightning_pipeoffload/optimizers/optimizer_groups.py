"""Which parameters are in the groups of optimizers, by name, and in their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

GroupNames = list[list[str]]


def name_groups(optimizers: Sequence[Optimizer], module: nn.Module) -> list[GroupNames]:
    """Name the parameters in each group of each optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def fill_groups(
    optimizers: Sequence[Optimizer], module: nn.Module, names: Sequence[GroupNames]
) -> None:
    """Put the parameters of these names into the groups of each optimizer."""
    parameters = dict(module.named_parameters())
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in members]


def forget_states(optimizer: Optimizer, is_forgotten: Callable[[Tensor], bool]) -> None:
    """Let an optimizer forget what it knows of some parameters."""
    for parameter in [p for p in optimizer.state if is_forgotten(p)]:
        del optimizer.state[parameter]
