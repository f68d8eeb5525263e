"""Numbers in the run's store, for other ranks to read; a rank that has some does not wait.

A thread waits for an accelerator that has yet to compute them, and for the store's answers. What
the host has is written at once, for which the store has no answer: to wake a thread takes longer.

The store, not the exchange of the ranks (``loop/exchange.py``): a callback may read a number in the
batch that logged it, and only a rank that reads one waits; the exchange is read a batch later.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from lightning_pipeoffload.runtime import late_values

_NUM_STORED = 64  # more moments than ranks can be apart
_KIND = "figures"

Numbers = dict[str, dict[str, Any]]
Figures = dict[str, float]


class PendingNumbers:
    """Numbers as they are now, on their way to the host.

    Args:
        metrics: Numbers, or tensors of one element, by kind and name.

    Attributes:
        is_late: Whether an accelerator has yet to compute some of them.
    """

    def __init__(self, metrics: Numbers) -> None:
        self._numbers: Numbers = {}
        late: list[Tensor] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        for kind, values in metrics.items():
            of_kind = self._numbers[kind] = dict[str, Any]()
            for name, value in values.items():
                # Never from host to accelerator, which would wait for all that it was given.
                if late_values.is_on_accelerator(value):
                    late.append(value)
                    self._places.append((of_kind, name))
                    value = math.nan
                of_kind[name] = float(value)
        self.is_late = bool(late)
        if self.is_late:
            self._read = _start_copy(late)

    def __call__(self) -> Numbers:
        """Wait for the numbers; return them as floats."""
        if self.is_late:
            for (of_kind, name), number in zip(self._places, self._read(), strict=True):
                of_kind[name] = number
        return self._numbers


def _start_copy(late: list[Tensor]) -> Callable[[], list[float]]:
    """Start to copy numbers off an accelerator, all at once."""
    dtype = reduce(torch.promote_types, (value.dtype for value in late), torch.float32)
    stacked = torch.stack([value.detach().to(dtype).reshape(()) for value in late])
    read = late_values.start_host_copy(stacked)
    return lambda: read().tolist()


class Publisher:
    """Writes entries into a store in order; of old ones only the last few stay.

    Args:
        store: A store that all ranks can read.
        fail: Called with an error of the store: other ranks would wait for missing values.
        are_deleted: Whether old entries are deleted; else they stay until the reader deletes them.
    """

    def __init__(
        self, store: Store, fail: Callable[[Exception], None], are_deleted: bool = True
    ) -> None:
        self._store, self._fail = store, fail
        self._are_deleted = are_deleted
        self._is_abandoned = False
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_queued = self._num_done = 0
        self._keys: list[str] = []
        self._thread = Thread(target=self._work, name="metrics publisher", daemon=True)
        self._thread.start()

    def publish(self, key: str, fetch: PendingNumbers, **remarks: Any) -> None:
        """Set ``key``, which is new in the store, to a JSON object of numbers.

        Args:
            key: The key.
            fetch: The numbers.
            remarks: More entries of the object.
        """

        def write() -> None:
            self._store.set(key, json.dumps({**fetch(), **remarks}))

        if self._num_done < self._num_queued or fetch.is_late:
            self._leave_to_thread(write)
        else:
            self._run(write)
        if self._are_deleted:
            self._keys.append(key)
            if len(self._keys) > 2 * _NUM_STORED:
                self._delete_old()

    def _leave_to_thread(self, task: Callable[[], None]) -> None:
        self._num_queued += 1
        self._queue.put(task)

    def _delete_old(self) -> None:
        old, self._keys = self._keys[:-_NUM_STORED], self._keys[-_NUM_STORED:]

        def delete() -> None:
            for key in old:
                self._store.delete_key(key)

        self._leave_to_thread(delete)

    def close(self) -> None:
        """Return when all is written."""
        self._delete_old()
        self._queue.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """End without waiting for the thread, and ignore its errors: the run was broken off."""
        self._is_abandoned = True
        self._queue.put(None)

    def _work(self) -> None:
        for task in iter(self._queue.get, None):
            if not self._run(task):
                return
            self._num_done += 1

    def _run(self, task: Callable[[], None]) -> bool:
        try:
            task()
        except Exception as error:
            if not self._is_abandoned:
                self._is_abandoned = True
                self._fail(error)
            return False
        return True


class RankFigures:
    """Numbers of each rank, step by step, on their way to global rank 0; no rank waits for them.

    ::

        rank 3          step 10: give    step 20: give
                             v                v
        store                numbers          numbers
                             v                v
        global rank 0   step 10: give    step 11: arrived: those of step 10, of all ranks

    Args:
        store: A connection to a store that nothing else uses.
        name: A name for the numbers in the store, the same on every rank.
        global_rank: This rank.
        ranks: The global ranks that give numbers.
        fail: Called with an error of the thread.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        global_rank: int,
        ranks: Sequence[int],
        fail: Callable[[Exception], None],
    ) -> None:
        self._store, self._name, self._global_rank = store, name, global_rank
        self._ranks = ranks
        self._publisher = Publisher(store, fail, are_deleted=False)
        self._expected: deque[int] = deque()
        self._is_closed = False

    def publish(self, step: int, figures: dict[str, Any]) -> None:
        """Send this rank's numbers of a step, as all ranks do in the same order.

        Args:
            step: The step, larger than those before.
            figures: Numbers, or tensors of one element, by name.
        """
        self._publisher.publish(
            self._key(step, self._global_rank), PendingNumbers({_KIND: figures})
        )
        if self._global_rank == 0:
            self._expected.append(step)

    def arrived(self) -> Iterator[tuple[int, dict[int, Figures]]]:
        """Yield on global rank 0 the numbers that have come: the step, and those of each rank.

        Once closed it waits for the rest.
        """
        while self._expected:
            step = self._expected[0]
            keys = [self._key(step, rank) for rank in self._ranks]
            if not self._is_closed and not self._store.check(keys):
                return
            figures = [json.loads(each)[_KIND] for each in self._store.multi_get(keys)]
            for key in keys:
                self._store.delete_key(key)
            self._expected.popleft()
            yield step, dict(zip(self._ranks, figures, strict=True))

    def close(self) -> None:
        """Return when this rank's numbers are published."""
        self._publisher.close()
        self._is_closed = True

    def abandon(self) -> None:
        """End without waiting for other ranks: the run was broken off."""
        self._publisher.abandon()
        self._expected.clear()

    def _key(self, step: int, rank: int) -> str:
        return f"{self._name}/{step}/{rank}"
