"""A subclass for one instance, with the name of its class.

Python looks special methods up on the type, so an attribute of the instance does not replace them,
and a wrapper would show in the user's code and in the names of checkpoints. Attributes that code
sets on ``type(instance)`` go to the original class.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any


def subclass_like(plain: type[Any], methods: Mapping[str, Any], *marks: type[Any]) -> type[Any]:
    """Make a subclass of ``plain`` with its name, for ``instance.__class__``."""
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    metaclass: Any = type(plain)
    made: type[Any] = _forwarding(metaclass)(plain.__name__, (plain, *marks), {**methods, **names})
    return made


@cache
def _forwarding(plain: Any) -> Any:
    def assign(cls: type[Any], name: str, value: Any) -> None:
        owner = cls if _is_pythons(name) else cls.__mro__[1]
        plain.__setattr__(owner, name, value)

    def delete(cls: type[Any], name: str) -> None:
        owner = cls if _is_pythons(name) else cls.__mro__[1]
        plain.__delattr__(owner, name)

    methods = {"__setattr__": assign, "__delattr__": delete}
    return type(plain)(plain.__name__, (plain,), methods)


def _is_pythons(name: str) -> bool:
    return name.startswith(("__", "_abc_"))


def own_class(instance: object) -> type[Any]:
    """Return the original class of an instance that has one of :func:`subclass_like`."""
    return type(instance).__mro__[1]
