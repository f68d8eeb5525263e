"""What callbacks do on an exception, where the other ranks stop or are gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback

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
        self._own: list[tuple[dict[str, Any], Any]] = []
        for callback in callbacks:
            attributes = vars(callback)
            self._own.append((attributes, attributes.get("on_exception")))
            attributes["on_exception"] = partial(self._run, callback.on_exception)

    def _run(self, hook: Callable[..., None], *args: Any) -> None:
        try:
            hook(*args)
        except NeedsOthersError as error:
            if self._says:
                log.warning(str(error))
            self._says = False

    def give_back(self) -> None:
        """Let the callbacks have their own hooks again."""
        for attributes, own in self._own:
            if own is None:
                del attributes["on_exception"]
            else:
                attributes["on_exception"] = own
        self._own.clear()
