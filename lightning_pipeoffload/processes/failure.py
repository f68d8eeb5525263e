"""The cause of a failed run: one line and an exit status; printing it and exiting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeoffload.schedule import ScheduleError

SIGTERM_STATUS = 128 + signal.SIGTERM  # as a shell reports it
SIGINT_STATUS = 128 + signal.SIGINT
REFUSED_STATUS = 2

POLL_SECONDS = 0.2
EXIT_SECONDS = 15.0  # for the rank at fault to print its traceback and exit
_WRITE_SECONDS = 5.0  # for a reader of standard error that stands still
_LINE = "pipeoffload_line"  # an exception's attribute
_ENCODED = re.compile(rb"(\d{1,3}) ([01]) (.*)", re.DOTALL)
_GONE = re.compile(r"global rank (\d+)(?=, which)")


@dataclass(frozen=True)
class Failure:
    """The cause of a failed run, which every rank reads.

    Attributes:
        cause: One line that names the rank at fault.
        status: The exit status of every rank.
        is_gone: Whether the rank at fault has ended, so that it cannot acknowledge the failure.
    """

    cause: str
    status: int = 1
    is_gone: bool = False

    @property
    def is_interrupt(self) -> bool:
        """Whether it is a Ctrl-C."""
        return self.status == SIGINT_STATUS

    def encode(self) -> str:
        """Return a value for a store."""
        return f"{self.status} {self.is_gone:d} {self.cause}"

    @classmethod
    def decode(cls, value: bytes) -> Failure:
        """Return the failure that ``encode`` has encoded; any other value is a failure too."""
        match = _ENCODED.fullmatch(value)
        if match is None or not 0 < int(match[1]) < 256:
            return cls(f"{value[:100]!r} in the run's store, which no rank has written as failure")
        return cls(match[3].decode(errors="backslashreplace"), int(match[1]), match[2] == b"1")

    def cause_with_stage(self, describe_rank: Callable[[int], str]) -> str:
        """Return the cause, with the rank's replica and stage if the rank did not name it."""
        match = _GONE.match(self.cause) if self.is_gone else None
        stage = describe_rank(int(match[1])) if match is not None else ""
        return _GONE.sub(rf"\g<0> ({stage})", self.cause, count=1) if stage else self.cause


def describe(exception: BaseException) -> str:
    """Return an exception in one line."""
    if isinstance(exception, SIGTERMException):
        return "told to stop by SIGTERM"
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted"
    if isinstance(exception, SystemExit):
        hook = _hook_of(exception)
        return f"sys.exit({exception.code!r})" + (f" in {hook}" if hook else "")
    return f"{type(exception).__name__}: {first_line(exception)}".rstrip(": ")


def _hook_of(exception: BaseException) -> str:
    frames = (frame for frame, _ in traceback.walk_tb(exception.__traceback__))
    # The name of the variable in Lightning's functions that call hooks.
    hooks = [frame.f_locals["hook_name"] for frame in frames if "hook_name" in frame.f_locals]
    return hooks[-1] if hooks else ""


def first_line(exception: BaseException) -> str:
    """Return the first line of an exception's message, as text that any store and terminal takes.

    A DataLoader puts a worker's whole traceback into the message; then its last line, the worker's
    own exception, is appended.
    """
    try:
        text = str(exception).encode(errors="backslashreplace").decode()
    except Exception:  # of the user's class
        text = "its message cannot be shown"
    lines = text.strip().splitlines() or [""]
    from_worker = lines[0].startswith("Caught ") and len(lines) > 1
    return f"{lines[0]} {lines[-1]}" if from_worker else lines[0]


def exit_status(exception: BaseException, has_trained: bool) -> int:
    """Return the exit status of a rank at fault, which is never 0.

    A ValueError is a refusal before the first step; a ScheduleError is one at any time.
    """
    if isinstance(exception, SIGTERMException):
        return SIGTERM_STATUS
    if isinstance(exception, KeyboardInterrupt):
        return SIGINT_STATUS
    if isinstance(exception, SystemExit) and isinstance(exception.code, int):
        return exception.code % 256 or 1  # the system keeps the last byte
    refusal = ScheduleError if has_trained else ValueError
    return REFUSED_STATUS if isinstance(exception, refusal) else 1


def says_connection_ended(line: str) -> bool:
    """Return whether gloo reports that a connection was closed, not that it timed out."""
    return any(words in line for words in ("closed by peer", "reset by peer", "Broken pipe"))


def describe_absent_ranks(global_ranks: Sequence[int], suspicion: str) -> str:
    """Name the ranks that have not answered after gloo reported ``suspicion``."""
    several = len(global_ranks) > 1
    names = f"global rank{'s' * several} {', '.join(map(str, global_ranks))}"
    if says_connection_ended(suspicion):
        return f"{names}, which {'are' if several else 'is'} gone"
    return f"{names}, which {'do' if several else 'does'} not answer"


def failure_of_ended_process(process: subprocess.Popen[bytes], global_rank: int) -> Failure:
    """Return the failure that the exit status of another rank's process indicates."""
    status = process.returncode
    if status >= 0:
        return Failure(f"global rank {global_rank}, which ended with status {status}", is_gone=True)
    name = signal.Signals(-status).name
    is_request = -status in (signal.SIGINT, signal.SIGTERM)
    cause = f"global rank {global_rank}, which was killed by {name}"
    return Failure(cause, 128 - status if is_request else 1, is_gone=True)


def polls(seconds: float) -> Iterator[None]:
    """Yield every ``POLL_SECONDS``; counts polls, not time, since a loaded machine may stall."""
    for _ in range(max(1, round(seconds / POLL_SECONDS))):
        yield
        time.sleep(POLL_SECONDS)


def print_error_line(line: str) -> None:
    """Write one line to standard error.

    Never raises: the line may have no reader any more. A reader that stands still is waited for
    only a while, so that the run ends all the same.
    """
    _write_in_thread(lambda: sys.stderr.write(f"[pipeoffload] {line}\n"))


def print_traceback(exception: BaseException) -> None:
    """Write the traceback of an exception to standard error, in a thread of its own."""
    _write_in_thread(lambda: traceback.print_exception(exception))


def _write_in_thread(write: Callable[[], object]) -> None:
    def work() -> None:
        # BaseException: rich, which may stand in place of standard error, exits at a closed pipe.
        with suppress(BaseException):
            write()
            sys.stderr.flush()

    writer = threading.Thread(target=work, name="failure-line", daemon=True)
    writer.start()
    writer.join(_WRITE_SECONDS)


def exit_after_delay(exception: BaseException, status: int) -> None:
    """Exit after a delay, in case something blocks the process's regular exit."""

    def exit_in_the_end() -> None:
        for _ in polls(EXIT_SECONDS):
            pass
        # Python sets last_value when it has printed the traceback at the end of a script.
        if getattr(sys, "last_value", None) is not exception:
            print_traceback(exception)
        os._exit(status)

    threading.Thread(target=exit_in_the_end, name="failure-end", daemon=True).start()


def replace_uncaught_traceback(exception: BaseException, line: str) -> None:
    """Print a line instead of the traceback if an exception is not caught."""
    setattr(exception, _LINE, line)
    if not isinstance(sys.excepthook, _LineHook):
        sys.excepthook = _LineHook()


class _LineHook:
    def __init__(self) -> None:
        self._plain = sys.excepthook

    def __call__(
        self, kind: type[BaseException], exception: BaseException, trace: TracebackType | None
    ) -> None:
        line = getattr(exception, _LINE, None)
        if line is None:
            self._plain(kind, exception, trace)
        else:
            print_error_line(line)
