"""Highest resident memory of each rank while it saves and resumes, above that of the imports.

Run: python examples/benchmarks/checkpoint_memory.py [--ranks 4] [--width 1536] [--depth 64]

A module of 600 MB, an AdamW of twice that; both forms of a checkpoint. MB of each rank, by what it
did: "resumed" from the start to the first step, "trained" in the step, "saving".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy


class Net(L.LightningModule):
    """A chain of linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        """Return a loss."""
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self):
        """Return an AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def take_peak() -> float:
    """Return the highest resident memory since the last call, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")  # what was highest is forgotten
    return found


class Peaks(L.Callback):
    """Notes the memory where a fit comes by."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_train_start(self, trainer, module):
        """Note what came before."""
        self.found["resumed" if trainer.ckpt_path else "started"] = take_peak()

    def on_train_batch_end(self, *args):
        """Note what the step took."""
        self.found["trained"] = take_peak()


def fit(options: argparse.Namespace) -> None:
    base = take_peak()
    peaks = Peaks()
    strategy = PipeOffloadStrategy(
        num_microbatches=4, save_distributed_checkpoint=options.form == "folder"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=strategy,
        max_steps=2 if options.resumes else 1,
        callbacks=[peaks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.ones(8, options.width)), 4)
    module = Net(options.width, options.depth)
    trainer.fit(module, data, ckpt_path=options.path if options.resumes else None)
    if not options.resumes:
        trainer.save_checkpoint(options.path)
        peaks.found["saving"] = take_peak()
    found = {name: round(peak - base) for name, peak in peaks.found.items()}
    print(json.dumps({"rank": trainer.global_rank, **found}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 4), ("width", 1536), ("depth", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--resumes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path:
        fit(options)
        return
    for form in ("file", "folder"):
        with tempfile.TemporaryDirectory() as folder:
            own = ["--form", form, "--path", os.path.join(folder, "last.ckpt")]
            for more in ([], ["--resumes"]):
                print(f"{form}, {'resumed' if more else 'from the start'}:", flush=True)
                subprocess.run([sys.executable, *sys.argv, *own, *more], check=True)


if __name__ == "__main__":
    main()
