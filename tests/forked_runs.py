"""Runs of tests/failing.py in processes that are forked from one which has imported everything.

To start a rank takes seconds of imports; to fork one takes none. The first process of a run gets a
session of its own, and Lightning's launcher forks the other ranks as its children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


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
    def lines(self) -> list[str]:
        """What the strategy said."""
        return [line for line in self.errors.splitlines() if line.startswith("[pipeoffload]")]


class ForkedRuns:
    """A process that forks a run whenever it is told to."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_runs"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, timeout: int = 120) -> Run:
        """Run until every process has ended.

        Raises:
            TimeoutError: one has not; all are killed.
        """
        with tempfile.TemporaryDirectory() as folder:
            pipe = Path(folder, "errors")
            os.mkfifo(pipe)
            self._write([str(pipe), *arguments])
            session = self._read()
            signal.signal(signal.SIGALRM, _raise_timeout)
            signal.alarm(timeout)
            try:
                errors = pipe.read_text()  # ends when the last process has ended
            except TimeoutError:
                os.killpg(session, signal.SIGKILL)
                raise
            finally:
                signal.alarm(0)
        return Run(self._read(), errors)

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait()

    def _write(self, message: Any) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(message) + "\n")
        self._server.stdin.flush()

    def _read(self) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())


def _raise_timeout(signum: int, frame: Any) -> None:
    raise TimeoutError("a process of the run has not ended")


class ForkedRank:
    """What Lightning's launcher gets in place of a subprocess.Popen."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: str | None = None) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            os.environ.clear()
            os.environ.update(env)
            _run_to_the_end()

    def poll(self) -> int | None:
        """Return the status as subprocess does, if it has ended."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)


def _run_to_the_end() -> None:
    """Run the script and end as Python does."""
    from tests import failing

    status: Any = 0
    try:
        failing.main()
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        traceback.print_exception(error)
        status = 1
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def serve() -> None:
    """Fork a run for every line of standard input; write its process, then its status."""
    from tests import failing

    for line in sys.stdin:
        pipe, *arguments = json.loads(line)
        run = os.fork()
        if not run:
            os.setsid()
            _redirect(pipe)
            subprocess.Popen = ForkedRank  # type: ignore[assignment,misc]
            sys.argv = [failing.__file__, *arguments]
            failing.main()
            return
        _reply(run)
        status = os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
        _reply(128 - status if status < 0 else status)


def _reply(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _redirect(pipe: str) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    errors = os.open(pipe, os.O_WRONLY)
    for opened, standard in ((nothing, 0), (nothing, 1), (errors, 2)):
        os.dup2(opened, standard)
        os.set_inheritable(standard, True)
    os.close(nothing)
    os.close(errors)


if __name__ == "__main__":
    serve()
