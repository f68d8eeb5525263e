"""What one GPU tells of the runtime, in so many seconds.

    make gpu PYTHON=python3 SECONDS=440        (or: python -m examples.benchmarks.gpu_check)

What tells most comes first, so that a run that is cut off has told it. Each part is a process
with a process group and a limit of its own, so that one that hangs or kills the device's context
takes nothing from the others; what its limit ends is "cut". A row is printed and appended to the
file as it comes, an error's type and message too, and all else that a part prints goes to a file
``.log`` next to it. Without an accelerator this says so and ends with status 2; if a part has
failed, with status 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from examples.benchmarks import (
    gpu_fits,
    gpu_llama,
    gpu_nccl,
    gpu_parts,
    gpu_process,
    gpu_ranks,
    gpu_roads,
    gpu_slices,
    gpu_spin,
    gpu_triton,
)
from examples.benchmarks.gpu_process import ERROR, ROW, Function, end, lines_of, start


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        function: A function of a device, which yields what it has found.
        seconds: The seconds after which it is killed.
        environment: Variables in addition to this process's own.
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
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

# torch then maps and registers the host's memory by several threads, before a step is timed.
_PINNING = {
    "PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
}

# Each has the seconds that it may take, of which the first ones take what make gpu has.
PARTS = [
    Part(gpu_nccl.nccl_ranks, 90),
    Part(gpu_nccl.nccl_default, 30),
    Part(gpu_parts.offload, 110, _QUEUES | _PINNING),
    Part(gpu_llama.compiled, 70),
    Part(gpu_nccl.nccl_ways, 60),
    Part(gpu_nccl.nccl_killed, 35),
    Part(gpu_nccl.nccl_and_torch, 30),
    Part(gpu_nccl.nccl_open_receives, 20),
    Part(gpu_nccl.shared_link, 15),
    Part(gpu_fits.fits, 30),
    Part(gpu_llama.llama, 75),
    Part(gpu_roads.sliced_llama, 60),
    Part(gpu_roads.called_twice, 15),
    Part(gpu_roads.tensor_ranks, 40),
    Part(gpu_llama.rehearsed, 55, _QUEUES),
    Part(gpu_parts.exactness, 30),
    Part(gpu_fits.two_processes, 45),
    Part(gpu_fits.blame, 40),
    Part(gpu_parts.late_copies, 12, _QUEUES),
    Part(gpu_spin.waits_during_a_kernel, 15),
    Part(gpu_spin.waits_during_a_kernel, 15, _EXPANDABLE),
    Part(gpu_ranks.held_multiprocessors, 12),
    Part(gpu_fits.host_step, 50),
    Part(gpu_spin.spinning_messages, 40),
    Part(gpu_llama.liger, 45),
    Part(gpu_llama.float8, 60),
    Part(gpu_slices.block_slices, 12),
    Part(gpu_triton.triton_kernels, 12),
    Part(gpu_llama.products, 10),
    Part(gpu_ranks.two_ranks, 40),
    Part(gpu_parts.tests_of_gpus, 40),
    Part(gpu_parts.casts, 12),
    Part(gpu_parts.late_copies_under_sanitizer, 15, _QUEUES),
    Part(gpu_fits.ways_of_two_processes, 60),
]
ON_DEMAND = [Part(gpu_fits.quantized, 30), Part(gpu_fits.on_demand, 40)]  # by --parts alone
_LEAST_SECONDS = 8  # that a part is begun with: the device's context takes half of them


def described(device: torch.device) -> Iterator[str]:
    """Yield what the machine has; not in the process that forks the others."""
    module = torch.get_device_module(device)
    started = time.monotonic()
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    (x @ x).sum().item()  # which also reads the libraries from the disk, as the next part has to
    yield (
        f"{module.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; "
        f"a context and a product take {time.monotonic() - started:.1f} s"
    )


def run_part(part: Part, device: torch.device, log: Path, until: float) -> Iterator[str]:
    """Run a part in a process of its own; yield its rows as they come, and what became of it.

    Args:
        part: The part.
        device: Its device.
        log: The file that gets what it prints in addition to its rows.
        until: When all is to be over, on the monotonic clock.
    """
    started = time.monotonic()
    deadline = min(started + part.seconds, until)
    seconds = deadline - started
    running = start(part.function, device, part.environment, seconds, leads=True)
    try:
        with log.open("a") as opened:
            opened.write(f"== {_label(part)}\n")
            for line in lines_of(running, lambda: deadline):
                if line.startswith((ROW, ERROR)):
                    yield _row(part, line.removeprefix(ROW))
                opened.write(f"{line}\n")
                opened.flush()
    finally:
        status = end(running, deadline)
    took = time.monotonic() - started
    how = f"FAILED with status {status} after" if status else "done in"
    if status == -signal.SIGKILL and started + took >= deadline:
        how = "cut after"
    yield _row(part, f"{how} {took:.0f} s")


def _label(part: Part) -> str:
    return ", ".join([part.name, *(f"{n}={value}" for n, value in part.environment.items())])


def _row(part: Part, text: str) -> str:
    return f"| {_label(part)} | {text} |"


def check(
    parts: Sequence[Part], device: torch.device, file: Path, until: float = float("inf")
) -> bool:
    """Run parts one after the other; return whether none has failed.

    Args:
        parts: The parts.
        device: Their device.
        file: The file to which rows are appended.
        until: When all is to be over, on the monotonic clock.
    """
    is_well = True
    for part in parts:
        if time.monotonic() > until - _LEAST_SECONDS:
            rows = iter([_row(part, "left out: no time is left")])
        else:
            rows = run_part(part, device, file.with_suffix(".log"), until)
        for row in rows:
            is_well &= "FAILED" not in row
            print(row, flush=True)
            with file.open("a") as opened:
                opened.write(f"{row}\n")
    return is_well


def _is_there(device: torch.device, file: Path) -> bool:
    """Whether a forked process can use a device, else a fresh one, as all are from then on."""
    if check([Part(described, 60)], device, file):
        return True
    gpu_process.PROCESSES = get_context("spawn")
    return check([Part(described, 60)], device, file)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What one GPU tells of the runtime.")
    parser.add_argument("--file", type=Path, default=Path("gpu_check.md"))
    parser.add_argument("--seconds", type=float, default=440, help="when to end")
    parser.add_argument("--parts", nargs="+", default=[], help="run these alone")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    until = time.monotonic() + options.seconds
    # Whether there is a device is asked of NVML: a driver that is in use cannot be forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Not check_available: who asks the driver forks no process that can use it.
    device = torch.accelerator.current_accelerator()
    if device is None or not _is_there(device, options.file):
        print("there is no accelerator that torch can use here, so there is nothing to check")
        return 2
    print(f"rows go to {options.file}\n| part | found |\n|---|---|")
    parts = [part for part in [*PARTS, *ON_DEMAND] if part.name in options.parts] or PARTS
    return 0 if check(parts, device, options.file, until) else 1


if __name__ == "__main__":
    sys.exit(main())
