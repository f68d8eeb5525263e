"""Whose code something is: the user's, a library's, Python's own or ours."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path

_OURS = Path(__file__).parents[2]
_PYTHONS = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}
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


def is_opaque(value: object) -> bool:
    """Whether an object's attributes are its class's own affair, not put there by users."""
    return type(value).__module__.partition(".")[0] in _OPAQUE
