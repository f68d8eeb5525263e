"""What a process receives from the one that reads for its replica; see ``reading.py``.

A batch that was sent ahead is taken from the inbox as soon as the one before it is handed out, so
that its data come during the step::

    reader      sends 0, 1, 2          step 0   sends 3     step 1   sends 4     step 2
    others      take 0, 1: hand out 0  step 0   take 2: 1   step 1   take 3: 2   step 2
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from lightning.pytorch.loops.fetchers import _DataFetcher  # private: what loops get batches from
from lightning.pytorch.overrides.distributed import (
    _IndexBatchSamplerWrapper,  # private: it notes the samples of batches that are predicted
)
from lightning.pytorch.utilities.combined_loader import (
    _ModeIterator,  # private: a CombinedLoader has the length of its own
)
from typing_extensions import Self, override

from lightning_pipeoffload.runtime import RandomStateSnapshot
from lightning_pipeoffload.runtime.comm import BatchChannel, ReceivedValue

MOST_AHEAD = 2  # one is on its way during a step; others take it without waiting for the reader

Message = tuple[Any, list[ReceivedValue]]  # a header, and what comes with it


class Length(NamedTuple):
    """The length of a loader; None where it has none."""

    batches: int | None


class LoaderStart(NamedTuple):
    """The start of a pass through loaders."""

    number: int
    length: int | None
    is_done: bool


class BatchHeader(NamedTuple):
    """What belongs to a batch.

    Attributes:
        number: That of its pass.
        place: Its number, and that of its loader; None where the data have ended, or, if it is not
            the last, where reading has failed.
        indices: Those of its samples, where prediction writers want them.
        is_last: Whether none follows.
        is_ahead: Whether it is sent before its turn.
        is_followed: Whether the next message of the pass comes without being asked for.
    """

    number: int
    place: tuple[int, int] | None
    indices: Any
    is_last: bool
    is_ahead: bool
    is_followed: bool


_PLACES = {
    Length: "the length of a loader",
    LoaderStart: "the start of a pass through its loaders",
    BatchHeader: "the next batch",
}


class Inbox:
    """Receives the messages of all loops of an entry of the Trainer, in the order of the reader.

    Args:
        channel: From the reader.
    """

    def __init__(self, channel: BatchChannel) -> None:
        self._channel = channel
        self._coming = WeakValueDictionary[int, deque[Message]]()  # of passes, by number

    def receive(self, kind: type[Any], number: int | None = None) -> Message:
        """Receive a header of a kind, and what comes with it.

        What is sent ahead for another pass than that of ``number`` is put aside for it; what a pass
        that was cut short has left is dropped.

        Raises:
            RuntimeError: The reader's loop is at another place.
        """
        while True:
            header, values = self._channel.receive()
            is_aside = (
                isinstance(header, BatchHeader) and header.is_ahead and header.number != number
            )
            if isinstance(header, kind) and not is_aside:
                return header, values
            coming = self._coming.get(header.number, deque()) if is_aside else None
            if coming is None or len(coming) == MOST_AHEAD:
                raise RuntimeError(
                    f"global rank {self._channel.reader}, which reads the data, has come to "
                    f"{_PLACES[type(header)]}, and this rank to {_PLACES[kind]}; give every rank "
                    f"as many loaders, in the same collection, and let hooks decide alike on all "
                    f"ranks"
                )
            coming.append((header, values))

    def receive_loader_start(self) -> tuple[LoaderStart, deque[Message]]:
        """Receive the start of a pass, and return where its batches are put aside."""
        header, states = self.receive(LoaderStart)
        _restore(states)
        coming = self._coming[header.number] = deque()
        return header, coming


class ReceivingFetcher(_DataFetcher):
    """Receives what the reader of the replica hands out."""

    def __init__(self, inbox: Inbox, predicts: bool) -> None:
        super().__init__()
        self._inbox, self._predicts = inbox, predicts
        self._number: int | None = None
        self._coming: deque[Message] = deque()

    @override
    def __iter__(self) -> Self:
        header, self._coming = self._inbox.receive_loader_start()
        self._number = header.number
        # Private: the loader answers by it how many batches it has, and nothing iterates over it.
        self.combined_loader._iterator = _OfLength(header.length)
        self.reset()
        self.done = header.is_done
        if self._predicts:
            for loader in self.combined_loader.flattened:
                _record_indices(loader, None)
        return self

    @override
    def __next__(self) -> Any:
        if self.done:
            raise StopIteration
        self._start_profiler()
        try:
            if not self._coming:
                self._receive()
            header, values = self._coming.popleft()
            if header.place is None and not header.is_last:
                self._receive()  # never comes: the reader's failure ends this process too
            batch = values.pop(0).get() if header.place is not None else None
            if header.is_followed and not self._coming:
                self._receive()
        finally:
            self._stop_profiler()
        _restore(values)
        self.done = header.is_last or (self.length is None and self._ends_here())
        if header.place is None:
            raise StopIteration
        self.fetched += 1
        number, loader = header.place
        if self._predicts:
            _record_indices(self.combined_loader.flattened[loader], header.indices)
        return batch, number, loader

    def _receive(self) -> None:
        self._coming.append(self._inbox.receive(BatchHeader, self._number))

    def _ends_here(self) -> bool:
        """Whether the next message is that the data have ended."""
        following = self._coming[0][0] if self._coming else None
        return following is not None and following.is_last and following.place is None

    @override
    def teardown(self) -> None:
        super().teardown()
        self._coming = deque()


def _restore(states: list[ReceivedValue]) -> None:
    """Restore the states of the generators that have come from the reader, if any."""
    for received in states:
        RandomStateSnapshot(received.get()).restore()


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


def _record_indices(loader: Any, indices: Any) -> None:
    """Record a batch's indices as the sampler does where it is read; None: a pass begins."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, _IndexBatchSamplerWrapper):
        return
    if indices is None:
        sampler.seen_batch_indices = []
    else:
        sampler.seen_batch_indices.append(indices)
