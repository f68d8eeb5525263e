"""What a batch costs where steps keep values until the epoch's end, as the epoch grows.

    python -m examples.benchmarks.growing_state
    python -m examples.benchmarks.growing_state --kinds losses nested --runs pipeoffload:2

Four small blocks; ``training_step`` adds to a list, a dict, a set or a deque after them, as
Lightning advises (``self.training_step_outputs.append(loss)``). For each kind and run a line has
the milliseconds of a batch around the 100th and at the end, medians of a hundred, and their ratio.
The last column is the ratio of the time that the process of global rank 0 computed, which a busy
machine changes least. "bank" and the static kinds are no states that grow: they are read next to
"nothing".
"""

from __future__ import annotations

import argparse
import statistics
import sys
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks.batch_times import BatchStarts, measure_each, train_epoch

_WIDTH, _SAMPLES, _SPAN = 16, 16, 50
_ROW = "{:<12}{:<22}{:>10}{:>10}{:>10}{:>8}{:>8}"


class GrowingNet(L.LightningModule):
    """Four layers, and a place for each kind of state."""

    bank: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.write = KINDS[kind]
        self.losses: list[Any] = []
        self.table: dict[str, list[Tensor]] = {"train": []}
        self.seen: set[int] = set()
        self.last: deque[float] = deque(maxlen=2000)
        if kind == "deque":  # full from the start
            self.last.extend([0.5] * 2000)
        if kind == "bank":
            self.register_buffer("bank", torch.zeros(65_536, 32))
        if kind == "words":
            self.words = {f"word{index}": index for index in range(200_000)}
        if kind == "dicts":
            self.entries = [{"id": index} for index in range(50_000)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a loss, and keep something of it."""
        (x,) = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = x.square().mean()
        if hasattr(self, "bank"):  # written, then read and saved for the backward
            self.bank[batch_idx % 64, :_WIDTH] = x.detach().mean(0)
            loss = loss + 0.01 * (x @ self.bank[:64, :_WIDTH].T).mean()
        self.write(self, loss.detach(), batch_idx)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _replace(net: GrowingNet, loss: Tensor, index: int) -> None:
    net.losses.append(loss)
    net.losses[0] = loss


def _sort(net: GrowingNet, loss: Tensor, index: int) -> None:
    insort(net.losses, float(loss))  # list.sort() would grow itself: 0.4 ms a batch for 8,000


def _sometimes(net: GrowingNet, loss: Tensor, index: int) -> None:
    if index % 7 == 0:
        net.losses += [loss] * 7


KINDS: dict[str, Callable[[GrowingNet, Tensor, int], None]] = {
    "nothing": lambda net, loss, index: None,
    "losses": lambda net, loss, index: net.losses.append(loss),
    "nested": lambda net, loss, index: net.losses.append([loss, loss]),
    "in_dict": lambda net, loss, index: net.table["train"].append(loss),
    "of_dicts": lambda net, loss, index: net.losses.append({"loss": loss, "index": index}),
    "sorted": _sort,
    "replaced": _replace,
    "set": lambda net, loss, index: net.seen.add(len(net.seen)),
    "deque": lambda net, loss, index: net.last.append(0.5),
    "sometimes": _sometimes,
    "bank": lambda net, loss, index: None,
    "words": lambda net, loss, index: None,
    "dicts": lambda net, loss, index: None,
}


def milliseconds(starts: BatchStarts, first: int, stop: int) -> tuple[float, float]:
    """Return the medians from batch to batch, of a clock and of this process."""
    own = starts.starts[max(first, 1) : stop]
    pairs = [*zip(own, own[1:], strict=False)]
    wall, busy = (1000 * statistics.median(b[i] - a[i] for a, b in pairs) for i in range(2))
    return wall, busy


def measure(kind: str, run: str, num_batches: int) -> None:
    """Train, and print a line of the table."""
    L.seed_everything(1, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(num_batches * _SAMPLES, _WIDTH)), _SAMPLES)
    module = GrowingNet(kind)
    starts = train_epoch(run, module, data, max_steps=num_batches)
    if module.global_rank == 0:
        early = milliseconds(starts, 100 - _SPAN, 100 + _SPAN)
        late = milliseconds(starts, num_batches - 2 * _SPAN, num_batches)
        begun = starts.starts[1][0] - starts.fit_started
        figures = begun, early[0], late[0], late[0] / early[0], late[1] / early[1]
        print(_ROW.format(kind, run, *(f"{figure:.2f}" for figure in figures)), flush=True)


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS])
    names = ["auto:1", "ddp:2", "pipeoffload:2"]
    parser.add_argument("--runs", nargs="+", default=names, help="strategy:ranks")
    return parser.parse_args(line)


def main(line: Sequence[str]) -> None:
    """Print a line for each kind and run."""
    given = read_arguments(line)
    if len(given.kinds) * len(given.runs) > 1:
        names = "kind", "run", "begun s", "early ms", "late ms", "ratio", "cpu"
        print(_ROW.format(*names), flush=True)
    measure_each(given, "examples.benchmarks.growing_state", "batches", measure)


if __name__ == "__main__":
    main(sys.argv[1:])
