"""Records which modules draw random numbers in a trace, and whether for a shard of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.shapes.sharding import OF_SHARD
from lightning_pipeoffload.runtime.users_code import in_brackets, running_frames, running_user_line


def record_draw(
    drawing_modules: dict[nn.Module, bool],
    root: nn.Module,
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Record that the innermost running module draws random numbers, and whether for a shard.

    Tensor ranks must draw different numbers for shards, and equal ones for replicated tensors. So
    each module gets a random stream of one of these kinds.

    Args:
        drawing_modules: For each module that draws, whether it draws for a shard; updated.
        root: The user's module.
        func: The operation that draws.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: It draws for a shard from its own generator or outside of submodules, or one
            module draws for both kinds.
    """
    names = [argument.name for argument in func._schema.arguments]
    if not dict(zip(names, args, strict=False)).get("dropout_p", True):  # an attention without it
        return
    is_of_shard = any(getattr(leaf, "origins", frozenset()) >= OF_SHARD for leaf in leaves_of(args))
    module = _innermost_running_module(root)
    if kwargs.get("generator") is not None:
        if is_of_shard:
            _refuse_shard_draw(func, "by a generator of its own")
    elif module is None:
        if is_of_shard:
            _refuse_shard_draw(func, "outside of the modules inside it")
    elif drawing_modules.setdefault(module, is_of_shard) != is_of_shard:
        _refuse_shard_draw(func, "and for what all tensor ranks have, in one module")


def _innermost_running_module(root: nn.Module) -> nn.Module | None:
    for frame in running_frames():
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return None if module is root else module
    return None


def _refuse_shard_draw(func: torch._ops.OpOverload, why: str) -> None:
    raise ValueError(
        f"{func.overloadpacket.__name__}{in_brackets(running_user_line())} draws random numbers "
        f"for a shard of a layer {why}, so that tensor ranks cannot draw different ones there; "
        f"use a module of its own, such as torch.nn.Dropout, or set dropout to 0"
    )
