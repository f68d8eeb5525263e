"""How much of the sums of gradients over replicas is hidden behind W, over links of a given speed.

    python -m examples.benchmarks.reduction_emulated --p 2 --d 4

Blocks sleep in F, B and W, and what replicas send arrives late: each has a link, full duplex, over
which an all-reduce (``sharding="none"``, and "optimizer" until it summed to owners) takes "link"
times as long as W of all microbatches of a step. What reaches one owner is limited by the owner's
link. Weights of 4 KiB stand for 16 MiB, and limits of buckets and pieces are as much smaller.

"sent" are a rank's milliseconds on its link in a step, "exposed" those for which it waits, each the
mean over ranks and steps, and "hidden" is the share of the rest. Both kinds take turns, and the
figures are medians over the turns. The exit status is 1 where sums to owners are exposed longer, by
more than the last weight takes on the link of its owner.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks.harness import (
    FEATURES,
    EmulatedModel,
    quiet_trainer,
    run_ranks,
    write_results,
)
from examples.benchmarks.memory import print_table
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.comm import replicas, sums_to_owners

KINDS = "none", "optimizer"
WARM_UP = 5  # steps: the buckets are made in the first, the plan in the fourth
SMALLER = 1 << 12


class Link:
    """The link of a replica to the others.

    Attributes:
        rate: Bytes per second.
        sent: Seconds that this replica has sent.
        exposed: Seconds that it has waited.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas, self.rate = num_replicas, float("inf")
        self.sent = self.exposed = 0.0
        self._free: dict[int, float] = {}

    def send(self, sizes: Sequence[int]) -> float:
        """Return when parts of these bytes have reached their owners; all replicas send alike."""
        ends = [0.0]
        for owner, size in enumerate(sizes):
            if not size:
                continue
            begin = max(time.perf_counter(), self._free.get(owner, 0.0))
            self._free[owner] = begin + (self.num_replicas - 1) * size / self.rate
            ends.append(self._free[owner])
        self.sent += self.share_sent * sum(sizes) / self.rate
        return max(ends)

    @property
    def share_sent(self) -> float:
        """The share of its bytes that a replica sends for a sum on one owner of each."""
        return (self.num_replicas - 1) / self.num_replicas

    def wait(self, end: float) -> None:
        """Sleep until then."""
        late = end - time.perf_counter()
        if late > 0:
            self.exposed += late
            time.sleep(late)


class LateWork:
    """What torch returns of a collective, over a link."""

    def __init__(self, work: Any, link: Link, end: float) -> None:
        self._work, self._link, self._end = work, link, end

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return time.perf_counter() >= self._end and bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait until it has."""
        self._work.wait()
        self._link.wait(self._end)


def emulate(link: Link) -> None:
    """Let sums of this process go over the link."""
    all_to_all, start_sum = dist.all_to_all_single, replicas.Replicas.start_sum

    def late_all_to_all(
        received: Tensor, data: Tensor, outs: list[int], ins: list[int], **options: Any
    ) -> LateWork:
        return LateWork(all_to_all(received, data, outs, ins, **options), link, link.send(ins))

    def late_sum(self: replicas.Replicas, tensor: Tensor) -> Callable[[], None]:
        wait = start_sum(self, tensor)
        parts = [tensor.nbytes // link.num_replicas] * link.num_replicas
        link.send(parts)  # a reduce-scatter
        end = link.send(parts)  # and an all-gather

        def wait_for_link() -> None:
            wait()
            link.wait(end)

        return wait_for_link

    patched: Any = dist
    patched.all_to_all_single = late_all_to_all  # only sums to owners call it
    replicas.Replicas.start_sum = late_sum  # type: ignore[method-assign]
    for module in (replicas, sums_to_owners):
        for name in ("_MOST_BYTES", "_ALONE", "_PIECE_BYTES", "_MOST_RECEIVED"):  # private: sizes
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // SMALLER)


class Phases(Callback):
    """Lets some steps run over each link, after those that warm up."""

    def __init__(self, link: Link, rates: Sequence[float], num_steps: int) -> None:
        self._link, self._rates, self._num_steps = link, rates, num_steps
        self.found: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """Begin with the next link where it is its turn."""
        phase, step = divmod(trainer.global_step - WARM_UP, self._num_steps)
        if phase >= 0 and not step:
            self._end_phase(phase)
            self._link.rate = self._rates[phase]

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep the figures of the last link."""
        self._end_phase(len(self._rates))

    def _end_phase(self, phase: int) -> None:
        if phase:
            milliseconds = 1e3 / self._num_steps
            self.found.append((self._link.sent * milliseconds, self._link.exposed * milliseconds))
        self._link.sent = self._link.exposed = 0.0


def measure(given: argparse.Namespace, sharding: str) -> list[list[float]]:
    """Train on this rank; return what is sent and exposed on each link, as means over ranks."""
    p, d, m, seconds = given.p, given.d, given.m, given.milliseconds / 1e3
    link = Link(d)
    emulate(link)
    of_rank = 4 * FEATURES * given.weights
    rates = [2 * link.share_sent * of_rank / (share * m * seconds) for share in given.links]
    phases = Phases(link, rates, given.steps)
    strategy = PipeOffloadStrategy(
        schedule=given.schedule,
        num_microbatches=m,
        split="even",
        data_parallel_size=d,
        sharding=sharding,
    )
    num_steps = WARM_UP + given.steps * len(rates)
    trainer = quiet_trainer(
        devices=p * d, strategy=strategy, max_steps=num_steps, callbacks=[phases]
    )
    data = TensorDataset(torch.zeros(num_steps * d * m, FEATURES))
    module = EmulatedModel(p, seconds, num_weights=given.weights)
    trainer.fit(module, DataLoader(data, m, collate_fn=collate))
    ranks: list[Any] = [None] * (p * d)
    dist.all_gather_object(ranks, phases.found)
    of_links = zip(*ranks, strict=True)
    return [[sum(each) / len(ranks) for each in zip(*of, strict=True)] for of in of_links]


def collate(samples: list[tuple[Tensor]]) -> Tensor:
    """Return a batch."""
    return torch.stack([x for (x,) in samples])


def read_arguments(line: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=2, help="ranks")
    parser.add_argument("--d", type=int, default=4, help="replicas")
    parser.add_argument("--m", type=int, default=4, help="microbatches")
    parser.add_argument("--weights", type=int, default=16, help="of a rank")
    parser.add_argument("--milliseconds", type=float, default=100, help="of a rank's F, B or W")
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--links", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--steps", type=int, default=5, help="measured steps over each link")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    return parser.parse_args(line)


def main(line: Sequence[str] | None = None) -> int:
    """Measure both kinds in turns, and print a table."""
    given = read_arguments(line)
    if given.results:
        write_results(lambda: measure(given, given.kind), given.results)
        return 0
    names = "p", "d", "m", "weights", "milliseconds", "schedule", "steps"
    options = [word for name in names for word in (f"--{name}", str(getattr(given, name)))]
    options += ["--links", *map(str, given.links)]
    turns = [
        {kind: run_ranks("reduction_emulated", *options, "--kind", kind) for kind in KINDS}
        for _ in range(given.turns)
    ]
    rows: list[dict[str, Any]] = []
    for number, share in enumerate(given.links):
        for kind in KINDS:
            figures = zip(*(turn[kind][number] for turn in turns), strict=True)
            sent, exposed = map(median, figures)
            rows.append(
                {
                    "link": share,
                    "sharding": kind,
                    "sent, ms": sent,
                    "exposed, ms": exposed,
                    "hidden": 1 - exposed / sent,
                }
            )
    print_table(rows)
    pairs = zip(rows[::2], rows[1::2], strict=True)
    last = given.d / given.weights
    more = (now["exposed, ms"] - was["exposed, ms"] > last * now["sent, ms"] for was, now in pairs)
    return int(any(more))


if __name__ == "__main__":
    sys.exit(main())
