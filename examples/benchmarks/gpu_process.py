"""Processes of ``gpu_check.py``: each runs a function of a device that yields what it has found.

The processes are forked from one that has imported everything and never touched the device, for
imports take longer than most parts do. Two that run the same function stand for two nodes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from select import select
from typing import Any, NamedTuple

import torch

from lightning_pipeoffload.processes import free_port

# On a machine without a network no name leads to an address.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
ROW, ERROR = "row: ", "error: "
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it at its import
Function = Callable[[torch.device], Iterator[str]]
PROCESSES: Any = get_context("fork")


def needing(*packages: str) -> Callable[[Function], Function]:
    """Decorate a part, which says so where one of these packages is not installed."""

    def decorate(part: Function) -> Function:
        @wraps(part)
        def run(device: torch.device) -> Iterator[str]:
            missing = [name for name in packages if find_spec(name) is None]
            if missing:
                yield f"left out: {' and '.join(missing)} not installed"
            elif "triton" in packages and not (is_accelerated(device) or _INTERPRETS):
                yield "left out: Triton's kernels need a GPU, or TRITON_INTERPRET=1"
            else:
                yield from part(device)

        return run

    return decorate


class Running(NamedTuple):
    """A process that runs a part, and the reading end of what it prints, errors included."""

    process: Any
    output: Connection


def start(
    function: Function,
    device: torch.device,
    environment: Mapping[str, str],
    seconds: float,
    leads: bool = False,
    anew: bool = False,
) -> Running:
    """Start a process that runs a part and prints its rows as they come.

    Shortly before its time is up it prints where each of its threads is.

    Args:
        function: The part.
        device: The device that it is given.
        environment: Variables in addition to this process's own.
        seconds: The seconds after which it will be killed.
        leads: Whether the process leads a process group, in which those that it starts are.
        anew: Whether it is a new Python, whose loader reads the environment, as for LD_PRELOAD.
    """
    reading, writing = PROCESSES.Pipe(duplex=False)
    arguments = writing, function, device.type, dict(environment), seconds, leads, anew
    process = PROCESSES.Process(target=_run, args=arguments)
    process.start()
    writing.close()
    return Running(process, reading)


def _run(
    output: Connection,
    function: Function,
    kind: str,
    environment: dict[str, str],
    seconds: float,
    leads: bool,
    anew: bool,
) -> None:
    if leads:
        os.setpgrp()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.environ.update(_LOOPBACK | environment)
    if anew:
        name = f"{function.__module__}:{function.__qualname__}"
        module = ["-u", "-m", "examples.benchmarks.gpu_process"]
        os.execv(sys.executable, [sys.executable, *module, name, kind, str(seconds)])
    print_rows(function, kind, seconds)


def print_rows(function: Function, kind: str, seconds: float) -> None:
    """Run a part in this process, and print its rows or its error."""
    faulthandler.dump_traceback_later(max(1.0, seconds - 2), file=2)
    try:
        # With an index, by which processes that share memory name the device.
        for row in function(torch.device(kind) if kind == "cpu" else torch.device(kind, 0)):
            print(f"{ROW}{row}", flush=True)
    except Exception as error:
        traceback.print_exc()
        print(f"{ERROR}{in_one_line(error)}", flush=True)
        raise SystemExit(1) from None


def in_one_line(error: Exception) -> str:
    """Return an error's type, place and message, for a cell of a table."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    text = " ".join(str(error).replace("|", "/").split())
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
    return f"{type(error).__name__} at {place}: {text[:_ERROR_LENGTH]}"


_ERROR_LENGTH = 300


def lines_of(running: Running, deadline: Callable[[], float]) -> Iterator[str]:
    """Yield the lines of a process as it prints them, until it has ended or time is up."""
    output, begun = running.output.fileno(), b""
    while time.monotonic() < deadline():
        is_alive = running.process.is_alive()  # asked first: what it has printed is there then
        if select([output], [], [], 0.1)[0]:
            data = os.read(output, 1 << 16)
            *lines, begun = (begun + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if not data:
                break
        elif not is_alive:  # one that it has started has the writing end still
            break
    if begun:
        yield begun.decode(errors="replace")


def end(running: Running, deadline: float) -> int:
    """Kill a process that is not over in time, and all of its group; return its exit status."""
    running.process.join(max(0, deadline - time.monotonic()))
    with suppress(ProcessLookupError):  # none of the group is left, or it leads none
        os.killpg(running.process.pid, signal.SIGKILL)
    running.process.kill()
    running.process.join()
    running.output.close()
    return int(running.process.exitcode)


def is_accelerated(device: torch.device) -> bool:
    """Whether a device is more than the CPU, on which parts are small and measure nothing."""
    return device.type != "cpu"


def run_two(
    function: Function,
    device: torch.device,
    seconds: float = 40,
    environment: Mapping[str, str] | None = None,
    num_ranks: int = 2,
    anew: bool = False,
) -> list[list[str]]:
    """Run a part in two or more processes on a device; return the lines of each.

    Where one fails, the others are killed after a while if they do not end. The process that calls
    this may not have used the device yet. Its standard error gets the lines too.

    Args:
        function: The part; each process finds in ``NODE_RANK`` which one it is.
        device: The device of all.
        seconds: The seconds after which they are killed on an accelerator.
        environment: Variables in addition to this process's own.
        num_ranks: How many there are; each finds it in ``NUM_RANKS``.
        anew: See :func:`start`.
    """
    places = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NUM_RANKS": str(num_ranks),
        **(environment or {}),
    }  # fmt: skip
    seconds = seconds if is_accelerated(device) else 600
    faulthandler.cancel_dump_traceback_later()  # by a thread that they would wait for in vain
    ranks = range(num_ranks)
    running = [
        start(function, device, {**places, "NODE_RANK": str(rank)}, seconds, anew=anew)
        for rank in ranks
    ]
    until = [time.monotonic() + seconds]
    patience = _PATIENCE if is_accelerated(device) else _PATIENCE_ON_CPU
    with ThreadPoolExecutor(num_ranks) as threads:
        follow = partial(_follow, until=until, patience=patience)
        return [*threads.map(follow, ranks, running)]


# How long the others may take after one has failed.
_PATIENCE, _PATIENCE_ON_CPU = 20.0, 120.0


def _follow(rank: int, running: Running, until: list[float], patience: float) -> list[str]:
    said = []
    for line in lines_of(running, lambda: until[0]):
        said.append(line)
        sys.stderr.write(f"{rank}: {line}\n")
    status = end(running, until[0])
    if status:
        sys.stderr.write(f"{rank}: ended with status {status}\n")
        until[0] = min(until[0], time.monotonic() + patience)
    return said


def rows_of(said: list[str]) -> list[str]:
    """Return the rows among the lines of a process."""
    return [line.removeprefix(ROW) for line in said if line.startswith(ROW)]


def error_of(said: list[str]) -> str:
    """Return the error among the lines of a process, else its last line."""
    errors = [line for line in said if line.startswith(ERROR)]
    return (errors or ["", *said])[-1].removeprefix(ERROR)


@cache
def compile_kernel(source: str, name: str) -> Any:
    """Compile a kernel in CUDA C++ by NVRTC, which torch opens by its name alone."""
    for path in getattr(find_spec("nvidia"), "submodule_search_locations", None) or []:
        for library in sorted(Path(path).glob("*/lib/libnvrtc*.so.*")):
            if ".alt." not in library.name:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return torch.cuda._compile_kernel(source, name)  # private: torch has no other


if __name__ == "__main__":
    _name, _kind, _seconds = sys.argv[1:]
    _module, _, _function = _name.partition(":")
    print_rows(getattr(import_module(_module), _function), _kind, float(_seconds))
