"""What a process that fails says at its end, and how it ends."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType

POLL_SECONDS = 0.2
# So long the rank at fault may take to print its traceback and end.
_END_SECONDS = 15.0
_LINE = "pipeoffload_line"  # an exception's attribute


def polls(seconds: float) -> Iterator[None]:
    """Yield every now and then, for as long as ranks wait for each other's last words, or an end.

    Counted, not timed: where a machine stands still for a while, all ranks get the same chances.
    """
    for _ in range(max(1, round(seconds / POLL_SECONDS))):
        yield
        time.sleep(POLL_SECONDS)


def say(line: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(f"[pipeoffload] {line}\n")
    sys.stderr.flush()


def say_waiting(rank: str, world_size: int) -> None:
    """Say that a rank is late to meet all others."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    ranks = f"all {world_size} ranks"
    say(f"{rank} still waits for {ranks} to connect to {where}; are they all started?")


def exit_soon(exception: BaseException, status: int) -> None:
    """End this process even if something holds up its regular end."""

    def exit_in_the_end() -> None:
        for _ in polls(_END_SECONDS):
            pass
        # Python keeps here what it has printed at the end of a script.
        if getattr(sys, "last_value", None) is not exception:
            traceback.print_exception(exception)
            sys.stderr.flush()
        os._exit(status)

    threading.Thread(target=exit_in_the_end, name="failure-end", daemon=True).start()


def say_instead(exception: BaseException, line: str) -> None:
    """Where nobody catches an exception, say a line instead of its traceback."""
    setattr(exception, _LINE, line)
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook()


class _Hook:
    def __init__(self) -> None:
        self._plain = sys.excepthook

    def __call__(
        self, kind: type[BaseException], exception: BaseException, trace: TracebackType | None
    ) -> None:
        line = getattr(exception, _LINE, None)
        if line is None:
            self._plain(kind, exception, trace)
        else:
            say(line)
