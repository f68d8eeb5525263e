"""Names the line of the user's code that asked for something."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Iterator
from types import FrameType

from lightning_pipeoffload.runtime.users_code.libraries import is_users_file


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
