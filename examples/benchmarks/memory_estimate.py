"""Resident memory of each rank in training, next to what was said of it before the first step.

Run: python examples/benchmarks/memory_estimate.py [--schedule zb_h1] [--width 1024] [--small]

A float32 GPT of 400 MiB with AdamW on two processes, on the CPU, where the device's memory is the
process's own. What a rank takes is the highest that was seen from the second step on, less what it
had before it made the module; glibc is told to keep nothing that is free (it would keep 130 MiB).
The exit status is 1 where the two are more than 15 % apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path

import lightning as L
import torch
import torch._dynamo  # a fit loads it, which is none of the model's memory
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.demos.gpt import GPT

MIB = 1 << 20
KEEPS_NOTHING = ("MALLOC_MMAP_THRESHOLD_", str(MIB // 4))  # read when a process starts
CONTEXT, NUM_MICROBATCHES = 128, 8


def resident() -> int:
    """Return the resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Sampler(L.Callback):
    """Looks at the memory every few milliseconds, from the second step on."""

    def __init__(self) -> None:
        self.highest = 0
        self._over = threading.Event()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        """Start with the second step; the estimate is the first one's."""
        if batch_idx == 1:
            self.estimate = trainer.strategy.report()["memory"]
            threading.Thread(target=self._look, daemon=True).start()

    def on_train_end(self, trainer, module):
        """Stop."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(0.003):
            self.highest = max(self.highest, resident())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--small", action="store_true", help="a few MiB, to see that it runs")
    options = parser.parse_args()
    name, value = KEEPS_NOTHING
    if name not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, name: value})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base, sampler = resident(), Sampler()
    width = 64 if options.small else options.width
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipeOffloadStrategy(schedule=options.schedule, num_microbatches=NUM_MICROBATCHES),
        max_steps=3,
        callbacks=[sampler],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(256, (3 * NUM_MICROBATCHES, CONTEXT))
    data = DataLoader(TensorDataset(tokens, tokens), NUM_MICROBATCHES)
    trainer.fit(GPT(context=CONTEXT, width=width, depth=8, heads=8, dropout=0.0), data)
    rank = trainer.num_devices - 1 - trainer.global_rank
    if "_v" in options.schedule:
        rank = trainer.global_rank
    said = {name: of_ranks[rank] for name, of_ranks in sampler.estimate.items()}
    taken = sampler.highest - base
    found = {name: round(value / MIB, 1) for name, value in {**said, "taken": taken}.items()}
    off = said["device"] / taken - 1
    print(json.dumps({"rank": rank, **found, "off": f"{off:+.1%}"}), flush=True)
    return int(abs(off) > 0.15 and not options.small)


if __name__ == "__main__":
    sys.exit(main())
