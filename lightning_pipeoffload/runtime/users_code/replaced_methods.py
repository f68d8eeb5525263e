"""Replaces methods of one instance: special methods by a subclass, hooks by an attribute.

Python looks up special methods on the type, so an attribute of the instance cannot replace them; a
wrapper would be visible in the user's code and in checkpoint keys. So the subclass has the name of
the instance's class; attributes that code sets on ``type(instance)`` are set on the original class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, update_wrapper
from typing import Any


def subclass_like(plain: type[Any], methods: Mapping[str, Any], *marks: type[Any]) -> type[Any]:
    """Make a subclass of ``plain`` with its name, for ``instance.__class__``.

    ``plain.__init_subclass__`` is not called: it may register the subclass, or wrap its methods, as
    in layers of Hugging Face, which would change ``plain`` itself since attributes are set there.
    """
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    metaclass: Any = type(plain)
    subclass: type[Any] = _forwarding_metaclass(metaclass)(
        plain.__name__, (plain, *marks), {**methods, **names}
    )
    return subclass


class _SkipsInitSubclass:
    """Precedes the original class in the order of classes, so that its method below is called."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing: replaces that of the original class."""


@cache
def _forwarding_metaclass(plain: Any) -> Any:
    def mro(cls: type[Any]) -> list[type[Any]]:
        first, *others = plain.mro(cls)
        return [first, _SkipsInitSubclass, *others]

    def assign(cls: type[Any], name: str, value: Any) -> None:
        owner = cls if _is_special_name(name) else cls.__bases__[0]
        plain.__setattr__(owner, name, value)

    def delete(cls: type[Any], name: str) -> None:
        owner = cls if _is_special_name(name) else cls.__bases__[0]
        plain.__delattr__(owner, name)

    methods = {"mro": mro, "__setattr__": assign, "__delattr__": delete}
    return type(plain)(plain.__name__, (plain,), methods)


def _is_special_name(name: str) -> bool:
    return name.startswith(("__", "_abc_"))


def original_class(instance: object) -> type[Any]:
    """Return the original class of an instance that has one of :func:`subclass_like`."""
    return type(instance).__bases__[0]


class WrappedHook:
    """Replaces a hook among its owner's attributes; copies and pickles have the plain one.

    Args:
        owner: A module or callback.
        hook: The name of the hook.
        run: A function that is called with the plain hook and the arguments.
    """

    def __init__(self, owner: Any, hook: str, run: Callable[..., Any]) -> None:
        self._owner = owner
        self._hook = hook
        self._run = run
        self._plain = getattr(owner, hook)
        self._replaced = {hook: owner.__dict__[hook]} if hook in owner.__dict__ else {}
        update_wrapper(self, self._plain, updated=())
        owner.__dict__[hook] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._plain, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the hook of the owner's class."""
        return getattr, (self._owner, self._hook)

    def remove(self) -> None:
        """Restore the plain hook of the owner."""
        del self._owner.__dict__[self._hook]
        self._owner.__dict__.update(self._replaced)
