"""What callbacks do on an exception, where the other ranks stop or are gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import Callback

from lightning_pipeoffload.processes.wrapped_hook import WrappedHook

log = logging.getLogger(__name__)


class NeedsOthersError(RuntimeError):
    """Raised by what needs all ranks, on one that has failed."""


class ExceptionHooks:
    """Ends a callback's ``on_exception`` where it needs other ranks; the exception goes on.

    Args:
        callbacks: The trainer's callbacks.
        says: Whether this rank says so.
    """

    def __init__(self, callbacks: Iterable[Callback], says: bool) -> None:
        self._says = says
        self._wrapped = [WrappedHook(each, "on_exception", self._run) for each in callbacks]

    def _run(self, plain: Callable[..., None], *args: Any) -> None:
        try:
            plain(*args)
        except NeedsOthersError as error:
            if self._says:
                log.warning(str(error))
            self._says = False

    def give_back(self) -> None:
        """Let the callbacks have their own hooks again."""
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped.clear()
