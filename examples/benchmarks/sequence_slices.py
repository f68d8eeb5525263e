"""How long a step takes, and in how much memory, where sequences run in slices, by simulation.

Blocks of Llama 8B are shared out evenly to ``--ranks``; a block's times are its operations, linear
ones and those of causal attention, of which B has twice those of F. Slices take equal time unless
``--equal`` cuts them to equal lengths. No messages, no head, no efficiency of kernels::

    python -m examples.benchmarks.sequence_slices [--ranks 8] [--tokens 32768] [--equal]

Each cell has the step time over the busiest rank's work (1: no bubble), and the memory of the
fullest rank in microbatches. The second table is under a limit of ``--limit`` microbatches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lightning_pipeoffload.schedule import (
    Costs,
    MemoryLimitError,
    Slices,
    build,
    cut_positions,
    simulate,
)
from lightning_pipeoffload.schedule.candidates import options
from lightning_pipeoffload.schedule.families import FAMILIES
from lightning_pipeoffload.schedule.make_plan import PlanRequest, make_plan

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
    ends = cut_positions(num_tokens, num_slices, 3 * LINEAR, square)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES)
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--equal", action="store_true", help="slices of equal length")
    given = parser.parse_args(arguments)
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
