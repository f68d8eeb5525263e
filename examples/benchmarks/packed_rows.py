"""How long a step takes on texts of uneven length, padded or packed into rows, by simulation.

Each of ``--ranks`` has the same part of the blocks, whose time for a text is that of a transformer
of 7B (linear, and quadratic in attention). A rank's microbatches go through ZB-H1. Step time is
over the time of the texts alone, shared out to the ranks: 1 is a pipeline without bubble, padding
and imbalance::

    python -m examples.benchmarks.packed_rows [--ranks 8] [--microbatches 16] [--texts 4]

"Padded": all to the longest of the batch; "sorted": equal numbers of texts in a microbatch, padded
to its longest; "packed": ``PackedRowsSampler``'s rows, where attention skips other texts (kernels
for variable lengths), or computes all of a row and masks them (a dense mask).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import islice, repeat

from lightning_pipeoffload import PackedRowsSampler
from lightning_pipeoffload.cli.minibatch_balance import sample_lengths
from lightning_pipeoffload.schedule import Kind, Schedule, build, replay
from lightning_pipeoffload.texts.packing import COSTS

COST = COSTS["7b"]
# The mean and the longest of each kind of texts; lengths are lognormal.
TEXTS = {"chat": (1200, 4096), "reasoning": (8000, 32768), "long": (16500, 65536)}
SHARES = {Kind.F: 1.0, Kind.B: 1.1, Kind.W: 0.9}
NUM_BATCHES = 5


def step_seconds(plan: Schedule, seconds: Sequence[float]) -> float:
    """Return how long a step takes whose microbatches take ``seconds`` in each stage's F."""
    order, ranks = replay(plan), [iter(rank) for rank in plan]
    actions = (next(ranks[rank]) for rank in order.ranks)
    taken = [SHARES[action.kind] * seconds[action.microbatch] for action in actions]
    *_, ends = order.time(taken, repeat(0.0), [0.0] * plan.num_ranks)
    return max(ends)


def padded(lengths: Sequence[int], num: int) -> list[float]:
    """Return the cost of each microbatch, of equally many texts as long as the longest of all."""
    return [COST(max(lengths)) * len(lengths) / num] * num


def by_length(lengths: Sequence[int], num: int) -> list[float]:
    """Return the cost of each microbatch of texts of nearly the same length, light ones outside."""
    size = len(lengths) // num
    groups = [sorted(lengths)[n * size : (n + 1) * size] for n in range(num)]
    costs = [COST(max(group)) * size for group in groups]
    return costs[::2] + costs[1::2][::-1]


def ratios(plan: Schedule, kind: str, texts_per_microbatch: int) -> list[float]:
    """Return the step times of the four ways, over the texts' time alone on all ranks."""
    num, (mean, longest) = plan.num_microbatches, TEXTS[kind]
    rows = []
    for seed in range(NUM_BATCHES):
        lengths = sample_lengths(num * texts_per_microbatch, mean, 1.0, longest, seed)
        rows.append([_ratio(plan, way(lengths, num), lengths) for way in (padded, by_length)])
    lengths = sample_lengths(200 * num, mean, 1.0, longest, 0)
    sampler = PackedRowsSampler(lengths, num, longest, cost=COST)
    for row, batch in zip(rows, islice(sampler, NUM_BATCHES), strict=True):
        texts = [[lengths[index] for index in group] for group in batch.divide([*batch])]
        read = [length for group in texts for length in group]
        row.append(_ratio(plan, [sum(map(COST, group)) for group in texts], read))
        row.append(_ratio(plan, [COST(longest)] * num, read))
    return [statistics.mean(column) for column in zip(*rows, strict=True)]


def _ratio(plan: Schedule, costs: Sequence[float], lengths: Sequence[int]) -> float:
    alone = sum(SHARES.values()) * sum(map(COST, lengths)) / plan.num_ranks
    return step_seconds(plan, [cost / plan.num_ranks for cost in costs]) / alone


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--texts", type=int, default=4, help="of a microbatch that is not packed")
    options = parser.parse_args(arguments)
    plan = build("zb_h1", options.ranks, options.microbatches)
    print("| texts | padded | sorted | packed | packed, dense mask |\n|---|---|---|---|---|")
    for kind in TEXTS:
        found = " | ".join(f"{ratio:.2f}" for ratio in ratios(plan, kind, options.texts))
        print(f"| {kind} | {found} |", flush=True)


if __name__ == "__main__":
    main()
