"""Whose code something is, the user's, a library's, Python's own or ours; and its line."""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

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


def users_line(error: BaseException) -> str:
    """Name the deepest line of the traceback that is neither torch's, a library's nor ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename):
            return line_of(frame.filename, frame.lineno or 0)
    return ""


def calling_line() -> str:
    """Name the deepest line of the user's that is being run."""
    for frame in running_frames():
        if is_users_file(frame.f_code.co_filename):
            return line_of(frame.f_code.co_filename, frame.f_lineno)
    return ""


def running_frames() -> Iterator[FrameType]:
    """Yield the frames of the functions that are being run, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_of(filename: str, number: int) -> str:
    """Name a line."""
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"


def in_brackets(line: str) -> str:
    """Put a line that was found behind what it explains; "" if none was."""
    return f" ({line})" if line else ""
