"""Another optimizer like the user's: of the same class and options, but of other parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.optimizers.narrowed_optimizer import narrows

# What every optimizer has, and what a scheduler leaves on the one whose rates it sets.
_OF_EVERY_OPTIMIZER = {*vars(Optimizer([torch.ones(1)], {})), "step", "_opt_called"}
# Steps of a lower learning rate, of a warm-up's first say, may move no number of half precision.
_LEAST_RATE = 1.0

MakeMembers = Callable[[torch.dtype], list[nn.Parameter]]


class NotRebuiltError(Exception):
    """There is no knowing how the user's optimizer was made."""


def optimizer_like(optimizer: Any, make_members: MakeMembers) -> Any:
    """Make an optimizer of the same class and options; those inside another one likewise.

    Args:
        optimizer: The user's optimizer; another one may be inside. Small learning rates become
            larger.
        make_members: A function that makes the parameters of a group, of a type. Groups whose
            options only differ in numbers are one.

    Raises:
        NotRebuiltError: The constructor takes what the optimizer does not keep, or keeps with the
            tensors that it is for.
    """
    _refuse_changed_step(optimizer)
    kinds = _kinds_of_groups(optimizer)
    groups = [{**options, "params": make_members(dtype)} for options, dtype in kinds]
    made = type(optimizer)(**_arguments(optimizer, groups, make_members))
    for group, (options, _) in zip(made.param_groups, kinds, strict=True):
        group.update(copy.deepcopy(options))
    for name, value in vars(optimizer).items():
        if name not in _OF_EVERY_OPTIMIZER and not _holds_tensors(value):
            setattr(made, name, copy.deepcopy(value))
    return made


def described(optimizer: Any) -> str:
    """Describe what an optimizer goes by; "" where that is more than its class and its groups.

    Raises:
        NotRebuiltError: The optimizer's step is not that of its class.
    """
    _refuse_changed_step(optimizer)
    options = repr(_kinds_of_groups(optimizer))
    is_all = vars(optimizer).keys() <= _OF_EVERY_OPTIMIZER and " at 0x" not in options
    return options if is_all else ""


def _refuse_changed_step(optimizer: Any) -> None:
    own = vars(optimizer).get("step")  # a scheduler's, which only counts, names what it wraps
    if own is not None and inspect.unwrap(own) is not inspect.unwrap(type(optimizer).step):
        raise NotRebuiltError("its step has been replaced")
    # Private: hooks have no other list, and may reach for any parameter that they know.
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        for hook in getattr(optimizer, hooks, {}).values():
            if narrows(hook):  # of a fit before this one
                continue
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise NotRebuiltError(f"its step has a hook, {name}")


def _kinds_of_groups(optimizer: Any) -> list[tuple[dict[str, Any], torch.dtype]]:
    """Return options and type of the groups that differ in more than numbers."""
    kinds: dict[str, tuple[dict[str, Any], torch.dtype]] = {}
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        options.pop("initial_lr", None)  # a scheduler's
        rate = options.get("lr")
        if isinstance(rate, float | int | Tensor) and rate < _LEAST_RATE:
            options["lr"] = 0 * rate + _LEAST_RATE
        dtype = next((p.dtype for p in group["params"]), torch.get_default_dtype())
        kinds.setdefault(repr([dtype, *map(_kind_of_option, options.items())]), (options, dtype))
    return list(kinds.values())


def _kind_of_option(option: tuple[str, Any]) -> tuple[str, Any]:
    name, value = option
    return name, bool(value) if isinstance(value, float | int) else value


def _arguments(
    optimizer: Any, groups: list[dict[str, Any]], make_members: MakeMembers
) -> dict[str, Any]:
    """Find what the constructor was given: in options of groups, else in attributes."""
    known = {**getattr(optimizer, "defaults", {}), **groups[0]}
    kept = vars(optimizer)
    arguments: dict[str, Any] = {}
    for parameter in _constructor_parameters(type(optimizer)):
        name = parameter.name
        held = kept.get(name, kept.get(f"_{name}", parameter.empty))
        if _is_optimizer(held):
            arguments[name] = optimizer_like(held, make_members)
        elif isinstance(held, list | tuple) and held and all(map(_is_optimizer, held)):
            arguments[name] = [optimizer_like(inner, make_members) for inner in held]
        elif not arguments:
            arguments[name] = groups if len(groups) > 1 else groups[0]["params"]
        elif name in known:
            arguments[name] = copy.deepcopy(known[name])
        elif held is not parameter.empty and not _holds_tensors(held):
            arguments[name] = copy.deepcopy(held)
        elif held is not parameter.empty or parameter.default is parameter.empty:
            raise NotRebuiltError(f"its constructor takes {name}, which it does not keep as given")
    return arguments


def _constructor_parameters(kind: type) -> Iterator[inspect.Parameter]:
    """Yield what a class's constructor takes by name, its bases' too where it hands them on."""
    seen: set[str] = set()
    for base in inspect.getmro(kind):
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        yield from (p for p in named if p.name not in seen)
        seen |= {p.name for p in named}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Optimizer) or (
        hasattr(value, "param_groups") and not isinstance(value, type)
    )


def _holds_tensors(value: Any) -> bool:
    """Whether tensors, or what has some, hang on a value."""
    left, seen = [value], set()
    while left:
        part = left.pop()
        if isinstance(part, Tensor | nn.Module) or _is_optimizer(part):
            return True
        if id(part) not in seen:
            seen.add(id(part))
            left.extend(_parts_of(part))
    return False


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or ()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [] if isinstance(value, type) else list(getattr(value, "__dict__", {}).values())
