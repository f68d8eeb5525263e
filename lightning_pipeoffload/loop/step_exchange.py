"""The exchange between batches: one vector of each rank, which is read a batch later.

A batch takes every rank, so the vectors that were sent at the end of one are there at the end of
the next, and no rank waits::

    end of batch 7   send this rank's vector        read the maximum of those of batch 6
    end of batch 8   send                           read the maximum of those of batch 7

The vector is reduced by its maximum. Numbers that have to be alike are sent with their complement:
the maximum of both shows the minimum too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_pipeoffload.processes.rank_differences import StepOptions, refuse_differences
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.microbatch import start_checksum
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.transport import blaming_peers
from lightning_pipeoffload.runtime.users_code.replaced_methods import WrappedHook

_SET_ALIKE = (
    "set options of optimizers, freeze parameters and call optimizer.step alike on all ranks; a "
    "value that only some ranks have goes to all of them by self.log and "
    "trainer.callback_metrics, or by trainer.strategy.broadcast"
)
_LEAST = torch.iinfo(torch.int64).min


class Said(NamedTuple):
    """Flags that a rank sends after a batch; of all ranks the maximum.

    Attributes:
        stops: Training is to stop.
        outgrown: A microbatch keeps more memory than the plan allows.
        has_news: A solver has a better plan, or has ended.
        due: Which of global rank 0's clocks are due, one bit each; see :class:`Clocks`.
    """

    stops: bool = False
    outgrown: bool = False
    has_news: bool = False
    due: int = 0

    def joined(self, other: Said) -> Said:
        """Return the maximum of both."""
        return Said(
            self.stops or other.stops,
            self.outgrown or other.outgrown,
            self.has_news or other.has_news,
            max(self.due, other.due),
        )


_NOTHING = Said()


class _Batch(NamedTuple):
    """A batch to compare; ``kind`` is empty where there is none."""

    kind: str = ""
    checksum: Callable[[], int] = int


class _Sent(NamedTuple):
    wait: Callable[[], list[int]]
    checksum: int
    batch: _Batch
    options: StepOptions | None


class StepExchange:
    """This rank's side of the exchange.

    Args:
        pipeline: This rank's part of the module.
        is_late: Whether batches are on an accelerator: the checksum of each is sent a batch later,
            so that the host does not wait for it.
    """

    def __init__(self, pipeline: Pipeline, is_late: bool) -> None:
        self._pipeline, self._group, self._is_late = pipeline, pipeline.group, is_late
        self._batch = self._before = _Batch()
        self._sent: _Sent | None = None
        self._heard, self._all_stop = Said(), False

    def note(self, batch: Any, kind: str) -> None:
        """Start to compute the checksum of a batch, which errors call ``kind``."""
        self._batch = _Batch(kind, start_checksum(batch))

    def turn(self, mine: Said = _NOTHING, options: StepOptions | None = None) -> None:
        """Read the vectors of the batch before, and send this batch's.

        Args:
            mine: What this rank says.
            options: What decides the optimizers' steps; None: not compared.

        Raises:
            RuntimeError: The ranks of a pipeline have read different batches.
            ValueError: The optimizers' options are different.
        """
        self.read()
        batch, self._batch = self._batch, _Batch()
        if self._is_late:
            batch, self._before = self._before, batch
        self._send(mine, batch, options)

    def take(self) -> Said:
        """Return what was read since the last call."""
        heard, self._heard = self._heard, Said()
        return heard

    def all_stop(self) -> bool:
        """Wait for the vectors that were sent last; return whether all ranks want to stop."""
        self.read()
        return self._all_stop

    def settle(self, mine: Said, options: StepOptions | None = None) -> Said:
        """Compare the batches that are not compared yet, and wait; return the ranks' maximum.

        Raises:
            RuntimeError: As by :meth:`turn`.
            ValueError: As by :meth:`turn`.
        """
        self.turn(mine, options)
        if self._before.kind:
            self.turn(mine, options)
        before = self.take()
        last = self.read()
        self.take()
        # A wish to stop is said again as long as it stands: only the last one counts.
        return before.joined(last)._replace(stops=last.stops)

    def _send(self, mine: Said, batch: _Batch, options: StepOptions | None) -> None:
        digest = 0 if options is None else options.digest()
        checksums = [_LEAST] * (2 * self._group.num_replicas)
        own = batch.checksum()
        first = 2 * self._group.replica
        checksums[first : first + 2] = own, ~own
        numbers = [*map(int, mine), int(not mine.stops), digest, ~digest, *checksums]
        self._sent = _Sent(self._reduce(numbers), own, batch, options)

    def _reduce(self, numbers: list[int]) -> Callable[[], list[int]]:
        """Start to reduce a vector; return a function that waits for its maximum."""
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

    def read(self) -> Said:
        """Read the vectors that were sent last; return all that was heard since :meth:`take`."""
        sent, self._sent = self._sent, None
        if sent is None:
            return self._heard
        stops, outgrown, has_news, due, lacks, most, least, *checksums = sent.wait()
        said = Said(bool(stops), bool(outgrown), bool(has_news), due)
        self._heard, self._all_stop = self._heard.joined(said), not lacks
        if most != ~least:
            self._refuse_options(sent.options)
        first = 2 * self._group.replica
        if checksums[first] != ~checksums[first + 1]:
            self._refuse_batch(sent)
        return self._heard

    def _refuse_batch(self, sent: _Sent) -> None:
        group = self._group
        found = dict(zip(group.global_ranks, group.gather(sent.checksum), strict=True))
        apart = [rank for rank in sorted(found) if found[rank] != found[group.root]]
        raise RuntimeError(
            f"global ranks {apart} read another {sent.batch.kind} than global rank {group.root}; "
            f"the ranks of a pipeline must read the same data in the same order: call "
            f"L.seed_everything(...) before the data is made, seed generators of your own alike in "
            f"every process, and share samples out by nothing but "
            f"lightning_pipeoffload.data_parallel_rank()"
        )

    def _refuse_options(self, options: StepOptions | None) -> None:
        names = [name for name, _ in self._pipeline.module.named_parameters()]
        described = {} if options is None else options.describe(names)
        refuse_differences(described, self._group.world.host_group, _SET_ALIKE)


class JointStop:
    """``trainer.should_stop`` of any rank, for all ranks.

    At the end of a batch each rank sends whether it wants to stop, and reads the vectors of the
    batch before. Only a rank that wants to stop waits for those of this batch, since all may want
    it. So a stop that all ranks set ends this batch, and one that some set the next. A stop that a
    step sets behind the blocks, on the last stage, reaches the others before they end that batch.
    """

    def __init__(self, trainer: Trainer, group: PipelineGroup, exchange: StepExchange) -> None:
        self._trainer, self._group, self._exchange = trainer, group, exchange
        self._wants = self._any_stopped = False
        self._num_steps = 0
        self._of_root: Callable[[], int] | None = None

    def start_batch(self, num_microbatches: int) -> None:
        self.wants()  # of the same batch, if an optimizer evaluates it again
        self._num_steps = num_microbatches if self._group.is_root else 0
        if not self._group.is_root:
            self._of_root = self._group.start_sharing(0, self._group.root)

    def end_step(self) -> None:
        """Count a microbatch whose step has come to its end; called on the last stage."""
        self._num_steps -= 1
        if self._num_steps == 0:
            self._of_root = self._group.start_sharing(
                self._wants or self._trainer.should_stop, self._group.root
            )

    def wants(self) -> bool:
        """Whether this rank wants to stop, or the last stage's step did."""
        of_root, self._of_root = self._of_root, None
        if of_root is not None and of_root():
            self._wants = True
        return self._wants or self._trainer.should_stop

    def remember(self, any_stops: bool) -> None:
        """Count at the batch's end what was heard in the middle of it."""
        self._any_stopped = self._any_stopped or any_stops

    def end_batch(self, wants: bool, any_stopped: bool) -> None:
        """Set ``should_stop`` as all ranks do.

        Args:
            wants: What this rank has sent after this batch.
            any_stopped: Whether any rank wanted to stop after the batch before.
        """
        any_stopped, self._any_stopped = any_stopped or self._any_stopped, False
        stops = any_stopped or (wants and self._exchange.all_stop())
        self._trainer.should_stop = stops
        self._wants = wants and not stops

    def settle(self, any_stops: bool) -> None:
        """Set ``should_stop`` where ranks have waited for each other."""
        self._trainer.should_stop = any_stops
        self._wants = self._any_stopped = False


class Clocks:
    """Saves and validates by global rank 0's clock, a batch after it is due.

    Lightning's ``ModelCheckpoint(train_time_interval=...)`` makes all ranks wait for global rank 0
    at each batch, and a ``val_check_interval`` of time reads a clock on each rank::

        global rank 0   end of batch 7: its clock is due    end of batch 8: saves
        other ranks     end of batch 7: not due             end of batch 8: 7 was due, save

    A Timer stops its own rank, and :class:`JointStop` the others.
    """

    _OF_VALIDATION = 1

    def __init__(self, trainer: Trainer, exchange: StepExchange) -> None:
        self._trainer: Any = trainer
        self._exchange = exchange
        self._due = 0
        self._validates = False
        self._wrapped: list[WrappedHook] = []
        bit = self._OF_VALIDATION
        for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
            if isinstance(callback, Timer):
                self._wrap(callback, bool)
            elif isinstance(callback, ModelCheckpoint):
                interval = callback._train_time_interval  # private: nothing else says it
                bit *= 2
                if interval:
                    self._wrap(callback, partial(self._skips, bit))
                elif interval is not None:  # of no length: after each batch
                    self._wrap(callback, bool)

    def _wrap(self, callback: Any, answer: Callable[[bool], bool]) -> None:
        """Answer the broadcast in a callback's hook without the other ranks."""

        def run(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._trainer.strategy.answering(answer):
                return plain(*args, **kwargs)

        self._wrapped.append(WrappedHook(callback, "on_train_batch_end", run))

    def _skips(self, bit: int, skips: bool) -> bool:
        return not self._is_due(bit, not skips)

    def _is_due(self, bit: int, is_due_here: bool) -> bool:
        """Whether a clock of global rank 0 was due after the batch before."""
        if self._exchange.read().due & bit:
            self._due &= ~bit
            return True
        if is_due_here and self._trainer.is_global_zero:
            self._due |= bit
        return False

    def end_batch(self) -> int:
        """Return which clocks of this rank are due."""
        interval = self._trainer._val_check_time_interval  # private, and the other: as Lightning
        if interval is not None:
            is_due = time.monotonic() - self._trainer._last_val_time >= interval
            # An interval of no length is over on all ranks.
            self._validates = not interval or self._is_due(self._OF_VALIDATION, is_due)
        return self._due

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Lightning decides in here whether to validate, and asks no clock."""
        trainer = self._trainer
        interval = trainer._val_check_time_interval
        if interval is not None:
            # No time is as long as NaN.
            trainer._val_check_time_interval = -math.inf if self._validates else math.nan
        try:
            yield
        finally:
            trainer._val_check_time_interval = interval

    def remove(self) -> None:
        while self._wrapped:
            self._wrapped.pop().remove()
