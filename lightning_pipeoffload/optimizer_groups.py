"""Which parameters are in the groups of optimizers, by name, by shape or by who owns them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_pipeoffload.runtime.shape_only import ShapeOnly

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
