"""Replicas that are threads of one process: what they do together, without process groups."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime.pending_parameters import PendingParameters


class ThreadedReplicas:
    """What one thread sees of all.

    Args:
        own: Which of them it is.
        barrier: Where they meet.
        board: Where they leave what others take.
    """

    def __init__(self, own: int, barrier: Barrier, board: dict[str, Any]) -> None:
        self.own = own
        self.num = barrier.parties
        self.pending = PendingParameters()
        self._barrier = barrier
        self._board = board

    def start_copy(self, tensor: Tensor, source: int) -> Callable[[], None]:
        if self.own == source:
            self._board["sent"] = tensor.clone()
        self._barrier.wait()
        if self.own != source:
            tensor.copy_(self._board["sent"])
        self._barrier.wait()
        return lambda: None


def run_replicas(num: int, function: Callable[[Any], Any]) -> list[Any]:
    """Call a function in each replica, with what stands for its groups; return the results."""
    barrier, board = Barrier(num, timeout=30), {}
    groups = [
        SimpleNamespace(
            replica=own, num_replicas=num, replicas=ThreadedReplicas(own, barrier, board)
        )
        for own in range(num)
    ]
    with ThreadPoolExecutor(num) as threads:
        return list(threads.map(function, groups))
