"""The exchange between batches: one vector of each rank, which is read a batch later.

A batch takes every rank, so the vectors that were sent at the end of one are there at the end of
the next, and no rank waits::

    end of batch 7   read the maximum of the vectors of batch 6     send this rank's of batch 7
    end of batch 8   read the maximum of those of batch 7           send

The vector is reduced by its maximum. Numbers that have to be alike are sent with their complement:
the maximum of both shows the minimum too. Within a batch the root sends one number of its own, when
its last step has ended, which the others read at the batch's end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_pipeoffload.processes import StepOptions, refuse_differences
from lightning_pipeoffload.runtime.batch import start_checksum
from lightning_pipeoffload.runtime.comm import reporting_lost_peers
from lightning_pipeoffload.runtime.device import profiler_range, unprofiled
from lightning_pipeoffload.runtime.run import Pipeline

_SET_ALIKE = (
    "set options of optimizers, freeze parameters and call optimizer.step alike on all ranks; a "
    "value that only some ranks have goes to all of them by self.log and "
    "trainer.callback_metrics, or by trainer.strategy.broadcast"
)
_LEAST = torch.iinfo(torch.int64).min


class Flags(NamedTuple):
    """What a rank sends after a batch; of all ranks the maximum.

    Attributes:
        stops: Training is to stop.
        exceeds_planned_memory: A microbatch keeps more memory than the plan allows.
        has_solver_result: A solver has a better plan, or has ended.
        due_clocks: Which of global rank 0's clocks are due, one bit each; see ``RankZeroClocks``.
    """

    stops: bool = False
    exceeds_planned_memory: bool = False
    has_solver_result: bool = False
    due_clocks: int = 0

    def merged(self, other: Flags) -> Flags:
        """Return the maximum of both."""
        return Flags(
            self.stops or other.stops,
            self.exceeds_planned_memory or other.exceeds_planned_memory,
            self.has_solver_result or other.has_solver_result,
            max(self.due_clocks, other.due_clocks),
        )


_NO_FLAGS = Flags()


class _Batch(NamedTuple):
    """A batch to compare; ``kind`` is empty where there is none."""

    kind: str = ""
    checksum: Callable[[], int] = int


class _Sent(NamedTuple):
    wait: Callable[[], list[int]]
    checksum: int
    batch: _Batch
    options: StepOptions | None


class Exchange:
    """This rank's side of the exchange.

    Args:
        pipeline: This rank's part of the module.
        is_late: Whether batches are on an accelerator: the checksum of each is sent a batch later,
            so that the host does not wait for it.
        compares_batches: Whether the user's code may make the batches of some ranks other ones.
    """

    def __init__(self, pipeline: Pipeline, is_late: bool, compares_batches: bool) -> None:
        self._pipeline, self._group, self._is_late = pipeline, pipeline.group, is_late
        self._compares_batches = compares_batches
        self._batch = self._before = _Batch()
        self._sent: _Sent | None = None
        self._flags_of_all, self._all_stop = Flags(), False
        self._of_root: Callable[[], torch.Tensor] | None = None

    def start_batch_checksum(self, batch: Any, kind: str) -> None:
        """Start to compute the checksum of a batch, which errors call ``kind``, where needed."""
        if self._compares_batches:
            self._batch = _Batch(kind, start_checksum(batch))

    def end_batch(self, flags: Flags = _NO_FLAGS, options: StepOptions | None = None) -> None:
        """Read the vectors of the batch before, and send this batch's.

        Args:
            flags: This rank's flags.
            options: What decides the optimizers' steps; None: not compared.

        Raises:
            RuntimeError: Hooks have made different batches on the ranks of a pipeline.
            ValueError: The optimizers' options are different.
        """
        self.wait_for_flags()
        batch, self._batch = self._batch, _Batch()
        if self._is_late:
            batch, self._before = self._before, batch
        self._send(flags, batch, options)

    def pop_flags(self) -> Flags:
        """Return all ranks' flags that were read since the last call."""
        flags, self._flags_of_all = self._flags_of_all, Flags()
        return flags

    def all_ranks_want_stop(self) -> bool:
        """Wait for the vectors that were sent last; return whether all ranks want to stop."""
        self.wait_for_flags()
        return self._all_stop

    def flush(self, flags: Flags, options: StepOptions | None = None) -> Flags:
        """Compare the batches that are not compared yet, and wait; return the ranks' maximum.

        Raises:
            RuntimeError: As by :meth:`end_batch`.
            ValueError: As by :meth:`end_batch`.
        """
        self.end_batch(flags, options)
        if self._before.kind:
            self.end_batch(flags, options)
        before = self.pop_flags()
        last = self.wait_for_flags()
        self.pop_flags()
        # A wish to stop is sent again as long as it stands: only the last one counts.
        return before.merged(last)._replace(stops=last.stops)

    def start_root_broadcast(self, number: int = 0) -> None:
        """Start to send the root's number to its pipeline, before the batch's end."""
        self._of_root = self._group.start_number_broadcast(number, self._group.root)

    def receive_root_broadcast(self) -> int:
        """Wait for the number that was sent last, once; 0 where none was."""
        of_root, self._of_root = self._of_root, None
        return 0 if of_root is None else int(of_root())

    def _send(self, flags: Flags, batch: _Batch, options: StepOptions | None) -> None:
        digest = 0 if options is None else options.digest()
        checksum, checksums = batch.checksum(), list[int]()
        if self._compares_batches:
            checksums = [_LEAST] * (2 * self._group.num_replicas)
            first = 2 * self._group.replica
            checksums[first : first + 2] = checksum, ~checksum
        numbers = [*map(int, flags), int(not flags.stops), digest, ~digest, *checksums]
        self._sent = _Sent(self._reduce(numbers), checksum, batch, options)

    def _reduce(self, numbers: list[int]) -> Callable[[], list[int]]:
        """Start to reduce a vector; return a function that waits for its maximum."""
        world = self._group.world
        if world.num_processes == 1:
            return lambda: numbers
        vector = torch.tensor(numbers)
        with unprofiled():
            work = world.side_group.allreduce([vector], dist.ReduceOp.MAX)

        def wait() -> list[int]:
            with (
                profiler_range("exchange"),
                reporting_lost_peers("lost a rank while comparing batches"),
            ):
                work.wait()
            return vector.tolist()

        return wait

    def wait_for_flags(self) -> Flags:
        """Read the vectors that were sent last; return all flags since :meth:`pop_flags`."""
        sent, self._sent = self._sent, None
        if sent is None:
            return self._flags_of_all
        stops, exceeds, has_result, due_clocks, lacks, most, least, *checksums = sent.wait()
        flags = Flags(bool(stops), bool(exceeds), bool(has_result), due_clocks)
        self._flags_of_all, self._all_stop = self._flags_of_all.merged(flags), not lacks
        if most != ~least:
            self._refuse_options(sent.options)
        if checksums:
            most, least = checksums[2 * self._group.replica :][:2]
            if most != ~least:
                self._refuse_batch(sent)
        return self._flags_of_all

    def _refuse_batch(self, sent: _Sent) -> None:
        group = self._group
        checksums = dict(zip(group.global_ranks, group.gather(sent.checksum), strict=True))
        apart = [rank for rank in sorted(checksums) if checksums[rank] != checksums[group.root]]
        kind = sent.batch.kind
        difference = f"global ranks {apart} have another {kind} than global rank {group.root}"
        if not apart:  # each rank agrees with its pipeline
            difference = f"ranks that share a stage's layers have another {kind} than each other"
        raise RuntimeError(
            f"{difference}; all get the same from the process that reads, so hooks have changed "
            f"it: let on_before_batch_transfer, on_after_batch_transfer, the start of a batch and "
            f"make_microbatches do the same on all ranks, and draw from the global generators"
        )

    def _refuse_options(self, options: StepOptions | None) -> None:
        names = [name for name, _ in self._pipeline.module.named_parameters()]
        described = {} if options is None else options.describe(names)
        refuse_differences(described, self._group.world.host_group, _SET_ALIKE)
