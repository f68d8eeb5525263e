"""One process of each replica reads the data, and sends to the others what it has read.

Lightning's loops ask for three things, which the others get from the reader in the order in which
all of them ask: the lengths of loaders, the start of a pass through them, and each batch::

    loops                reader                               others
    setup_data           length of each loader          ->    that length
    iter(fetcher)        a pass begins                  ->    length of the pass
    next(fetcher)        a batch, read now or ahead     ->    that batch

Where workers make the batches, two are read and sent ahead of their turn. So the others begin a
step while the reader still ends the one before, in hooks or a save, and the batch of the next step
is on its way meanwhile. A loop within the loop, validation say, comes upon these first, and puts
them aside.

Loaders, samplers and generators are the user's own, so the order is that of one device. Reading
draws random numbers on the reader alone: where it has, the states of its generators are sent with
what was read, so that hooks draw the same everywhere. A batch whose reading draws in every case is
not read ahead, since hooks before its turn may draw too.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
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
)
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from torch.utils._pytree import tree_map  # private: see runtime/leaves
from torch.utils.data import DataLoader
from typing_extensions import Self, override

from lightning_pipeoffload.loop.data import (
    NUM_CHECKED,
    FirstBatches,
    count_resumed_batches,
    epoch_to_read,
    silenced,
)
from lightning_pipeoffload.loop.receiving import (
    MOST_AHEAD,
    BatchHeader,
    Inbox,
    Length,
    LoaderStart,
    ReceivingFetcher,
)
from lightning_pipeoffload.processes import print_error_line
from lightning_pipeoffload.runtime import RandomStateSnapshot, are_same_states, replaced
from lightning_pipeoffload.runtime.comm import BatchChannel
from lightning_pipeoffload.runtime.users_code import (
    is_random_generator,
    set_generator_state,
    state_of_generator,
)

_LOOPS = evaluation_loop, fit_loop, prediction_loop
_LONG_SECONDS = 60
_numbers = itertools.count()  # of passes; an interrupted one may leave messages to a later entry


class BatchDistributor:
    """What one process reads, or receives, in one entry of the Trainer.

    Args:
        trainer: The trainer.
        channel: To the other processes of the replica.
        checks: Checks the first batches of each loader, on the reader.
        resumed: The state of the reader in the checkpoint that a fit resumes; None: there is none.
        resumes: Whether the entry is a fit that resumes.
    """

    def __init__(
        self,
        trainer: Trainer,
        channel: BatchChannel,
        checks: FirstBatches,
        resumed: dict[str, Any] | None,
        resumes: bool,
    ) -> None:
        self._trainer, self.channel, self._checks = trainer, channel, checks
        self._resumed, self._resumes = resumed, resumes
        self._training: _ReadingFetcher | None = None
        self._length: Length | None = None
        self._inbox = Inbox(channel)
        self._has_said = False

    def install(self, at_end: ExitStack) -> None:
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
                at_end.enter_context(replaced(module, name, partial(replacement, plain)))

    # In place of functions of Lightning's loops

    def _has_length(
        self, plain: Callable[..., bool], loader: Any, strategy: Any, *args: Any
    ) -> bool:
        is_own = strategy is self._trainer.strategy and not isinstance(loader, CombinedLoader)
        if not is_own or not self.channel.is_needed:
            return plain(loader, strategy, *args)
        if self.channel.is_reader:
            has_length = plain(loader, strategy, *args)
            self.channel.send(Length(len(loader) if has_length else None))
            return has_length
        self._length, _ = self._inbox.receive(Length)
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
            return ReceivingFetcher(self._inbox, stage == RunningStage.PREDICTING)
        # Not by the stage: a resumed fit lets a validation that it skips begin in that of training.
        is_training = loop is fit_loop
        fetcher = _ReadingFetcher(self, is_training, stage == RunningStage.PREDICTING)
        if is_training:
            self._training = fetcher
        return fetcher

    def check(self, combined: CombinedLoader, item: Any, is_training: bool) -> None:
        """Check a batch that was read, with its number and that of its loader."""
        batch, number, loader = item
        if number >= NUM_CHECKED:
            return
        # Private, both: nothing public has the batches of several loaders.
        if combined._mode == "sequential":
            self._checks.check(combined.flattened[loader], batch, number, is_training)
            return
        batches = combined._spec.flatten_up_to(batch)
        for each, part in zip(combined.flattened, batches, strict=True):
            if part is not None:  # or its loader has ended
                self._checks.check(each, part, number, is_training)

    def resume(self, loaders: list[Any]) -> _Resumed | None:
        """Restore the generators before the first pass of a fit that resumes."""
        if not self._resumes or any(isinstance(loader, _Stateful) for loader in loaders):
            return None  # or Lightning restores what the loader has saved
        for loader in loaders:  # Lightning does so later, when workers have indices already
            _set_sampler_epoch(loader, epoch_to_read(self._trainer))
        state, num_seen = self._resumed, count_resumed_batches(self._trainer)
        if not num_seen:  # Lightning may begin two passes, and read the second one
            if state is not None:
                _set_generator_states(state["now"], _find_generator_attributes(loaders))
            return None
        self._resumes = False
        self._at_end.enter_context(silenced(".*dataloader is not resumable"))
        if state is not None:
            _set_generator_states(state["start"], _find_generator_attributes(loaders))
            return _Resumed(num_seen, state["num_read"], state["ahead"], state["now"])
        rank_zero_info(
            f"the checkpoint is of an older version, without the states of random generators: "
            f"{num_seen} batches of this epoch are left out, in an order that is another one than "
            f"before where the loader draws it"
        )
        return _Resumed(num_seen, num_seen, None, None)

    def stop_resuming(self) -> None:
        """Record that a batch is trained on: further passes go on by themselves."""
        self._resumes = False

    def poll(self, store: Store) -> None:
        """Say once that this process waits for the reader, which is no failure; thread-safe."""
        is_long = self.channel.seconds_waited() > _LONG_SECONDS
        if is_long and not self._has_said:
            print_error_line(
                f"global rank {self._trainer.global_rank} has waited for {_LONG_SECONDS} s for "
                f"global rank {self.channel.reader}, which reads the data"
            )
        self._has_said = is_long

    def state(self) -> dict[str, Any] | None:
        """Return the reader's state, by which a fit resumes; None elsewhere, and before a pass."""
        return None if self._training is None else self._training.state()


class _Resumed(NamedTuple):
    """How a pass goes on: it reads ``num_read`` batches, of which ``num_seen`` are left out.

    ``ahead`` has the states of the generators before the first of the others was read; ``now``
    those after all that. None: the checkpoint has none.
    """

    num_seen: int
    num_read: int
    ahead: dict[str, Any] | None
    now: dict[str, Any] | None


@dataclass
class _Read:
    """What reading has returned.

    Attributes:
        item: The batch, its number, and that of its loader; None where the data have ended.
        error: Why there is none.
        before: The states of the generators before it was read.
        after: Those that are set at its turn, where reading it ahead has drawn; else None.
        wait: Waits until it has been sent and may change; None: it is not sent.
    """

    item: Any
    error: Exception | None
    before: dict[str, Any]
    after: dict[str, Any] | None
    wait: Callable[[], None] | None = None

    @property
    def is_end(self) -> bool:
        return self.item is None and self.error is None


class _ReadingFetcher(_DataFetcher):
    """Reads batches as Lightning's fetcher does, and sends them.

    A batch is read at its turn, or one batch earlier where the length is not known, as by
    Lightning's. Where workers make all of it, it is read two batches earlier, unless reading the
    first one has drawn. If reading a later one ahead draws, as the start of the next loader does,
    what it has drawn counts from its turn on.
    """

    def __init__(self, reading: BatchDistributor, is_training: bool, predicts: bool) -> None:
        super().__init__()
        self._reading, self._channel = reading, reading.channel
        self._is_training, self._predicts = is_training, predicts
        self._ready: deque[_Read] = deque()  # read, and not handed out
        self._num_read = self._number = 0
        self._is_ahead = self._has_drawn = self._notes_draws = False
        self._start: dict[str, Any] = {}
        self._places: list[_GeneratorAttribute] = []  # of the loaders' generators

    @override
    def __iter__(self) -> Self:
        loaders = self.combined_loader.flattened
        self._ready.clear()
        self._number, self._num_read, self._is_ahead = next(_numbers), 0, False
        places = _find_generator_attributes(loaders)
        before = _generator_states(places)
        resumed = self._reading.resume(loaders) if self._is_training else None
        self._start = _generator_states(places)
        super().__iter__()
        self._places = _find_generator_attributes(loaders)
        self._notes_draws = self._channel.is_needed or (self._is_training and self.length is None)
        if resumed is not None:
            self._skip_seen_batches(resumed)
        if self.length is None and not self._ready:
            self._read_next_batch()
        self.done = self.done or self._has_ended()
        if self._channel.is_needed:
            self._has_drawn = not are_same_states(before, _generator_states(self._places))
            self._channel.send(
                LoaderStart(self._number, self.length, self.done),
                self._generator_states_to_send(None),
            )
        return self

    def _skip_seen_batches(self, resumed: _Resumed) -> None:
        for number in range(resumed.num_read):
            if number == resumed.num_seen and resumed.ahead is not None:
                _set_generator_states(resumed.ahead, self._places)
            self._read_next_batch()
            if number < resumed.num_seen:
                self._pop()
        if resumed.now is not None:
            _set_generator_states(resumed.now, self._places)

    @override
    def __next__(self) -> Any:
        if self.done:
            raise StopIteration
        if not self._ready:
            self._read_next_batch()
        read = self._pop()
        is_end = read.is_end
        if not is_end:
            self.fetched += 1
            self._read_ahead()
        self.done = is_end or self._is_last(0) or self._has_ended()
        if self._channel.is_needed:
            self._send_ready_batches(read)
        if is_end:
            raise StopIteration
        if self._is_training:
            self._reading.stop_resuming()
        return read.item

    def _pop(self) -> _Read:
        read = self._ready.popleft()
        if read.after is not None:
            _set_generator_states(read.after, self._places)
        if read.error is not None:
            raise read.error
        return read

    def _read_ahead(self) -> None:
        if self.length is None and not self._ready:
            self._read_next_batch()
        while self._is_ahead and len(self._ready) < MOST_AHEAD:
            is_over = self._ready and self._ready[-1].item is None
            if is_over or self._is_last(len(self._ready)):
                break
            self._read_next_batch()

    def _is_last(self, distance: int) -> bool:
        """Whether the batch so many after the present one is the last, by the known length."""
        return self.length is not None and self.fetched + distance >= self.length

    def _has_ended(self) -> bool:
        return self.length is None and bool(self._ready) and self._ready[0].is_end

    def _read_next_batch(self) -> None:
        assert self.iterator is not None
        is_ahead, now = self._is_ahead, self._generator_states()
        before = next((read.after for read in reversed(self._ready) if read.after), now)
        if before is not now:
            _set_generator_states(before, self._places)
        item = error = None
        self._start_profiler()
        try:
            item = next(self.iterator)
            self._num_read += 1
            if item[1] == 0:  # a loader's first batch: its sampler may make a generator then
                self._places = _find_generator_attributes(self.combined_loader.flattened)
            self._reading.check(self.combined_loader, item, self._is_training)
        except StopIteration:
            pass
        except Exception as raised:
            if not is_ahead:
                raise
            item, error = None, raised  # raised at its turn, if that comes
        finally:
            self._stop_profiler()
        after = self._generator_states()
        has_drawn = not are_same_states(before, after)
        self._ready.append(_Read(item, error, before, after if is_ahead and has_drawn else None))
        if is_ahead:
            if has_drawn or before is not now:
                _set_generator_states(now, self._places)
            return
        self._has_drawn = self._has_drawn or has_drawn
        if self._num_read == 1 and not has_drawn:
            loaders = self.combined_loader.flattened
            self._is_ahead = self._channel.is_needed and all(map(_can_prefetch, loaders))

    def _generator_states(self) -> dict[str, Any]:
        """Return the states of all generators, if another process or a checkpoint needs them."""
        return _generator_states(self._places) if self._notes_draws else {}

    def _send_ready_batches(self, read: _Read) -> None:
        """Send what is handed out, and what was read ahead."""
        for distance, each in enumerate([read, *self._ready] if self._is_ahead else [read]):
            if each.wait is not None:
                continue
            place, indices, batches = None, None, []
            if each.item is not None:
                batch, number, loader = each.item
                place, batches = (number, loader), [batch]
                if self._predicts:
                    indices = _indices_of(self.combined_loader, loader, number)
            is_last = self._is_last(distance) if distance else self.done
            is_last = each.is_end or (is_last and each.error is None)
            is_followed = self._is_ahead and each.error is None and not is_last
            header = BatchHeader(self._number, place, indices, is_last, distance > 0, is_followed)
            each.wait = self._channel.send(
                header, [*batches, *self._generator_states_to_send(each.after)]
            )
        if read.wait is not None:
            read.wait()

    def _generator_states_to_send(self, after: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Return the states of the global generators, where reading has drawn from them."""
        if self._has_drawn:
            self._has_drawn = False
            return [vars(RandomStateSnapshot())]
        return [] if after is None else [after["global"]]

    def state(self) -> dict[str, Any]:
        """Return what was read, and the states of the generators, for :class:`_Resumed`.

        All values are such as every checkpoint may have.
        """
        states = {
            "start": self._start,
            "ahead": self._ready[0].before if self._ready else None,
            "now": _generator_states(self._places),
            "num_read": self._num_read,
        }
        plain: dict[str, Any] = tree_map(_without_array, states)
        return plain

    @override
    def teardown(self) -> None:
        super().teardown()
        self._ready.clear()


def _can_prefetch(loader: Any) -> bool:
    """Whether batches can be read before they are asked for: by workers, without a saved state."""
    has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
    return has_workers and not isinstance(loader, _Stateful)


def _indices_of(combined: CombinedLoader, loader: int, number: int) -> Any:
    sampler = getattr(combined.flattened[loader], "batch_sampler", None)
    if not isinstance(sampler, _IndexBatchSamplerWrapper):
        return None
    return sampler.seen_batch_indices[number]


class _GeneratorAttribute(NamedTuple):
    """An attribute that holds a random generator, and later maybe another one."""

    attributes: dict[str, Any]
    name: str


def _find_generator_attributes(loaders: list[Any]) -> list[_GeneratorAttribute]:
    """List the attributes of loaders and their samplers that hold random generators."""
    places: list[_GeneratorAttribute] = []
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        samplers = (getattr(owner, "sampler", None) for owner in (loader, batches))
        for owner in (loader, batches, *samplers):
            held = getattr(owner, "__dict__", {})
            places += [
                _GeneratorAttribute(held, name) for name in held if is_random_generator(held[name])
            ]
    return places


def _generators_at(places: list[_GeneratorAttribute]) -> list[Any]:
    held = (place.attributes.get(place.name) for place in places)
    return [*{id(value): value for value in held if is_random_generator(value)}.values()]


def _generator_states(places: list[_GeneratorAttribute]) -> dict[str, Any]:
    """Return the states of the global generators, and of those of the loaders."""
    of_loaders = [*map(state_of_generator, _generators_at(places))] if places else []
    return {"global": vars(RandomStateSnapshot()), "loaders": of_loaders}


def _without_array(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _set_generator_states(states: dict[str, Any], places: list[_GeneratorAttribute]) -> None:
    RandomStateSnapshot(states["global"]).restore()
    for generator, state in zip(_generators_at(places), states["loaders"], strict=False):
        set_generator_state(generator, state)
