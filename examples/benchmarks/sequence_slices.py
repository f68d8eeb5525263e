"""How long a step takes, and in how much memory, where sequences run in slices, by simulation.

Blocks of Llama 8B are shared out evenly to ``--ranks``; a block's times are its operations, linear
ones and those of causal attention, of which B has twice those of F. Slices take equal time unless
``--equal`` cuts them to equal lengths. No messages, no head, no efficiency of kernels::

    python -m examples.benchmarks.sequence_slices [--ranks 8] [--tokens 32768] [--equal]

Each cell has the step time over the busiest rank's work (1: no bubble), and the memory of the
fullest rank in microbatches. The second table is under a limit of ``--limit`` microbatches.

Runs of the strategy in processes, whose blocks sleep as long as slices of long sequences take (most
of F is attention), are next to their plans with::

    python -m examples.benchmarks.sequence_slices --emulated [--ranks 4] [--milliseconds 800]

"Whole" is the fastest plan without slices and without a search, of at most two stages a rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader

from examples.benchmarks.emulated import TimedStrategy, alike_samples
from examples.benchmarks.harness import (
    SleepForWeight,
    quiet_trainer,
    run_ranks,
    write_results,
)
from lightning_pipeoffload import defer_weight_grad
from lightning_pipeoffload.schedule import (
    FAMILIES,
    Costs,
    MemoryLimitError,
    PlanRequest,
    Schedule,
    Slices,
    build,
    lower,
    make_plan,
    options,
    simulate,
    slice_ends,
)
from lightning_pipeoffload.schedule.simulation import steady_period

HIDDEN, KEY_VALUES, INNER = 4096, 1024, 14336
LINEAR = 2 * (2 * HIDDEN**2 + 2 * HIDDEN * KEY_VALUES + 3 * HIDDEN * INNER)  # of a token, in F
MICROBATCHES = (2, 4, 8, 16)
COLUMNS = (("seq_zb", 4), ("seq_zb", 8), ("seq_zb", 16), ("seq_v", 8))
# Of a token's bytes in a block, by 16 bits: all that is saved, without recomputation.
SAVED = 2 * (6 * HIDDEN + 2 * KEY_VALUES + 4 * INNER)


def costs_of(num_tokens: int, num_chunks: int, num_slices: int, is_equal: bool = False) -> Costs:
    """Return the costs of a rank's stages: of a microbatch 3 units of time and 1 of memory."""
    quadratic = 2 * num_tokens * HIDDEN  # of a token: all earlier ones, half of the sequence
    parts = {"forward": quadratic, "backward_input": 2 * quadratic, "backward_weight": 0}
    seconds = {name: LINEAR + part for name, part in parts.items()}
    unit = sum(seconds.values()) * num_chunks / 3
    square = 0 if is_equal else 3 * quadratic
    ends = slice_ends(num_tokens, num_slices, 3 * LINEAR, square)
    slices = Slices(
        tuple(end - start for start, end in zip((0, *ends), ends, strict=False)),
        quadratic_forward=quadratic / seconds["forward"],
        quadratic_backward_input=2 * quadratic / seconds["backward_input"],
        key_values=4 * KEY_VALUES / SAVED,
    )
    times: dict[str, Any] = {name: cost / unit for name, cost in seconds.items()}
    return Costs(**times, activation=1 / num_chunks, slices=slices)


def whole(num_ranks: int, num_microbatches: int, num_tokens: int, limit: float | None) -> str:
    """Return the cell of the fastest schedule of whole sequences, without long searches."""
    wanted = [o for o in options([num_microbatches]) if not FAMILIES[o.schedule].takes_seconds]
    request = PlanRequest(
        num_ranks,
        wanted,
        lambda option: costs_of(num_tokens, option.num_chunks, 1),
        limit,
        offload="none",
        has_barrier=lambda option: True,
    )
    try:
        best = make_plan(request).best
    except MemoryLimitError:
        return "-"
    return _cell(best.makespan or 0.0, best.peak_memory or 0.0, num_microbatches)


def sliced(
    column: tuple[str, int], num_microbatches: int, size: argparse.Namespace, limit: float | None
) -> str:
    """Return the cell of a schedule with slices."""
    name, num_slices = column
    costs = costs_of(size.tokens, FAMILIES[name].num_chunks, num_slices, size.equal)
    given: dict[str, Any] = {"costs": costs, "memory_limit": limit}
    sizes = size.ranks, num_microbatches
    try:
        schedule = build(name, *sizes, num_sequence_slices=num_slices, **given)
    except MemoryLimitError:
        return "-"
    timeline = simulate(schedule, costs)
    return _cell(timeline.makespan, max(timeline.peak_memory), num_microbatches)


def _cell(makespan: float, memory: float, num_microbatches: int) -> str:
    return f"{makespan / (3 * num_microbatches):.2f}, {memory:.1f}"


# Emulated runs

TOKENS, WIDTH, NUM_SLICES, NUM_STEPS = 128, 16, 8, 3
ATTENTION = 0.9  # of F; B has twice as much of it, and as much of the rest as F and W
COLUMN = ("seq_v", NUM_SLICES)


class Sleep(torch.autograd.Function):
    """The identity, after a while in forward and another in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward: float) -> Tensor:
        """Return a copy after so many seconds."""
        ctx.seconds = backward
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient after as many as are given for it."""
        time.sleep(ctx.seconds)
        return gradient, None, None


class AttendingBlock(nn.Module):
    """A block that takes as long as attention to all earlier tokens does, and as long as its own.

    Args:
        seconds: Of F of whole sequences.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        # Where slices are checked positions have any values.
        places = int(positions[0]), int(positions[-1]) + 1
        start, stop = sorted(min(1.0, max(0.0, place / TOKENS)) for place in places)
        linear = self.seconds * (1 - ATTENTION) * (stop - start)
        quadratic = self.seconds * ATTENTION * (stop**2 - start**2)
        x = Sleep.apply(x, linear + quadratic, linear + 2 * quadratic)
        hidden = self.project(x)[:, None]
        attended = scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)[:, 0]
        y: Tensor = x + attended + SleepForWeight.apply(self.weight, linear, defer_weight_grad)
        return y


class AttendingModel(LightningModule):
    """A chain of such blocks, as a user of Lightning would write it."""

    def __init__(self, num_blocks: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttendingBlock(seconds) for _ in range(num_blocks))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean of the last block's output."""
        positions = torch.arange(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, positions)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def emulated_costs(seconds: float, num_chunks: int, sizes: Sequence[int] = ()) -> Costs:
    """Return the costs of a rank's stages, of which F takes ``seconds`` together."""
    forward = seconds / num_chunks
    backward, weight = forward * (1 + ATTENTION), forward * (1 - ATTENTION)
    slices = Slices(tuple(sizes), ATTENTION, 2 * ATTENTION / (1 + ATTENTION))
    return Costs(forward, backward, weight, slices=slices)


def emulated_schedule(num_slices: int, num_ranks: int, count: int, seconds: float) -> Schedule:
    """Return the schedule of a run: a V of slices, or the fastest of whole sequences."""
    if num_slices > 1:
        costs = emulated_costs(seconds, 2).with_balanced_slices(2 * num_ranks, num_slices)
        return build(COLUMN[0], num_ranks, count, num_sequence_slices=num_slices, costs=costs)
    wanted = [
        option
        for option in options([count], most_chunks=2)
        if not FAMILIES[option.schedule].takes_seconds
    ]
    request = PlanRequest(
        num_ranks,
        wanted,
        lambda option: emulated_costs(seconds, option.num_chunks),
        offload="none",
    )
    return make_plan(request).schedule


def emulate(given: argparse.Namespace) -> dict[str, float | str]:
    """Train on this rank; return the period, measured and planned."""
    (count,), seconds = given.microbatches, given.milliseconds / 1e3
    schedule = emulated_schedule(given.slices, given.ranks, count, seconds)
    num_chunks = schedule.num_stages // given.ranks
    # Blocks are checked on slices in batches 1, 2 and 4.
    samples = alike_samples(count * (NUM_STEPS + 5), torch.zeros(TOKENS, WIDTH))
    strategy = TimedStrategy(
        schedule=schedule,
        num_microbatches=count,
        num_sequence_slices=given.slices,
        split="even",
    )
    trainer = quiet_trainer(devices=given.ranks, strategy=strategy, max_epochs=1)
    model = AttendingModel(schedule.num_stages, seconds / num_chunks)
    trainer.fit(model, DataLoader(samples, batch_size=count))
    sizes: list[int] = []
    if given.slices > 1:
        record = strategy.split.executor.microbatches[0].record
        parts = record.slice_records(given.slices)[0].sequence_slices
        sizes = [part.stop - part.start for part in parts]
    costs = emulated_costs(seconds, num_chunks, sizes)
    return {
        "name": schedule.name,
        "measured": strategy.times.take(NUM_STEPS).wall,
        "planned": steady_period(lower(schedule), costs, False),
    }


def print_emulated(given: argparse.Namespace) -> None:
    """Print the periods of runs with and without slices, next to their plans."""
    (count,) = given.microbatches = given.microbatches[:1]
    sizes = f"--ranks={given.ranks}", f"--microbatches={count}"
    of_rank = f"--milliseconds={given.milliseconds}"
    periods = []
    print(f"p = {given.ranks}, m = {count}, F of a rank and microbatch {given.milliseconds:g} ms\n")
    print("| | planned, s | measured, s | / planned | / whole |")
    print("|---" * 5 + "|")
    for num_slices in (1, NUM_SLICES):
        arguments = "--emulated", *sizes, of_rank, f"--slices={num_slices}"
        found = run_ranks("sequence_slices", *arguments)
        periods.append(found["measured"])
        name = f"{found['name']}, {num_slices} slices" if num_slices > 1 else found["name"]
        figures = found["planned"], found["measured"], found["measured"] / found["planned"]
        cells = *(f"{figure:.3f}" for figure in figures), f"{periods[-1] / periods[0]:.3f}"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES)
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--equal", action="store_true", help="slices of equal length")
    parser.add_argument("--emulated", action="store_true", help="run blocks that sleep")
    parser.add_argument("--milliseconds", type=float, default=800, help="of a rank's F, emulated")
    parser.add_argument("--slices", type=int, default=NUM_SLICES, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.results:
        write_results(lambda: emulate(given), given.results)
        return
    if given.emulated:
        print_emulated(given)
        return
    heads = " | ".join(f"{name}, {count}" for name, count in COLUMNS)
    for limit in (None, given.limit):
        print(f"\n| m{f', limit {limit:g}' if limit else ''} | whole | {heads} |")
        print("|---" * (2 + len(COLUMNS)) + "|")
        for count in given.microbatches:
            cells = [whole(given.ranks, count, given.tokens, limit)]
            cells += [sliced(column, count, given, limit) for column in COLUMNS]
            print(f"| {count} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
