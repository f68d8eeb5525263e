"""A class for one instance, which goes by the name of the class that it had.

Python looks special methods up on the type, so an attribute of the instance does not replace them,
and another object around it would be seen by the user's code and in the names of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def subclass_like(plain: type[Any], methods: Mapping[str, Any], *marks: type[Any]) -> type[Any]:
    """Make a subclass of ``plain`` with its name, for ``instance.__class__``.

    Args:
        plain: the instance's own class.
        methods: of the subclass, by name.
        marks: further bases, to tell the class by.
    """
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (plain, *marks), {**methods, **names})


def own_class(instance: object) -> type[Any]:
    """Return the class of which :func:`subclass_like` has made the instance's present one."""
    return type(instance).__mro__[1]
