"""Distinguishes the user's code from libraries; returns lines of it for messages."""

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

from lightning_pipeoffload.lightning_names import PACKAGES

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
    *PACKAGES,
    _OURS.name,
}


@cache
def is_librarys_file(filename: str) -> bool:
    """Return whether a file belongs to an installed library or to this package."""
    path = Path(filename)
    return not _INSTALLED.isdisjoint(path.parts) or _OURS in path.parents


@cache
def is_users_file(filename: str) -> bool:
    """Return whether a file belongs to no library, Python or this package."""
    return not is_librarys_file(filename) and _PYTHONS not in Path(filename).parents


@cache
def is_user_module(name: str) -> bool:
    """Return whether a Python module belongs to no library, Python or this package."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (file is not None and is_users_file(file))


def is_library_object(value: object) -> bool:
    """Return whether an object's class is a library's; its attributes are not inspected."""
    return type(value).__module__.partition(".")[0] in _OPAQUE


def users_line(error: BaseException) -> str:
    """Return the user's innermost line in the traceback; "" if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename):
            return format_source_line(frame.filename, frame.lineno or 0)
    return ""


def running_user_line() -> str:
    """Return the user's innermost line that is running; "" if there is none."""
    for frame in running_frames():
        if is_users_file(frame.f_code.co_filename):
            return format_source_line(frame.f_code.co_filename, frame.f_lineno)
    return ""


def running_frames() -> Iterator[FrameType]:
    """Yield the frames of the running functions, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def format_source_line(filename: str, number: int) -> str:
    """Return file, number and text of a line."""
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"


def in_brackets(line: str) -> str:
    """Return " (line)", or "" without a line."""
    return f" ({line})" if line else ""
