"""Runs one part of ``gpu_check.py``, a function of a device that yields what it has found.

python -m examples.benchmarks.gpu_part examples.benchmarks.gpu_parts exactness
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

ROW = "row: "
Function = Callable[[torch.device], Iterator[str]]


def command_of(function: Function, *more: str) -> list[str]:
    """Return the command that runs a part in a process of its own.

    Args:
        function: the part.
        more: the device, if it is not to be the accelerator.
    """
    return [sys.executable, "-m", "examples.benchmarks.gpu_part", *arguments_of(function), *more]


def arguments_of(function: Function) -> list[str]:
    """Return those that :func:`main` finds a part by."""
    return [function.__module__, function.__name__]


def rows_of(said: str) -> list[str]:
    """Return the rows among the lines that a part has printed."""
    return [line.removeprefix(ROW) for line in said.splitlines() if line.startswith(ROW)]


def is_accelerated(device: torch.device) -> bool:
    """Whether a device is more than the CPU, on which parts are small and measure nothing."""
    return device.type != "cpu"


def main(arguments: Sequence[str]) -> None:
    """Run a part, and print its rows as they come."""
    module, name, *types = arguments
    device: Any = torch.device(types[0]) if types else torch.accelerator.current_accelerator()
    for row in getattr(importlib.import_module(module), name)(device or torch.device("cpu")):
        print(f"{ROW}{row}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
