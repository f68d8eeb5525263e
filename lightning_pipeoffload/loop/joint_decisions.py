"""What one rank meets in a fit counts for all: an order to stop, the end of its data, its clock.

Nobody waits for another rank's news. A batch takes every rank, so what was sent at the end of one
is there at the end of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from lightning_pipeoffload.loop.step_exchange import StepExchange
from lightning_pipeoffload.processes.wrapped_hook import WrappedHook
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.host_group import World
from lightning_pipeoffload.runtime.mesh import RankMesh

_ARRIVED = "arrived/"


class JointStop:
    """One rank's part in a fit's common decision to stop.

    At the end of a batch each rank says whether it wants to stop, and reads what was said after the
    batch before. Only a rank that wants to stop waits for what is said now, since all may want it.
    So what all ranks set stops them at once, and what one rank sets after the next batch. What a
    step sets behind the blocks, on the last stage, reaches the others before they end that batch.
    """

    def __init__(self, trainer: Trainer, group: PipelineGroup, exchange: StepExchange) -> None:
        self._trainer, self._group, self._exchange = trainer, group, exchange
        self._wants = self._has_been_told = False
        self._num_steps = 0
        self._told: Callable[[], int] | None = None

    def start_batch(self, num_microbatches: int) -> None:
        """Begin a training batch, of as many microbatches whose steps end on the last stage."""
        self.hear()  # of the same batch, if an optimizer evaluates it again
        self._num_steps = num_microbatches if self._group.is_root else 0
        if not self._group.is_root:
            self._told = self._group.start_sharing(0, self._group.root)

    def end_step(self) -> None:
        """Count a microbatch whose step has come to its end; called on the last stage."""
        self._num_steps -= 1
        if self._num_steps == 0:
            self._told = self._group.start_sharing(
                self._wants or self._trainer.should_stop, self._group.root
            )

    def hear(self) -> bool:
        """Return whether this rank wants to stop, at the end of a batch."""
        told, self._told = self._told, None
        if told is not None and told():
            self._wants = True
        return self._wants or self._trainer.should_stop

    def remember(self, told: bool) -> None:
        """Let what any rank has said in the middle of a batch count at its end."""
        self._has_been_told = self._has_been_told or told

    def decide(self, wants: bool, told: bool) -> None:
        """Set ``should_stop`` as all ranks do.

        Args:
            wants: Whether this rank has said that it wants to stop.
            told: Whether any rank has said so after the batch before.
        """
        told, self._has_been_told = told or self._has_been_told, False
        stops = told or (wants and self._exchange.all_stop())
        self._trainer.should_stop = stops
        self._wants = wants and not stops

    def settle(self, told: bool) -> None:
        """Let what any rank has set count, where ranks have waited for each other."""
        self._trainer.should_stop = told
        self._wants = self._has_been_told = False


class Arrivals:
    """Compares how many batches the ranks have read between places that all of them pass.

    Such as a validation, or an epoch's end: a rank with fewer lets another wait for ever. The
    thread that looks for failures compares.
    """

    def __init__(self, store: Store, mesh: RankMesh) -> None:
        self._store, self._mesh = store, mesh
        self._global_rank = mesh.global_rank
        self._others = [rank for rank in range(mesh.world_size) if rank != mesh.global_rank]
        self._position = 0, 0  # places passed, batches since; one object, as two threads use it

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Count a batch; where it fails because another rank has no more, say that.

        Raises:
            RuntimeError: The batch failed; the message says that another rank has no more.
        """
        place, num_batches = self._position
        self._position = place, num_batches + 1
        try:
            yield
        except RuntimeError as error:  # the other's next batch came in place of this one's, say
            cause = self.look(self._store)
            if cause is not None:
                raise RuntimeError(f"this rank waits for {cause}") from error
            raise

    def arrive(self) -> None:
        """Pass a place, and let the others know after how many batches."""
        place, num_batches = self._position
        self._store.set(f"{_ARRIVED}{place}/{self._global_rank}", str(num_batches))
        self._position = place + 1, 0

    def look(self, store: Store) -> str | None:
        """Name another rank that is done with fewer batches, if one is.

        Args:
            store: The same store, maybe by a connection of another thread.
        """
        place, num_batches = self._position
        for rank in self._others if num_batches else ():
            key = f"{_ARRIVED}{place}/{rank}"
            theirs = int(store.get(key)) if store.check([key]) else num_batches
            if theirs < num_batches:
                return self._explain(rank, theirs)
        return None

    def _explain(self, rank: int, num_batches: int) -> str:
        other, own = self._mesh.replica_of(rank), self._mesh.replica
        if other != own:
            return (
                f"replica {other}, whose data has ended after {num_batches} batches where replica "
                f"{own} has more; give every replica as many: by Lightning's sampler, or with "
                f"limit_train_batches where an IterableDataset shares its data out"
            )
        return (
            f"global rank {rank}, whose data has ended after {num_batches} batches where global "
            f"rank {self._global_rank} has more; the ranks of a pipeline must read the same "
            f"batches: give each the same data, and do not share it out"
        )


class Clocks:
    """The callbacks of a trainer that go by the clock at a batch's end.

    Lightning's Timer and ``ModelCheckpoint(train_time_interval=...)`` let all ranks wait for global
    rank 0's clock there. A rank that runs out of time stops all by itself. To save, all do what
    global rank 0 has told them a batch before::

        global rank 0   end of batch 7: it is time      end of batch 8: saves
        other ranks     end of batch 7: not told so     end of batch 8: told of 7, save
    """

    def __init__(self, trainer: Trainer, world: World) -> None:
        self._strategy: Any = trainer.strategy
        self._wrapped: list[WrappedHook] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
            if isinstance(callback, Timer):
                self._wrap(callback, bool)
            elif isinstance(callback, ModelCheckpoint):
                interval = callback._train_time_interval  # private: nothing else says it
                if interval is not None:  # of no length: after each batch, whatever the clock says
                    self._wrap(callback, _SkipsTold(world) if interval else bool)

    def _wrap(self, callback: Any, decide: Callable[[bool], bool]) -> None:
        run = partial(self._run, decide)
        self._wrapped.append(WrappedHook(callback, "on_train_batch_end", run))

    def _run(
        self, decide: Callable[[bool], bool], plain: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._strategy.answer = decide
        try:
            return plain(*args, **kwargs)
        finally:
            self._strategy.answer = None

    def remove(self) -> None:
        """Give the callbacks their own hooks back."""
        while self._wrapped:
            self._wrapped.pop().remove()


class _SkipsTold:
    """Whether it is not yet time to save, by global rank 0's clock a batch before."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: Callable[[], int] | None = None

    def __call__(self, skips: bool) -> bool:
        before, self._told = self._told, self._world.start_telling(skips)
        if before is None or before():
            return True
        self._told()  # of a time that this save is for
        self._told = None
        return False
