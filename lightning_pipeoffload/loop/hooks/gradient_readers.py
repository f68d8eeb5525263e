"""Which of the user's hooks may look at gradients: read off what they are compiled to."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from lightning_pipeoffload.runtime.users_code.libraries import is_foundations

# They name gradients, but do not ask what one is.
_HARMLESS = frozenset((
    "no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad",
    "requires_grad_", "zero_grad", "optimizer_zero_grad", "on_before_zero_grad", "clip_gradients",
    "configure_gradient_clipping", "gradient_clip_val", "gradient_clip_algorithm",
    "accumulate_grad_batches",
))  # fmt: skip


def may_read_gradients(owner: object, hook: str, module: object) -> bool:
    """Whether a hook, or a function that it calls, names a gradient; yes where it cannot be seen.

    Args:
        owner: The owner of the hook.
        hook: The name of the hook.
        module: The user's module, whose methods a callback may call.
    """
    left = [inspect.unwrap(getattr(owner, hook))]
    seen: set[CodeType] = set()
    while left:
        code = getattr(left[-1], "__code__", None)
        function = left.pop()
        if not isinstance(code, CodeType):
            return True
        if code not in seen:
            seen.add(code)
            names = set(_names_in(code))
            if any("grad" in name for name in names - _HARMLESS):
                return True
            left.extend(_functions_called(function, names, (owner, module)))
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif constant == "grad":
            yield constant


def _functions_called(function: Any, names: set[str], owners: tuple[object, ...]) -> Iterator[Any]:
    """Yield what of a user's code may be called by these names."""
    known = inspect.unwrap(function).__globals__
    for name in names:
        places = [inspect.getattr_static(owner, name, None) for owner in owners]
        for found in (*places, known.get(name)):
            yield from _functions_of(found)


def _functions_of(found: Any) -> Iterator[Any]:
    """Yield a function itself, of a property its getter, of an object or class all methods."""
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    if found is None or is_foundations(_home_of(found)):
        return
    if inspect.isfunction(found):
        yield found
    elif not inspect.ismodule(found):
        kind = found if isinstance(found, type) else type(found)
        if not is_foundations(kind.__module__):
            yield from (part for part in vars(kind).values() if inspect.isfunction(part))


def _home_of(found: Any) -> str:
    return getattr(found, "__module__", None) or type(found).__module__
