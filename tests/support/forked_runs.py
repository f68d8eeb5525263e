"""Runs of scripts in tests/ that fail, as a user starts them, but forked: without the imports.

The first process of a run gets a session of its own, and Lightning's launcher forks the other ranks
as its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_pipeoffload.processes import free_port
from tests.support.forks import FORKS, fork

# A machine that runs tests may stand still for minutes.
_PATIENCE_SECONDS = 1000.0

Script = Callable[[], None]


@dataclass(frozen=True)
class Run:
    """What has become of a run.

    Attributes:
        status: of its first process, as a shell reports it.
        errors: what all its processes wrote to standard error.
    """

    status: int
    errors: str

    @property
    def lines(self):
        """What the strategy said of the end; lines of two ranks may come in either order.

        Not that a rank is late to connect, which any may be where the machine stands still.
        """
        said = [line for line in self.errors.splitlines() if line.startswith("[pipeoffload]")]
        return [line for line in said if "still waits for all" not in line]


def run_forked(script, *arguments):
    """Run a script's main function over its ranks until every process has ended.

    Those that have not within a quarter of an hour are killed.
    """
    reader, writer = FORKS.Pipe(duplex=False)
    process = fork(_be_first_process, writer, script, arguments)
    writer.close()
    killer = threading.Timer(_PATIENCE_SECONDS, _kill_session, [process.pid])
    killer.start()
    with os.fdopen(os.dup(reader.fileno())) as pipe:
        errors = pipe.read()  # ends when the last process has ended
    killer.cancel()
    process.join()
    return Run(128 - process.exitcode if process.exitcode < 0 else process.exitcode, errors)


def _kill_session(session):
    os.killpg(session, signal.SIGKILL)


def _be_first_process(errors, script, arguments):
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for opened, standard in ((nothing, 0), (nothing, 1), (errors.fileno(), 2)):
        os.dup2(opened, standard)
    errors.close()
    os.environ["MASTER_PORT"] = str(free_port())
    subprocess.Popen = partial(ForkedRank, script)  # type: ignore[assignment,misc]
    sys.argv = [str(sys.modules[script.__module__].__file__), *arguments]
    _run_to_the_end(script)


class ForkedRank:
    """What Lightning's launcher gets in place of a subprocess.Popen."""

    def __init__(self, script, command, env, cwd=None):
        self.returncode = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            os.environ.clear()
            os.environ.update(env)
            _run_to_the_end(script)

    def poll(self):
        """Return the status as subprocess does, if it has ended."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum):
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)


def _run_to_the_end(script):
    """Run the script and end as Python does."""
    status = 0
    try:
        script()
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
