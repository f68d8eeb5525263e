"""What is told of a failure: one line that names the rank at fault, and an exit status."""

from __future__ import annotations

import re
import signal
import subprocess
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeoffload.schedule import ScheduleError

SIGTERM_STATUS = 128 + signal.SIGTERM  # as a shell reports it
SIGINT_STATUS = 128 + signal.SIGINT
REFUSED_STATUS = 2

_SILENT = re.compile(r"global rank (\d+)(?=, which)")


@dataclass(frozen=True)
class Failure:
    """Why the run ends, as all ranks are told.

    Attributes:
        cause: One line that names the rank at fault.
        status: The exit status of every rank.
        is_deaf: Whether the rank at fault is gone, so that it will not hear of it.
    """

    cause: str
    status: int = 1
    is_deaf: bool = False

    @property
    def is_interrupt(self) -> bool:
        """Whether it is a Ctrl-C."""
        return self.status == SIGINT_STATUS

    def encode(self) -> str:
        """Return a value for a store."""
        return f"{self.status} {self.is_deaf:d} {self.cause}"

    @classmethod
    def decode(cls, value: bytes) -> Failure:
        """Return what ``encode`` was given."""
        status, is_deaf, cause = value.decode().split(" ", 2)
        return cls(cause, int(status), is_deaf == "1")


def describe(exception: BaseException) -> str:
    """Return an exception in one line."""
    if isinstance(exception, SIGTERMException):
        return "told to stop by SIGTERM"
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted"
    if isinstance(exception, SystemExit):
        hook = hook_of(exception)
        return f"sys.exit({exception.code!r})" + (f" in {hook}" if hook else "")
    return f"{type(exception).__name__}: {first_line(exception)}".rstrip(": ")


def hook_of(exception: BaseException) -> str:
    """Name the hook that raised an exception; empty if none did."""
    frames = (frame for frame, _ in traceback.walk_tb(exception.__traceback__))
    # How Lightning names it in what calls the hooks of modules, callbacks and strategies.
    hooks = [frame.f_locals["hook_name"] for frame in frames if "hook_name" in frame.f_locals]
    return hooks[-1] if hooks else ""


def first_line(exception: BaseException) -> str:
    """Return the first line of an exception's message.

    A DataLoader puts a worker's whole traceback into the message; then its last line, which is the
    worker's own exception, comes with it.
    """
    lines = str(exception).strip().splitlines() or [""]
    from_worker = lines[0].startswith("Caught ") and len(lines) > 1
    return f"{lines[0]} {lines[-1]}" if from_worker else lines[0]


def status_after(exception: BaseException, has_trained: bool) -> int:
    """Return the exit status of a rank at fault, which is never 0.

    Args:
        exception: What ended it.
        has_trained: Whether a step was done; a ValueError before one is a refusal, and a plan that
            cannot be is one at any time.
    """
    if isinstance(exception, SIGTERMException):
        return SIGTERM_STATUS
    if isinstance(exception, KeyboardInterrupt):
        return SIGINT_STATUS
    if isinstance(exception, SystemExit) and isinstance(exception.code, int):
        return exception.code or 1
    refusal = ScheduleError if has_trained else ValueError
    return REFUSED_STATUS if isinstance(exception, refusal) else 1


def is_cut_off(line: str) -> bool:
    """Whether what gloo says of a lost rank is that its connection has ended, not that it waits."""
    return any(words in line for words in ("closed by peer", "reset by peer", "Broken pipe"))


def without_answer(global_ranks: Sequence[int], suspicion: str) -> str:
    """Name ranks that have shown no sign of life after what gloo said."""
    several = len(global_ranks) > 1
    names = f"global rank{'s' * several} {', '.join(map(str, global_ranks))}"
    if is_cut_off(suspicion):
        return f"{names}, which {'are' if several else 'is'} gone"
    return f"{names}, which {'do' if several else 'does'} not answer"


def cause_of_end(process: subprocess.Popen[bytes], global_rank: int) -> Failure:
    """Return what an ended process of another rank tells by its status."""
    status = process.returncode
    if status >= 0:
        return Failure(f"global rank {global_rank}, which ended with status {status}", is_deaf=True)
    name = signal.Signals(-status).name
    is_told = -status in (signal.SIGINT, signal.SIGTERM)
    cause = f"global rank {global_rank}, which was killed by {name}"
    return Failure(cause, 128 - status if is_told else 1, is_deaf=True)


def name_place(failure: Failure, place_of: Callable[[int], str]) -> str:
    """Return the cause of a failure; who could not tell it has its place behind the name.

    Args:
        failure: Why a run has failed.
        place_of: A function that says where a global rank is.
    """
    found = _SILENT.match(failure.cause) if failure.is_deaf else None
    place = place_of(int(found[1])) if found is not None else ""
    return _SILENT.sub(rf"\g<0> ({place})", failure.cause, count=1) if place else failure.cause
