"""What a token costs when a model generates in a validation step: bytes, host time, against one.

    python examples/benchmarks/generating.py
    python examples/benchmarks/generating.py --width 1024 --layers 8 --tokens 16 --devices 2

Blocks of the default size have 25 MB each. ``plain`` is Lightning on one device, ``pipeline`` the
same step over ranks that share this machine's cores; each generates the same tokens with a
key-value cache. Printed are the median of the milliseconds per token over the batches, the ratio to
plain, and the bytes per token that rank 0's process sent or received over the loopback device
(``/proc/net/dev``, so nothing else should use it).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipeOffloadStrategy

_ROW = "{:<12}{:>12}{:>10}{:>16}"
_NUM_WARM = 1  # batches: the first one is traced


class Layer(nn.Module):
    """Attention with a cache, and two linear layers: some 6 * width ** 2 weights."""

    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.index = index
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, cache: list[Tensor | None]) -> Tensor:
        """Extend ``cache[index]`` by the keys and values of ``x``, ``[batch, tokens, width]``."""
        query, *new = self.qkv(x).chunk(3, -1)
        pair, before = torch.stack(new), cache[self.index]
        pair = pair if before is None else torch.cat([before, pair], 2)
        cache[self.index] = pair
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, pair[0], pair[1]))
        return x + self.down(torch.relu(self.up(x)))


class Generating(L.LightningModule):
    """Generates in its validation step, greedily."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, index) for index in range(layers))
        self.head = nn.Linear(width, 256)
        self.milliseconds: list[float] = []
        self.moved: list[float] = []

    def run(self, tokens: Tensor, cache: list[Tensor | None]) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cache)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss."""
        logits = self.run(batch, [None] * len(self.layers))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Generate, and note the time and the bytes of a token."""
        start, before = time.perf_counter(), loopback_bytes()
        cache: list[Tensor | None] = [None] * len(self.layers)
        token = batch
        for _ in range(self.tokens):
            token = self.run(token, cache)[:, -1:].argmax(-1)
            int(token[0])  # as a check for the end of a text
        self.milliseconds.append(1e3 * (time.perf_counter() - start) / self.tokens)
        self.moved.append((loopback_bytes() - before) / self.tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loopback_bytes() -> int:
    """Return the bytes that were sent over the loopback device since the machine's start."""
    (line,) = [each for each in Path("/proc/net/dev").read_text().splitlines() if "lo:" in each]
    return int(line.partition(":")[2].split()[8])


def run(devices: int, width: int, layers: int, tokens: int, batches: int) -> None:
    """Validate after a training batch; print the medians of the batches."""
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    data: Any = torch.randint(0, 256, (batches * 2, 8))
    loader = DataLoader(data, 2)
    strategy: Any = PipeOffloadStrategy(schedule="zb_h1", num_microbatches=2) if devices else "auto"
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices or 1,
        max_epochs=1,
        limit_train_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Generating(width, layers, tokens)
    trainer.fit(module, loader, loader)
    if trainer.is_global_zero:
        taken = module.milliseconds[_NUM_WARM:], module.moved[_NUM_WARM:]
        print("RESULT", *map(statistics.median, taken))


def measure(arguments: argparse.Namespace, devices: int) -> tuple[float, float]:
    """Run in a process of its own; return milliseconds and bytes per token."""
    options = [f"--{name}={value}" for name, value in vars(arguments).items() if name != "child"]
    line = [sys.executable, __file__, *options, f"--child={devices}"]
    output = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    (result,) = [each for each in output.splitlines() if each.startswith("RESULT")]
    milliseconds, moved = map(float, result.split()[1:])
    return milliseconds, moved


def main(line: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--child", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args(line)
    if arguments.child >= 0:
        run(
            arguments.child,
            arguments.width,
            arguments.layers,
            arguments.tokens,
            arguments.batches,
        )
        return
    print(_ROW.format("", "ms/token", "of plain", "bytes/token"))
    plain, _ = measure(arguments, 0)
    print(_ROW.format("plain", f"{plain:.2f}", "1.00", "0"))
    taken, moved = measure(arguments, arguments.devices)
    print(_ROW.format("pipeline", f"{taken:.2f}", f"{taken / plain:.2f}", f"{moved:,.0f}"))


if __name__ == "__main__":
    main()
