"""Combines contexts around actions, most of which do nothing in most models."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

NOTHING: AbstractContextManager[Any] = nullcontext()


def together(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return one context for several: NOTHING, or the only one that is not NOTHING, if possible.

    Actions enter contexts with cold caches, where each Python call takes microseconds.
    """
    found: AbstractContextManager[Any] = NOTHING
    for context in contexts:
        if context is not NOTHING:
            found = context if found is NOTHING else _Several([found, context])
    return found


class _Several:
    def __init__(self, contexts: list[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)
