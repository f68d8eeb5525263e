"""Names the line of the user's code that asked for something."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path


def users_line(error: BaseException) -> str:
    """Name the deepest line of the traceback that is neither torch's, a library's nor ours."""
    return deepest_users_line(traceback.extract_tb(error.__traceback__))


def deepest_users_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Do the same for frames that are given from the outermost on."""
    ours = Path(__file__).parents[1] / "runtime"
    for frame in reversed(frames):
        path = Path(frame.filename)
        if "site-packages" not in path.parts and ours not in path.parents:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def in_brackets(line: str) -> str:
    """Put a line that was found behind what it explains; "" if none was."""
    return f" ({line})" if line else ""
