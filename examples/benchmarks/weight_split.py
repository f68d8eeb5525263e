"""What it costs to compute weight gradients apart from input gradients: time and memory.

Eight pre-norm transformer blocks go through F, B and W by three engines: the fused backward of
autograd (its W is empty), ours (``runtime/weight_grad/``), and the split of
``torch.distributed.pipelining``, which walks the autograd graph. Without and with activation
checkpointing. With ``--compiled`` the fused backward and ours are those of blocks that inductor has
compiled.

    python examples/benchmarks/weight_split.py --widths 256 512 --repetitions 21
    python examples/benchmarks/weight_split.py --compiled

Time is CPU time of the one thread, so that other work on the machine shifts it little; the engines
take turns, and a ratio is the median over the turns of an engine's B + W over the fused one's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

# Private: the functions that torch's own pipeline stages call.
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.demos import Block
from lightning_pipeoffload.runtime import PATCHES
from lightning_pipeoffload.runtime.compiled import splitting_regions
from lightning_pipeoffload.runtime.weight_grad import (
    WeightGradQueue,
    deferring_kernels,
    mark_deferrable,
)

NUM_BLOCKS = 8
BATCH, TOKENS, HEADS = 2, 256, 4
PHASES = ("F", "B", "W")
MIB = 2**20


class SplitBlock(Block):
    """A block that is compiled apart from others: torch keeps what it has compiled by class."""


class Blocks(nn.Sequential):
    """The blocks of one stage.

    Args:
        width: features of a token.
        checkpointed: keep the input of each block only, and compute the rest again in B.
        kind: the class of the blocks.
    """

    def __init__(self, width: int, checkpointed: bool, kind: type[Block] = Block) -> None:
        super().__init__(*(kind(width, HEADS, dropout=0.0) for _ in range(NUM_BLOCKS)))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


Engine = Callable[[Blocks, Tensor, Tensor], Iterator[None]]


def fused(blocks: Blocks, x: Tensor, gradient: Tensor) -> Iterator[None]:
    """One backward for both gradients."""
    output = blocks(x)
    yield
    torch.autograd.backward(output, gradient)
    del output
    yield
    yield


def ours(blocks: Blocks, x: Tensor, gradient: Tensor) -> Iterator[None]:
    """Weight gradients queued at the dispatcher."""
    queue = WeightGradQueue()
    with queue:
        output = blocks(x)
    yield
    with queue:
        torch.autograd.backward(output, gradient)
    del output
    yield
    queue.run()
    yield


def torch_split(blocks: Blocks, x: Tensor, gradient: Tensor) -> Iterator[None]:
    """Weight gradients from a second walk through the graph."""
    outputs = [blocks(x)]
    yield
    _, groups = stage_backward_input(outputs, [gradient], [x], blocks.parameters())
    outputs.clear()
    yield
    stage_backward_weight(blocks.parameters(), groups)
    groups.clear()
    yield


ENGINES: dict[str, Engine] = {"fused": fused, "ours": ours, "torch": torch_split}


class _MallInfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def live_bytes() -> int:
    """Return the bytes that are allocated in the heap."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _MallInfo2
    in_use: int = mallinfo2().uordblks
    return in_use


def keep_freed_memory() -> None:
    """Have freed memory stay in the heap, as accelerators' allocators do.

    Else page faults are measured, and an engine that needs more memory has more of them.
    """
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    m_trim_threshold, m_mmap_max = -1, -4  # of malloc.h
    mallopt(m_trim_threshold, 2**31 - 1)
    mallopt(m_mmap_max, 0)


@dataclass
class Case:
    """One model, its input and its output's gradient; ``.grad`` of all is there from the start."""

    blocks: Blocks
    x: Tensor
    gradient: Tensor

    @classmethod
    def make(cls, width: int, checkpointed: bool, kind: type[Block] = Block) -> Case:
        """Draw them."""
        torch.manual_seed(0)
        blocks = Blocks(width, checkpointed, kind)
        for parameter in blocks.parameters():
            mark_deferrable(parameter)
        x = torch.randn(BATCH, TOKENS, width, requires_grad=True)
        case = cls(blocks, x, torch.randn(BATCH, TOKENS, width))
        case.clear()
        return case

    def clear(self) -> None:
        """Set all gradients to zero."""
        for tensor in (self.x, *self.blocks.parameters()):
            tensor.grad = torch.zeros_like(tensor)

    def gradients(self, engine: Engine) -> list[Tensor]:
        """Return the gradients that an engine computes."""
        self.clear()
        for _ in self.start(engine):
            pass
        return [p.grad for p in self.blocks.parameters() if p.grad is not None]

    def start(self, engine: Engine) -> Iterator[None]:
        """Start a run; each ``next`` is a phase. Only our engine has kernels in the dispatcher."""
        if engine is ours:
            PATCHES.enter(deferring_kernels, "cpu")
            PATCHES.enter(splitting_regions)
        else:
            PATCHES.close()
        return engine(self.blocks, self.x, self.gradient)


def phase_seconds(case: Case, engine: Engine) -> list[float]:
    """Return the CPU time of each phase."""
    run = case.start(engine)
    moments = [time.thread_time()]
    for _ in run:
        moments.append(time.thread_time())
    return [end - start for start, end in zip(moments, moments[1:], strict=False)]


def phase_bytes(case: Case, engine: Engine) -> list[int]:
    """Return the bytes alive after each phase, beyond what was there before the first."""
    run = case.start(engine)
    gc.collect()
    before = live_bytes()
    return [live_bytes() - before for _ in run]


Runs = dict[str, tuple[Case, Engine]]


def measure_time(runs: Runs, repetitions: int) -> dict[str, list[list[float]]]:
    """Let the engines take turns; return the phases' times of each."""
    seconds = defaultdict(list)
    for name in [*runs] * (repetitions + 1):
        seconds[name].append(phase_seconds(*runs[name]))
    return {name: turns[1:] for name, turns in seconds.items()}


def check_gradients(runs: Runs) -> None:
    """Refuse to compare engines that compute different things.

    Raises:
        RuntimeError: a gradient differs from the fused backward's.
    """
    case, engine = runs["fused"]
    expected = case.gradients(engine)
    for name, (case, engine) in runs.items():
        for found, right in zip(case.gradients(engine), expected, strict=True):
            error = (found - right).abs().max() / right.abs().max()
            if error > 1e-4:  # float32, summed in another order
                raise RuntimeError(f"{name}: a gradient is off by {error:.1e}")


def compare(table: Table, width: int, checkpointed: bool, repetitions: int) -> None:
    """Add a row to ``table`` for each engine."""
    case = Case.make(width, checkpointed)
    runs = {name: (case, engine) for name, engine in ENGINES.items()}
    add_rows(table, f"{width}{', checkpointed' if checkpointed else ''}", runs, repetitions)


def compare_compiled(table: Table, width: int, repetitions: int) -> None:
    """Add a row to ``table`` for each engine with compiled blocks."""
    runs: Runs = {
        "fused": (Case.make(width, False), fused),
        "ours": (Case.make(width, False, SplitBlock), ours),
    }
    for case, _ in runs.values():
        for block in case.blocks:
            block.compile()
    add_rows(table, f"{width}, compiled", runs, repetitions)


def add_rows(table: Table, label: str, runs: Runs, repetitions: int) -> None:
    """Add a row to ``table`` for each engine, compared with the fused one."""
    check_gradients(runs)
    seconds = measure_time(runs, repetitions)
    for name, (case, engine) in runs.items():
        turns = zip(seconds[name], seconds["fused"], strict=True)
        ratio = median(sum(mine[1:]) / sum(base[1:]) for mine, base in turns)
        phases = [median(turn[phase] for turn in seconds[name]) for phase in range(len(PHASES))]
        after = phase_bytes(case, engine)
        table.add_row(
            label,
            name,
            *(f"{phase * 1e3:.1f}" for phase in phases),
            f"{ratio:.2f}",
            *(f"{number / MIB:.1f}" for number in after),
            f"{after[1] / after[0]:.2f}",
        )
    table.add_section()


def make_table() -> Table:
    """Make the table's head."""
    table = Table(title=f"{NUM_BLOCKS} blocks, {BATCH} x {TOKENS} tokens, float32, 1 thread")
    table.add_column("width")
    table.add_column("engine")
    for name in (*(f"{phase}, ms" for phase in PHASES), "B+W / fused"):
        table.add_column(name, justify="right")
    for name in (*(f"MiB after {phase}" for phase in PHASES), "after B / F"):
        table.add_column(name, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--repetitions", type=int, default=15, help="turns of each engine")
    parser.add_argument("--compiled", action="store_true", help="blocks compiled by inductor")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    table = make_table()
    for width in arguments.widths:
        if arguments.compiled:
            compare_compiled(table, width, arguments.repetitions)
            continue
        for checkpointed in (False, True):
            compare(table, width, checkpointed, arguments.repetitions)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
