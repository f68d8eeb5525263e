"""What the process that writes a checkpoint asks of others for: their values, by number.

They answer one by one, until it has written all::

    writes    asks for 3        asks for 0        is done
                 v                 v                 v
    another   sends its value 3 sends its value 0 goes on
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from lightning_pipeoffload.runtime.host_group import HostGroup

_DONE = -1


class Requests:
    """The numbers that are asked for.

    Args:
        group: The processes.
        writer: The global rank that asks.
    """

    def __init__(self, group: HostGroup, writer: int) -> None:
        self._group = group
        self._writer = writer

    def ask(self, number: int, rank: int) -> None:
        """Ask a global rank for a value, which it sends then."""
        dist.send(torch.tensor([number]), rank, group=self._group.host_group)

    def end(self, ranks: Iterable[int]) -> None:
        """Let global ranks go on; the writer is none that waits."""
        for rank in ranks:
            if rank != self._writer:
                self.ask(_DONE, rank)

    def asked(self) -> Iterator[int]:
        """Yield the numbers that this process is asked for, until all is written."""
        number = torch.empty(1, dtype=torch.int64)
        while True:
            dist.recv(number, self._writer, group=self._group.host_group)
            if int(number) == _DONE:
                return
            yield int(number)
