"""Names the line of the user's code that asked for something."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path


def users_line(error: BaseException) -> str:
    """Name the deepest line of the traceback that is neither torch's, a library's nor ours."""
    return deepest_users_line(traceback.extract_tb(error.__traceback__))


def deepest_users_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Do the same for frames that are given from the outermost on."""
    for frame in reversed(frames):
        if is_users_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def calling_line() -> str:
    """Name the deepest line of the user's that is being run, faster than from all frames."""
    frame = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return line_of(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def line_of(filename: str, number: int) -> str:
    """Name a line."""
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"


@cache
def is_users_file(filename: str) -> bool:
    """Whether a file is neither a library's nor ours."""
    path = Path(filename)
    return "site-packages" not in path.parts and Path(__file__).parents[1] not in path.parents


def in_brackets(line: str) -> str:
    """Put a line that was found behind what it explains; "" if none was."""
    return f" ({line})" if line else ""
