"""A function around a hook of one module or callback."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any


class WrappedHook:
    """Replaces a hook among its owner's attributes; copies and pickles have the plain one.

    Args:
        owner: A module or callback.
        hook: The name of the hook.
        run: A function that is called with the plain hook and the arguments.
    """

    def __init__(self, owner: Any, hook: str, run: Callable[..., Any]) -> None:
        self._owner = owner
        self._hook = hook
        self._run = run
        self._plain = getattr(owner, hook)
        self._own = {hook: owner.__dict__[hook]} if hook in owner.__dict__ else {}
        update_wrapper(self, self._plain, updated=())
        owner.__dict__[hook] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._plain, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the hook of the owner's class."""
        return getattr, (self._owner, self._hook)

    def remove(self) -> None:
        """Give the owner its hook back."""
        del self._owner.__dict__[self._hook]
        self._owner.__dict__.update(self._own)
