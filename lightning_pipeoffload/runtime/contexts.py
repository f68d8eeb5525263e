"""Contexts around actions, most of which do nothing in most models, and around traces."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

NOTHING: AbstractContextManager[Any] = nullcontext()


def combine_contexts(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Combine contexts into one, skipping NOTHING; a single one is returned unchanged.

    Each action enters the result, and entering a context takes microseconds.
    """
    combined: AbstractContextManager[Any] = NOTHING
    for context in contexts:
        if context is not NOTHING:
            combined = context if combined is NOTHING else _NestedPair(combined, context)
    return combined


class _NestedPair:
    """Two contexts, the second inside the first; an ExitStack makes six times the calls."""

    def __init__(
        self, first: AbstractContextManager[Any], second: AbstractContextManager[Any]
    ) -> None:
        self._first, self._second = first, second

    def __enter__(self) -> None:
        self._first.__enter__()
        try:
            self._second.__enter__()
        except BaseException as error:
            self._first.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            is_handled = self._second.__exit__(*error)
        except BaseException as failure:
            self._first.__exit__(type(failure), failure, failure.__traceback__)
            raise
        if is_handled:
            error = None, None, None
        return self._first.__exit__(*error) or is_handled


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch Python's garbage collector off within the context.

    A collection visits every object of the process, and took a third of a trace's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
