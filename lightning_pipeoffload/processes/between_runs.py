"""Watches the ranks between two calls of the trainer, when they do not talk to each other.

The process that launched the others does.
"""

from __future__ import annotations

import os
import threading
from typing import ClassVar

from lightning_pipeoffload.processes.last_words import POLL_SECONDS, say
from lightning_pipeoffload.processes.siblings import LaunchedProcesses


class BetweenRuns:
    """Ends this process and those that it launched when one of them ends badly.

    As Lightning's own launcher does, for the next call would wait for ever.

    Args:
        global_rank: The global rank of this process.
        launched: The other processes of this machine.
    """

    _current: ClassVar[BetweenRuns | None] = None

    def __init__(self, global_rank: int, launched: LaunchedProcesses) -> None:
        self.end()
        BetweenRuns._current = self
        self._global_rank = global_rank
        self._launched = launched
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="between-runs", daemon=True).start()

    @classmethod
    def end(cls) -> None:
        """Watch no longer, for a run begins, which watches by itself."""
        if cls._current is not None:
            cls._current._is_over.set()
            cls._current = None

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            failure = self._launched.find_ended_child(is_connecting=False)
            if failure is not None:
                say(f"global rank {self._global_rank} stops because of {failure.cause}")
                self._launched.kill_all()
                os._exit(failure.status)
