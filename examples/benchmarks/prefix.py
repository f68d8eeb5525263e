"""What a stage pays for running the step up to its own blocks: prefix and remote blocks.

Run from the repository's root: ``python examples/benchmarks/prefix.py``. A GPT of 32 tiny blocks,
cut into two to 16 stages; of the last stage's F, the time from the start of the step to the call of
its first block, which is what the blocks before it cost. Medians of 200 microbatches, one thread.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from lightning_pipeoffload.demos.gpt import GPT
from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build

DEPTH = 32
MICROBATCHES = 200


class Step(nn.Module):
    """A GPT whose step notes when it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(vocab_size=16, context=8, width=8, depth=DEPTH, heads=2, dropout=0.0)


def measure(num_ranks: int) -> float:
    """Return the median seconds from the step's start to the last stage's first block."""
    started: list[float] = []
    reached: list[float] = []

    def step(module: Step, tokens: torch.Tensor) -> torch.Tensor:
        started.append(time.thread_time())
        logits = module.gpt(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens.flatten())

    plan = build("1f1b", num_ranks, MICROBATCHES)
    pipeline = InProcessPipeline(Step(), plan, step, split="even")
    last = pipeline.ranks[-1].module.gpt
    first_own = DEPTH - DEPTH // num_ranks
    note = lambda block, inputs: reached.append(time.thread_time()) or None  # noqa: E731
    last.blocks[first_own].register_forward_pre_hook(note)
    batch = torch.randint(16, (MICROBATCHES, 8))
    pipeline.run(batch, 1)  # probes
    reached.clear()
    started.clear()
    pipeline.run(batch, 1)
    return statistics.median(end - max(s for s in started if s < end) for end in reached)


def main() -> None:
    torch.set_num_threads(1)
    print("| stages | remote blocks of the last stage | ms per microbatch |")
    print("|---|---|---|")
    for num_ranks in (2, 4, 8, 16):
        remote = DEPTH - DEPTH // num_ranks
        print(f"| {num_ranks} | {remote} | {1e3 * measure(num_ranks):.2f} |", flush=True)


if __name__ == "__main__":
    main()
