"""What ranks tell each other between batches: one vector, which is read a batch later.

A batch takes every rank, so what was sent at the end of one is there at the end of the next, and
nobody waits::

    end of batch 7   send what this rank has        read what all had at the end of batch 6
    end of batch 8   send                           read what all had at the end of batch 7

The vector is reduced by its maximum. Numbers that have to be alike are sent with their complement:
the maximum of both shows the minimum too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_pipeoffload.optimizers.step_options import StepOptions
from lightning_pipeoffload.processes.rank_differences import refuse_differences
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.microbatch import start_checksum
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.transport import blaming_peers

_SET_ALIKE = (
    "set options of optimizers, freeze parameters and call optimizer.step alike on all ranks; a "
    "value that only some ranks have goes to all of them by self.log and "
    "trainer.callback_metrics, or by trainer.strategy.broadcast"
)
_LEAST = torch.iinfo(torch.int64).min


class Told(NamedTuple):
    """What any rank has said.

    Attributes:
        stops: It wants training to stop.
        outgrown: A microbatch keeps more than its plan allows.
        has_news: A solver has a better plan, or has ended.
    """

    stops: bool = False
    outgrown: bool = False
    has_news: bool = False


class _Batch(NamedTuple):
    """A batch to compare; ``what`` it is in words, empty where there is none."""

    what: str = ""
    checksum: Callable[[], int] = int


class _Sent(NamedTuple):
    """A vector on its way, and what this rank knows of it."""

    wait: Callable[[], list[int]]
    checksum: int
    batch: _Batch
    options: StepOptions | None


class StepExchange:
    """One rank's part in the exchange of a run.

    Args:
        pipeline: This rank's part of the module.
        group: The run's processes.
        is_late: Whether batches are on an accelerator: each is sent one later, for then nobody
            waits for its checksum.

    Attributes:
        options: A function that returns what decides on the optimizers' steps.
    """

    def __init__(self, pipeline: Pipeline, group: PipelineGroup, is_late: bool) -> None:
        self._pipeline, self._group, self._is_late = pipeline, group, is_late
        self._batch = self._before = _Batch()
        self._sent: _Sent | None = None
        self._told, self._all_stop = Told(), False
        self.options: Callable[[], StepOptions | None] = lambda: None

    def note(self, batch: Any, what: str) -> None:
        """Start to compute the checksum of a batch.

        Args:
            batch: Any pytree.
            what: What the batch is, in words, for an error.
        """
        self._batch = _Batch(what, start_checksum(batch))

    def turn(self, mine: Told, trains: bool) -> Told:
        """Send what this rank has after a batch; return what was sent before.

        Args:
            mine: What this rank says.
            trains: Whether the batch was trained on; then the optimizers' options are compared.

        Raises:
            RuntimeError: The ranks of a pipeline have read different batches.
            ValueError: The optimizers' options are different.
        """
        self._read()
        told, self._told = self._told, Told()
        batch, self._batch = self._batch, _Batch()
        if self._is_late:
            batch, self._before = self._before, batch
        self._send(mine, batch, self.options() if trains else None)
        return told

    def all_stop(self) -> bool:
        """Wait for what was sent last; return whether all ranks want to stop."""
        self._read()
        return self._all_stop

    def settle(self, mine: Told, trains: bool) -> Told:
        """Send what is not compared yet, and wait; return what any rank says.

        Raises:
            RuntimeError: As by :meth:`turn`.
            ValueError: As by :meth:`turn`.
        """
        told = self.turn(mine, trains)
        if self._before.what:
            told = Told(*map(max, told, self.turn(mine, trains)))
        self._read()
        found, self._told = self._told, Told()
        # An order to stop is said again as long as it stands.
        return Told(found.stops, *map(max, told[1:], found[1:]))

    def _send(self, mine: Told, batch: _Batch, options: StepOptions | None) -> None:
        digest = 0 if options is None else options.digest()
        checksums = [_LEAST] * (2 * self._group.num_replicas)
        own = batch.checksum()
        place = 2 * self._group.replica
        checksums[place : place + 2] = own, ~own
        numbers = [*map(int, mine), int(not mine.stops), digest, ~digest, *checksums]
        self._sent = _Sent(self._reduce(numbers), own, batch, options)

    def _reduce(self, numbers: list[int]) -> Callable[[], list[int]]:
        """Send a vector; return a function that waits for its maximum over all ranks."""
        world = self._group.world
        if world.size == 1:
            return lambda: numbers
        vector = torch.tensor(numbers)
        work = world.side_group.allreduce([vector], dist.ReduceOp.MAX)

        def wait() -> list[int]:
            with blaming_peers("lost a rank while comparing batches"):
                work.wait()
            return vector.tolist()

        return wait

    def _read(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        stops, outgrown, has_news, lacks, most, least, *checksums = sent.wait()
        mine = Told(bool(stops), bool(outgrown), bool(has_news))
        self._told, self._all_stop = Told(*map(max, self._told, mine)), not lacks
        if most != ~least:
            self._refuse_options(sent.options)
        place = 2 * self._group.replica
        if checksums[place] != ~checksums[place + 1]:
            self._refuse_batch(sent)

    def _refuse_batch(self, sent: _Sent) -> None:
        group = self._group
        found = dict(zip(group.global_ranks, group.gather(sent.checksum), strict=True))
        apart = [rank for rank in sorted(found) if found[rank] != found[group.root]]
        raise RuntimeError(
            f"global ranks {apart} read another {sent.batch.what} than global rank {group.root}; "
            f"the ranks of a pipeline must read the same data in the same order: call "
            f"L.seed_everything(...) before the data is made, seed generators of your own alike in "
            f"every process, and share samples out by nothing but "
            f"lightning_pipeoffload.data_parallel_rank()"
        )

    def _refuse_options(self, options: StepOptions | None) -> None:
        names = [name for name, _ in self._pipeline.module.named_parameters()]
        described = {} if options is None else options.describe(names)
        refuse_differences(described, self._group.world.host_group, _SET_ALIKE)
