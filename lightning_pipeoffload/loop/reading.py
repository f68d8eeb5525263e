"""One process of each replica reads the data, and sends to the others what it has read.

Lightning's loops ask for three things, which the others get from the reader in the order in which
all of them ask: the lengths of loaders, the start of a pass through them, and each batch::

    loops                reader                               others
    setup_data           length of each loader          ->    that length
    iter(fetcher)        a pass begins                  ->    length of the pass
    next(fetcher)        a batch, read now or ahead     ->    that batch

Loaders, samplers and generators are the user's own, so the order is that of one device. Reading
draws random numbers on the reader alone: where it has, the states of its generators are sent with
what was read, so that hooks draw the same everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from lightning.fabric.utilities.data import _set_sampler_epoch  # private: as the loops call it
from lightning.fabric.utilities.types import _Stateful  # private: a loader that saves its state
from lightning.pytorch import Trainer
from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
from lightning.pytorch.loops.fetchers import _DataFetcher  # private: what loops get batches from
from lightning.pytorch.overrides.distributed import (
    _IndexBatchSamplerWrapper,  # private: it notes the samples of batches that are predicted
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import (
    CombinedLoader,
    _ModeIterator,  # private: a CombinedLoader has the length of its own
)
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from torch.utils._pytree import tree_map  # private: see runtime/leaves
from torch.utils.data import DataLoader
from typing_extensions import Self, override

from lightning_pipeoffload.loop.data import count_seen, epoch_to_read, silenced
from lightning_pipeoffload.processes.failure import say
from lightning_pipeoffload.runtime.comm.batch_channel import BatchChannel, Received
from lightning_pipeoffload.runtime.randomness import RandomnessReplay
from lightning_pipeoffload.runtime.users_code.sources import (
    generator_state,
    is_generator,
    set_generator_state,
)

_LOOPS = evaluation_loop, fit_loop, prediction_loop
_LONG_SECONDS = 60


class _Length(NamedTuple):
    """The length of a loader; None where it has none."""

    batches: int | None


class _Pass(NamedTuple):
    """The start of a pass through loaders."""

    length: int | None
    is_done: bool
    has_drawn: bool


class _Batch(NamedTuple):
    """What belongs to a batch; without one the data have ended.

    Attributes:
        place: Its number, and that of its loader; None where the data have ended.
        is_last: Whether none follows.
        has_drawn: Whether states of generators come with it.
        indices: Those of its samples, where prediction writers want them.
    """

    place: tuple[int, int] | None
    is_last: bool
    has_drawn: bool
    indices: Any = None


class Reading:
    """What one process reads, or receives, in one entry of the Trainer.

    Args:
        trainer: The trainer.
        channel: To the other processes of the replica.
        watch: Called with a loader, its iterator and whether it is one of training, where a pass
            begins on the reader; returns the iterator to read.
        resumed: The state of the reader in the checkpoint that a fit resumes; None: there is none.
        resumes: Whether the entry is a fit that resumes.
    """

    def __init__(
        self,
        trainer: Trainer,
        channel: BatchChannel,
        watch: Callable[[Any, Iterator[Any], bool], Iterator[Any]],
        resumed: dict[str, Any] | None,
        resumes: bool,
    ) -> None:
        self._trainer, self.channel, self._watch = trainer, channel, watch
        self._resumed, self._resumes = resumed, resumes
        self._training: _ReadingFetcher | None = None
        self._length: _Length | None = None
        self._has_said = False

    def join(self, at_end: ExitStack) -> None:
        """Give Lightning's loops these lengths and fetchers until ``at_end`` is closed."""
        self._at_end = at_end
        # Private: nothing else says where the loops take their batches from.
        names: dict[str, Callable[..., Any]] = {
            "has_len_all_ranks": self._has_length,
            "_parse_num_batches": self._num_batches,
        }
        for module in _LOOPS:
            names["_select_data_fetcher"] = partial(self._select_fetcher, module)
            for name, replacement in names.items():
                plain: Callable[..., Any] = getattr(module, name)
                setattr(module, name, partial(replacement, plain))
                at_end.callback(setattr, module, name, plain)

    # In place of functions of Lightning's loops

    def _has_length(
        self, plain: Callable[..., bool], loader: Any, strategy: Any, *args: Any
    ) -> bool:
        is_own = strategy is self._trainer.strategy and not isinstance(loader, CombinedLoader)
        if not is_own or not self.channel.is_needed:
            return plain(loader, strategy, *args)
        if self.channel.is_reader:
            has_length = plain(loader, strategy, *args)
            self.channel.send(_Length(len(loader) if has_length else None))
            return has_length
        self._length, _ = _receive(self.channel, _Length)
        return False  # the loader of this process may have another length, or none

    def _num_batches(
        self, plain: Callable[..., float], stage: Any, length: float, limit: float
    ) -> float:
        received, self._length = self._length, None
        if received is not None and received.batches is not None:
            length = received.batches
        return plain(stage, length, limit)

    def _select_fetcher(
        self, loop: Any, plain: Callable[..., Any], trainer: Trainer, stage: Any
    ) -> Any:
        if trainer is not self._trainer:
            return plain(trainer, stage)
        if not self.channel.is_reader:
            return _ReceivingFetcher(self.channel, stage == RunningStage.PREDICTING)
        # Not by the stage: a resumed fit lets a validation that it skips begin in that of training.
        is_training = loop is fit_loop
        fetcher = _ReadingFetcher(self, is_training, stage == RunningStage.PREDICTING)
        if is_training:
            self._training = fetcher
        return fetcher

    # A pass of the reader

    def watch(self, combined: CombinedLoader, is_training: bool) -> None:
        """Watch the iterators of a pass through loaders, which has begun."""
        # Private, both: nothing public has the iterators of several loaders.
        iterators: list[Any] = combined._iterator.iterators  # type: ignore[union-attr]
        pairs = zip(combined.flattened, iterators, strict=False)  # of a sequence the first
        iterators[:] = [self._watch(*pair, is_training) for pair in pairs]

    def begin(self, loaders: list[Any]) -> _Resumed | None:
        """Restore the generators before the first pass of a fit that resumes."""
        if not self._resumes or any(isinstance(loader, _Stateful) for loader in loaders):
            return None  # or Lightning restores what the loader has saved
        for loader in loaders:  # Lightning does so later, when workers have indices already
            _set_sampler_epoch(loader, epoch_to_read(self._trainer))
        state, num_seen = self._resumed, count_seen(self._trainer)
        if not num_seen:  # Lightning may begin two passes, and read the second one
            if state is not None:
                _set_states(state["now"], loaders)
            return None
        self._resumes = False
        self._at_end.enter_context(silenced(".*dataloader is not resumable"))
        if state is not None:
            _set_states(state["start"], loaders)
            return _Resumed(num_seen, state["num_read"], state["ahead"], state["now"])
        rank_zero_info(
            f"the checkpoint is of an older version, without the states of random generators: "
            f"{num_seen} batches of this epoch are left out, in an order that is another one than "
            f"before where the loader draws it"
        )
        return _Resumed(num_seen, num_seen, None, None)

    def note_begun(self) -> None:
        """Note that a batch is trained on: further passes go on by themselves."""
        self._resumes = False

    def poll(self, store: Store) -> None:
        """Say once that this process waits for the reader, which is no failure; thread-safe."""
        is_long = self.channel.seconds_waited() > _LONG_SECONDS
        if is_long and not self._has_said:
            say(
                f"global rank {self._trainer.global_rank} has waited for {_LONG_SECONDS} s for "
                f"global rank {self.channel.reader}, which reads the data"
            )
        self._has_said = is_long

    def state(self) -> dict[str, Any] | None:
        """Return the reader's state, by which a fit resumes; None elsewhere, and before a pass."""
        return None if self._training is None else self._training.state()


class _Resumed(NamedTuple):
    """How a pass goes on: it reads ``num_read`` batches, of which ``num_seen`` are left out.

    ``ahead`` has the states of the generators before the last one was read, if it was read ahead;
    ``now`` those after all that. None: the checkpoint has none.
    """

    num_seen: int
    num_read: int
    ahead: dict[str, Any] | None
    now: dict[str, Any] | None


class _ReadingFetcher(_DataFetcher):
    """Reads batches as Lightning's fetcher does, and sends them.

    A batch is read when it is asked for; one batch ahead where the length is not known, as by
    Lightning's, and where workers make all of it.
    """

    def __init__(self, reading: Reading, is_training: bool, predicts: bool) -> None:
        super().__init__()
        self._reading, self._channel = reading, reading.channel
        self._is_training, self._predicts = is_training, predicts
        self._ready: deque[Any] = deque()  # read, and not handed out
        self._unsent: list[Any] = []
        self._num_read = 0
        self._is_over = self._has_drawn = self._is_watched = self._reads_ahead = False
        self._start: dict[str, Any] = {}
        self._before_last: dict[str, Any] | None = None

    @override
    def __iter__(self) -> Self:
        loaders = self.combined_loader.flattened
        self._ready.clear()
        self._unsent.clear()
        self._num_read, self._is_over = 0, False
        self._reads_ahead = self._channel.is_needed and all(map(_may_be_ahead, loaders))
        with self._noting_draws():
            resumed = self._reading.begin(loaders) if self._is_training else None
            if self._is_training:
                self._start = _states(loaders)
            super().__iter__()
            if not self._is_watched:
                self._is_watched = True
                self._reading.watch(self.combined_loader, self._is_training)
            if resumed is not None:
                self._go_on(resumed, loaders)
            if self.length is None and not self._ready:
                self._read()
        self.done = self.done or self._has_ended()
        self._send(_Pass(self.length, self.done, self._has_drawn))
        return self

    def _go_on(self, resumed: _Resumed, loaders: list[Any]) -> None:
        for number in range(resumed.num_read):
            if number == resumed.num_seen and resumed.ahead is not None:
                _set_states(resumed.ahead, loaders)
            self._read()
            if number < resumed.num_seen and self._ready:
                self._ready.popleft()
        self._unsent = [batch for batch, _, _ in self._ready]
        if resumed.now is not None:
            _set_states(resumed.now, loaders)

    @override
    def __next__(self) -> Any:
        if self.done:
            raise StopIteration
        with self._noting_draws():
            if not self._ready:
                self._read()
            item = self._ready.popleft() if self._ready else None
            if item is not None:
                self.fetched += 1
                if not self._ready and self._wants_another():
                    self._read()
        if item is None:
            self.done = True
            self._send(_Batch(None, True, self._has_drawn))
            raise StopIteration
        is_last = self.length is not None and self.fetched >= self.length
        self.done = is_last or self._has_ended()
        if self._is_training:
            self._reading.note_begun()
        _, number, loader = item
        indices = _indices_of(self.combined_loader, loader, number) if self._predicts else None
        self._send(_Batch((number, loader), self.done, self._has_drawn, indices))
        return item

    def _read(self) -> None:
        if self._is_over:
            return
        assert self.iterator is not None
        if self._is_training and (self.length is None or self._reads_ahead):
            self._before_last = _states(self.combined_loader.flattened)
        self._start_profiler()
        try:
            item = next(self.iterator)
        except StopIteration:
            self._is_over = True
            return
        finally:
            self._stop_profiler()
        self._num_read += 1
        self._ready.append(item)
        self._unsent.append(item[0])

    def _wants_another(self) -> bool:
        return self.length is None or (self._reads_ahead and self.fetched < self.length)

    def _has_ended(self) -> bool:
        return self.length is None and self._is_over and not self._ready

    @contextmanager
    def _noting_draws(self) -> Iterator[None]:
        if not self._channel.is_needed:
            yield
            return
        before = RandomnessReplay()
        yield
        self._has_drawn = self._has_drawn or not RandomnessReplay().is_like(before)

    def _send(self, header: _Pass | _Batch) -> None:
        """Send the batches that were read since the last message, and the generators' states."""
        if self._channel.is_needed:
            states = [RandomnessReplay().state()] if self._has_drawn else []
            self._channel.send(header, [*states, *self._unsent])
        self._unsent.clear()
        self._has_drawn = False

    def state(self) -> dict[str, Any]:
        """Return what was read, and the states of the generators, for :class:`_Resumed`.

        All values are such as every checkpoint may have.
        """
        states = {
            "start": self._start,
            "ahead": self._before_last if self._ready else None,
            "now": _states(self.combined_loader.flattened),
            "num_read": self._num_read,
        }
        plain: dict[str, Any] = tree_map(_without_array, states)
        return plain

    @override
    def teardown(self) -> None:
        super().teardown()
        self._ready.clear()
        self._unsent.clear()


class _ReceivingFetcher(_DataFetcher):
    """Receives what the reader of the replica hands out."""

    def __init__(self, channel: BatchChannel, predicts: bool) -> None:
        super().__init__()
        self._channel, self._predicts = channel, predicts
        self._coming: deque[Received] = deque()

    @override
    def __iter__(self) -> Self:
        self._coming.clear()
        header = self._receive(_Pass)
        # Private: the loader answers by it how many batches it has, and nothing iterates over it.
        self.combined_loader._iterator = _OfLength(header.length)
        self.reset()
        self.done = header.is_done
        if self._predicts:
            for loader in self.combined_loader.flattened:
                _note_indices(loader, None)
        return self

    @override
    def __next__(self) -> Any:
        if self.done:
            raise StopIteration
        self._start_profiler()
        try:
            header = self._receive(_Batch)
            batch = self._coming.popleft().get() if header.place is not None else None
        finally:
            self._stop_profiler()
        self.done = header.is_last
        if header.place is None:
            raise StopIteration
        self.fetched += 1
        number, loader = header.place
        if self._predicts:
            _note_indices(self.combined_loader.flattened[loader], header.indices)
        return batch, number, loader

    def _receive(self, kind: type[Any]) -> Any:
        header, coming = _receive(self._channel, kind)
        if header.has_drawn:
            RandomnessReplay(coming.pop(0).get()).restore()
        self._coming.extend(coming)
        return header


def _receive(channel: BatchChannel, kind: type[Any]) -> tuple[Any, list[Received]]:
    """Receive a header of a kind, and what comes with it.

    Raises:
        RuntimeError: The reader's loop is at another place.
    """
    header, coming = channel.receive()
    if not isinstance(header, kind):
        raise RuntimeError(
            f"global rank {channel.reader}, which reads the data, has come to "
            f"{_PLACES[type(header)]}, and this rank to {_PLACES[kind]}; give every rank as many "
            f"loaders, in the same collection, and let hooks decide alike on all ranks"
        )
    return header, coming


_PLACES = {
    _Length: "the length of a loader",
    _Pass: "the start of a pass through its loaders",
    _Batch: "the next batch",
}


class _OfLength(_ModeIterator):
    """Has a length, and no batches."""

    def __init__(self, length: int | None) -> None:
        super().__init__([])
        self._length = length

    @override
    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the number of batches is not known")
        return self._length


def _may_be_ahead(loader: Any) -> bool:
    """Whether batches can be read before they are asked for: by workers, without a saved state."""
    has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
    return has_workers and not isinstance(loader, _Stateful)


def _indices_of(combined: CombinedLoader, loader: int, number: int) -> Any:
    sampler = getattr(combined.flattened[loader], "batch_sampler", None)
    if not isinstance(sampler, _IndexBatchSamplerWrapper):
        return None
    return sampler.seen_batch_indices[number]


def _note_indices(loader: Any, indices: Any) -> None:
    """Note a batch's indices as the sampler does where it is read; None: a pass begins."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, _IndexBatchSamplerWrapper):
        return
    if indices is None:
        sampler.seen_batch_indices = []
    else:
        sampler.seen_batch_indices.append(indices)


def _generators_of(loaders: list[Any]) -> list[Any]:
    """List the random generators that loaders and their samplers hold."""
    found: dict[int, Any] = {}
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        samplers = (getattr(owner, "sampler", None) for owner in (loader, batches))
        for owner in (loader, batches, *samplers):
            held = getattr(owner, "__dict__", {}).values()
            found |= {id(value): value for value in held if is_generator(value)}
    return [*found.values()]


def _states(loaders: list[Any]) -> dict[str, Any]:
    """Return the states of all generators."""
    of_loaders = [generator_state(generator) for generator in _generators_of(loaders)]
    return {"global": RandomnessReplay().state(), "loaders": of_loaders}


def _without_array(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _set_states(states: dict[str, Any], loaders: list[Any]) -> None:
    RandomnessReplay(states["global"]).restore()
    for generator, state in zip(_generators_of(loaders), states["loaders"], strict=False):
        set_generator_state(generator, state)
