"""Publishes numbers in a store without making the one who has them wait.

Neither for an accelerator that has yet to compute them, nor for the store: a thread does both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import reduce
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from lightning_pipeoffload.runtime import late_values

_NUM_KEPT = 64  # more moments than ranks can be apart

Numbers = dict[str, dict[str, Any]]


class Publisher:
    """Writes entries into a store in order; of old ones only the last few stay.

    Args:
        store: A store that all ranks can read.
        fail: Called with an error of the thread that publishes; for what it does not write, other
            ranks would wait.
    """

    def __init__(self, store: Store, fail: Callable[[Exception], None]) -> None:
        self._store = store
        self._fail = fail
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._keys: list[str] = []
        self._thread = Thread(target=self._work, name="metrics publisher", daemon=True)
        self._thread.start()

    def publish(self, key: str, metrics: Numbers) -> None:
        """Set ``key`` to a JSON object with the numbers as they are now.

        Args:
            key: A key that is new in the store.
            metrics: Numbers, or tensors of one element, by kind and name.
        """
        fetch = start_fetching(metrics)

        def write() -> None:
            self._store.set(key, json.dumps(fetch()))
            self._keys.append(key)
            if len(self._keys) > _NUM_KEPT:
                self._store.delete_key(self._keys.pop(0))

        self._queue.put(write)

    def close(self) -> None:
        """Return when all is written."""
        self._queue.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """Write what there is, and nobody waits for it."""
        self._queue.put(None)

    def _work(self) -> None:
        try:
            for write in iter(self._queue.get, None):
                write()
        except Exception as error:
            self._fail(error)


def start_fetching(metrics: Numbers) -> Callable[[], Numbers]:
    """Start to bring numbers to the host.

    Returns:
        A function that waits for them and returns them as floats.
    """
    places = [(kind, name) for kind, values in metrics.items() for name in values]
    values = [metrics[kind][name] for kind, name in places]
    # Never from the host to the accelerator, which would wait for all that it was given.
    numbers = [None if late_values.is_remote(value) else float(value) for value in values]
    remote = [value for value in values if late_values.is_remote(value)]
    if not remote:
        return lambda: _by_kind(metrics, places, numbers)
    fetch = _start_copy(remote)

    def wait() -> Numbers:
        fetched = iter(fetch())
        return _by_kind(metrics, places, [next(fetched) if n is None else n for n in numbers])

    return wait


def _start_copy(remote: list[Tensor]) -> Callable[[], list[float]]:
    """Start to copy numbers off an accelerator, all at once."""
    dtype = reduce(torch.promote_types, (value.dtype for value in remote), torch.float32)
    stacked = torch.stack([value.detach().to(dtype).reshape(()) for value in remote])
    read = late_values.start_reading(stacked)
    return lambda: read().tolist()


def _by_kind(kinds: Numbers, places: list[tuple[str, str]], numbers: Sequence[Any]) -> Numbers:
    found: Numbers = {kind: {} for kind in kinds}
    for (kind, name), number in zip(places, numbers, strict=True):
        found[kind][name] = number
    return found
