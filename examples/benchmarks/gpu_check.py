"""What one GPU tells of the runtime, in at most eight minutes.

    make gpu PYTHON=python3        (or: python -m examples.benchmarks.gpu_check)

Each part (``gpu_parts.py``, ``gpu_fits.py``, ``gpu_hops.py``) is a process of its own with a limit
of its own, so that one that hangs or kills the device's context takes nothing from the others. A
row is printed and appended to the file as it comes. Without an accelerator this says so and ends
with status 2; if a part has failed, or did not come to its end, with status 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.benchmarks import gpu_fits, gpu_hops, gpu_parts
from examples.benchmarks.gpu_part import ROW, Function, command_of

_ALL_SECONDS = 480.0


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        function: of a device; yields what it has found.
        seconds: it may take.
        environment: beside this process's own.
    """

    function: Function
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the rows."""
        return self.function.__name__


PARTS = [
    Part(gpu_parts.exactness, 45),
    Part(gpu_parts.late_copies, 40),
    Part(gpu_parts.late_copies, 50, {"TORCH_CUDA_SANITIZER": "1"}),
    Part(gpu_parts.host_waits, 25),
    Part(gpu_fits.host_waits_of_a_trainer, 30),
    Part(gpu_parts.casts, 30),
    Part(gpu_parts.live_bytes, 40),
    Part(gpu_hops.hops_of_threads, 25),
    Part(gpu_hops.held_multiprocessors, 30),
    Part(gpu_parts.split, 30),
    Part(gpu_fits.fits, 50),
    Part(gpu_fits.two_processes, 50),
    Part(gpu_hops.hops_of_processes, 45),
    Part(gpu_fits.blame, 50),
    Part(gpu_parts.offload, 90),
]


def run_part(part: Part, seconds: float) -> Iterator[str]:
    """Run a part in a process of its own; yield its rows as they come, and what became of it.

    Args:
        part: to run.
        seconds: after which it is killed.
    """
    environment = {**os.environ, **part.environment}
    started = time.monotonic()
    with subprocess.Popen(
        ["timeout", "--signal=KILL", f"{seconds:.0f}", *command_of(part.function)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            if line.startswith(ROW):
                yield _row(part, line.removeprefix(ROW).strip())
            else:
                said = [*said[-19:], line]
    took = time.monotonic() - started
    if process.returncode == 0:
        yield _row(part, f"done in {took:.0f} s")
        return
    yield _row(part, f"FAILED with status {process.returncode} after {took:.0f} s")
    sys.stderr.write("".join(said))


def _row(part: Part, text: str) -> str:
    extra = "".join(f", {name}={value}" for name, value in part.environment.items())
    return f"| {part.name}{extra} | {text} |"


def check(parts: Sequence[Part], file: Path) -> bool:
    """Run parts one after the other, until the time is up; return whether all has gone well.

    Args:
        parts: to run.
        file: which rows are appended to.
    """
    deadline = time.monotonic() + _ALL_SECONDS
    is_well = True
    for part in parts:
        seconds = min(part.seconds, deadline - time.monotonic())
        rows = run_part(part, seconds) if seconds >= 1 else iter([_row(part, "FAILED: no time")])
        for row in rows:
            is_well &= "FAILED" not in row
            print(row, flush=True)
            with file.open("a") as opened:
                opened.write(f"{row}\n")
    return is_well


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What one GPU tells of the runtime.")
    parser.add_argument("--file", type=Path, default=Path("gpu_check.md"))
    parser.add_argument("--parts", nargs="+", default=[], help="run these alone")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device: Any = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print("there is no accelerator that torch can use here, so there is nothing to check")
        return 2
    name = torch.get_device_module(device).get_device_name()
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    print(
        f"{name}, torch {torch.__version__}; rows go to {options.file}\n| part | found |\n|---|---|"
    )
    return 0 if check(parts, options.file) else 1


if __name__ == "__main__":
    sys.exit(main())
