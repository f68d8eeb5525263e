"""What one GPU tells of the runtime, in less than nine minutes.

    make gpu PYTHON=python3        (or: python -m examples.benchmarks.gpu_check)

What matters most comes first, so that a run that is cut off has told it. Each part is a process
with a process group and a limit of its own, so that one that hangs or kills the device's context
takes nothing from the others. A row is printed and appended to the file as it comes, and all else
that a part prints goes to a file ``.log`` beside it. Without an accelerator this says so and ends
with status 2; if a part has failed, or did not come to its end, with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from examples.benchmarks import gpu_fits, gpu_parts, gpu_ranks, gpu_spin
from examples.benchmarks.gpu_process import ROW, Function, end, lines_of, start


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        function: A function of a device, which yields what it has found.
        seconds: The seconds after which it is killed.
        environment: Variables beside this process's own.
    """

    function: Function
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in the rows."""
        return self.function.__name__


# With as many streams as a fit with offload has, fewer hardware queues make them wait for others.
_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

PARTS = [
    Part(gpu_parts.exactness, 35),
    Part(gpu_ranks.two_ranks, 28),
    Part(gpu_spin.waits_beside_a_kernel, 15),
    Part(gpu_spin.spinning_messages, 49),
    Part(gpu_fits.two_processes, 26),
    Part(gpu_parts.offload, 50, _QUEUES),
    Part(gpu_fits.on_demand, 22),
    Part(gpu_parts.compiled, 38),
    Part(gpu_fits.ways_of_two_processes, 36),
    Part(gpu_parts.host_time, 15),
    Part(gpu_fits.quantized, 16),
    Part(gpu_fits.host_step, 45),
    Part(gpu_parts.block_graphs, 15),
    Part(gpu_parts.tests_of_gpus, 24),
    Part(gpu_parts.late_copies, 10, _QUEUES),
    Part(gpu_parts.late_copies_under_sanitizer, 12, _QUEUES),
    Part(gpu_parts.host_waits, 8),
    Part(gpu_fits.host_waits_of_a_trainer, 10),
    Part(gpu_fits.fits, 18),
    Part(gpu_parts.casts, 8),
    Part(gpu_parts.live_bytes, 8),
    Part(gpu_ranks.held_multiprocessors, 10),
    Part(gpu_ranks.hops_of_processes, 10),
    Part(gpu_fits.blame, 16),
]


def described(device: torch.device) -> Iterator[str]:
    """Yield what the machine has; not in the process that forks the others."""
    module = torch.get_device_module(device)
    yield f"{module.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


def run_part(part: Part, device: torch.device, log: Path) -> Iterator[str]:
    """Run a part in a process of its own; yield its rows as they come, and what became of it.

    Args:
        part: The part.
        device: Its device.
        log: The file that gets what it prints beside its rows.
    """
    started = time.monotonic()
    running = start(part.function, device, part.environment, leads=True)
    deadline = started + part.seconds
    try:
        with log.open("a") as opened:
            opened.write(f"== {_label(part)}\n")
            for line in lines_of(running, deadline):
                if line.startswith(ROW):
                    yield _row(part, line.removeprefix(ROW))
                opened.write(f"{line}\n")
                opened.flush()
    finally:
        status = end(running, deadline)
    took = time.monotonic() - started
    how = f"FAILED with status {status} after" if status else "done in"
    yield _row(part, f"{how} {took:.0f} s")


def _label(part: Part) -> str:
    return ", ".join([part.name, *(f"{n}={value}" for n, value in part.environment.items())])


def _row(part: Part, text: str) -> str:
    return f"| {_label(part)} | {text} |"


def check(parts: Sequence[Part], device: torch.device, file: Path) -> bool:
    """Run parts one after the other; return whether all has gone well.

    Args:
        parts: The parts.
        device: Their device.
        file: The file to which rows are appended.
    """
    is_well = True
    for part in parts:
        for row in run_part(part, device, file.with_suffix(".log")):
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
    # Not check_available: who asks the driver forks no process that can use it.
    device = torch.accelerator.current_accelerator()
    if device is None or not check([Part(described, 30)], device, options.file):
        print("there is no accelerator that torch can use here, so there is nothing to check")
        return 2
    print(f"rows go to {options.file}\n| part | found |\n|---|---|")
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    return 0 if check(parts, device, options.file) else 1


if __name__ == "__main__":
    sys.exit(main())
