"""Attributes that are replaced in torch and Lightning, each until its context ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

_INHERITED = object()


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Within the context, the attribute ``name`` of a class, module or object is ``new``."""
    before = vars(owner).get(name, _INHERITED)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if before is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class Patches:
    """What is replaced in the process while it has a pipeline attached, each once."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._entered: set[Hashable] = set()

    def enter(self, patch: Callable[..., AbstractContextManager[None]], *args: Hashable) -> None:
        """Enter ``patch(*args)``, unless it has been entered since the last :meth:`close`."""
        if (patch, args) not in self._entered:
            self._stack.enter_context(patch(*args))
            self._entered.add((patch, args))

    def close(self) -> None:
        """Leave all that was entered, the last one first."""
        self._entered.clear()
        self._stack.close()


PATCHES = Patches()
"""Those of this process: of its pipelines that are attached."""
