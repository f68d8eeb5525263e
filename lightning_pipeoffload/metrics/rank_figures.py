"""Numbers of each rank, step by step, brought to global rank 0 without making anyone wait.

A thread of each rank publishes, and a thread of global rank 0 reads, by connections of their own::

    rank 3          step 10: give    step 20: give
                         v                v
    store                numbers          numbers
                         v                v
    global rank 0   step 10: give    step 11: arrived: those of step 10, of all ranks
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from lightning_pipeoffload.metrics.publisher import Publisher

Figures = dict[str, float]
_KIND = "figures"


class RankFigures:
    """One rank's numbers on their way, and on global rank 0 those of all.

    Args:
        connect: Returns another connection to a store that all ranks can read.
        name: What the numbers are called in the store, the same on every rank.
        global_rank: This rank.
        ranks: The global ranks that give numbers.
        fail: Called with an error of a thread; not once the run was broken off.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        name: str,
        global_rank: int,
        ranks: Sequence[int],
        fail: Callable[[Exception], None],
    ) -> None:
        self._name = name
        self._global_rank = global_rank
        self._fail = fail
        self._publisher = Publisher(connect(), self._fail_unless_left)
        self._has_left = False
        self._expected: SimpleQueue[int | None] = SimpleQueue()
        self._arrived: SimpleQueue[tuple[int, dict[int, Figures]]] = SimpleQueue()
        self._reader: Thread | None = None
        if global_rank == 0:
            given = connect(), ranks
            self._reader = Thread(target=self._read, args=given, name="figures", daemon=True)
            self._reader.start()

    def give(self, step: int, figures: dict[str, Any]) -> None:
        """Send this rank's numbers of a step, as all ranks do in the same order.

        Args:
            step: The step, larger than those before.
            figures: Numbers, or tensors of one element, by name.
        """
        self._publisher.publish(self._key(step, self._global_rank), {_KIND: figures})
        if self._reader is not None:
            self._expected.put(step)

    def arrived(self) -> Iterator[tuple[int, dict[int, Figures]]]:
        """Yield on global rank 0 the numbers that have come: the step, and those of each rank."""
        while True:
            try:
                yield self._arrived.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Return when this rank's numbers are published, on global rank 0 when all have arrived."""
        self._publisher.close()
        self._expected.put(None)
        if self._reader is not None:
            self._reader.join()

    def abandon(self) -> None:
        """Wait for nothing: the run was broken off."""
        self._has_left = True
        self._publisher.abandon()
        self._expected.put(None)

    def _read(self, store: Store, ranks: Sequence[int]) -> None:
        try:
            for step in iter(self._expected.get, None):
                found = store.multi_get([self._key(step, rank) for rank in ranks])
                numbers = [json.loads(each)[_KIND] for each in found]
                self._arrived.put((step, dict(zip(ranks, numbers, strict=True))))
        except Exception as error:
            self._fail_unless_left(error)

    def _fail_unless_left(self, error: Exception) -> None:
        if not self._has_left:
            self._fail(error)

    def _key(self, step: int, rank: int) -> str:
        return f"{self._name}/{step}/{rank}"
