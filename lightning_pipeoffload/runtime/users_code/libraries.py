"""Whose code something is: the user's, a library's, Python's own or ours."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path

_OURS = Path(__file__).parents[2]
_PYTHONS = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}
_FOUNDATIONS = {"torch", "torchmetrics", "lightning", _OURS.name}
# Of torch's objects those that draw have a state, and functools wraps what the user has.
_WITH_SOURCES = {"torch", "functools"}
_OPAQUE = {
    "builtins",
    "logging",
    "threading",
    "numpy",
    "torch",
    "functools",
    "lightning",
    _OURS.name,
}


@cache
def is_librarys_file(filename: str) -> bool:
    """Whether a file is of an installed library, or ours."""
    path = Path(filename)
    return not _INSTALLED.isdisjoint(path.parts) or _OURS in path.parents


@cache
def is_users_file(filename: str) -> bool:
    """Whether a file is neither a library's, Python's own nor ours."""
    return not is_librarys_file(filename) and _PYTHONS not in Path(filename).parents


@cache
def is_users(name: str) -> bool:
    """Whether a Python module is neither a library's, Python's own nor ours."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (file is not None and is_users_file(file))


def is_foundations(name: str) -> bool:
    """Whether a Python module is what every run stands on, which keeps and asks nothing of it.

    Other libraries may: they have models, and hooks.
    """
    package = name.partition(".")[0]
    return package in _FOUNDATIONS or (package in sys.stdlib_module_names and not is_users(name))


def is_opaque(value: object, may_draw: bool = False) -> bool:
    """Whether an object's attributes are its class's own affair, and nothing that users put there.

    Args:
        value: The object.
        may_draw: Whether what draws is looked for, not what was put there.
    """
    package = type(value).__module__.partition(".")[0]
    return package in _OPAQUE and not (may_draw and package in _WITH_SOURCES)
