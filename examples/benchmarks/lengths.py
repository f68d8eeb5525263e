"""What batches of many lengths cost: one device and two ranks, as they come, padded, and of one.

    python -m examples.benchmarks.lengths
    python -m examples.benchmarks.lengths --layers 4 --runs pipeoffload:2

Collators pad to the longest text of a batch, so nearly every batch has shapes of its own, and a
step is traced for each. 80 batches have 63 lengths ("any"); "padded" pads each to a multiple of 64;
"one" has the padded batches' mean length in all. A line has the milliseconds of a batch: the mean
from the 20th on, of a clock and of the process of global rank 0.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks.batch_times import measure_each, train_epoch

_WIDTH, _SAMPLES, _WARM = 32, 8, 20
_NUM_BATCHES, _NUM_LENGTHS = 80, 63
_ROW = "{:<10}{:<20}{:>10}{:>10}"


class TinyEncoder(L.LightningModule):
    """Encoder layers over a padded sequence with its mask."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, _WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 2, 2 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(_WIDTH, 256)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss over the tokens that are not padded."""
        is_padded = tokens == 0
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=is_padded)
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), tokens.flatten(), ignore_index=0
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batch_lengths(kind: str) -> list[int]:
    """Return the length of each batch's texts."""
    draw = random.Random(0)
    lengths = [64 + index % _NUM_LENGTHS for index in range(_NUM_BATCHES)]
    draw.shuffle(lengths)
    if kind == "any":
        return lengths
    padded = [-(-length // 64) * 64 for length in lengths]
    return padded if kind == "padded" else [round(sum(padded) / len(padded))] * _NUM_BATCHES


def measure(kind: str, run: str, num_layers: int) -> None:
    """Train, and print a line of the table."""
    L.seed_everything(1, verbose=False)
    shapes = [(_SAMPLES, length) for length in batch_lengths(kind)]
    data: Any = DataLoader([torch.randint(1, 256, shape) for shape in shapes], batch_size=None)  # type: ignore[arg-type]
    module = TinyEncoder(num_layers)
    starts = train_epoch(run, module, data).starts
    if module.global_rank == 0:
        (first, own_first), (last, own_last) = starts[_WARM], starts[-1]
        num = len(starts) - 1 - _WARM
        figures = 1000 * (last - first) / num, 1000 * (own_last - own_first) / num
        print(_ROW.format(kind, run, *(f"{figure:.1f}" for figure in figures)), flush=True)


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--kinds", nargs="+", default=["any", "padded", "one"])
    names = ["auto:1", "pipeoffload:2", "pipeoffload_zb_h1:2"]
    parser.add_argument("--runs", nargs="+", default=names, help="strategy:ranks")
    return parser.parse_args(line)


def main(line: Sequence[str]) -> None:
    """Print a line for each kind and run."""
    given = read_arguments(line)
    if len(given.kinds) * len(given.runs) > 1:
        print(_ROW.format("lengths", "run", "ms", "cpu ms"), flush=True)
    measure_each(given, "examples.benchmarks.lengths", "layers", measure)


if __name__ == "__main__":
    main(sys.argv[1:])
