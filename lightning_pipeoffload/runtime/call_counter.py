"""Numbers the calls of torch functions between the blocks of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.overrides import (  # private: to let a block run without the mode around it
    TorchFunctionMode,
    _get_current_function_mode,
)


class CallCounter(TorchFunctionMode):
    """Counts the calls of torch functions in each segment of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.segment = 0
        self._call = 0
        self._is_paused = False

    def start(self, segment: int) -> None:
        """Count from the start of ``segment`` on."""
        self.segment = segment
        self._call = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` and look at its result."""
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        self._call += 1
        return self.see(self._call, result, args)

    def see(self, call: int, result: Any, args: tuple[Any, ...]) -> Any:
        """Return the result of a call, or what is to stand for it."""
        return result

    def paused(self) -> AbstractContextManager[None]:
        """Do not count."""
        return self._paused()

    def resumed(self) -> AbstractContextManager[None]:
        """Count again within what is paused."""
        return self._resumed()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        # Steps aside where no mode of the user's is in between: some code is slower under a mode.
        was_paused, self._is_paused = self._is_paused, True
        is_on_top = _get_current_function_mode() is self
        if is_on_top:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if is_on_top:
                self.__enter__()
            self._is_paused = was_paused

    @contextmanager
    def _resumed(self) -> Iterator[None]:
        self._is_paused = False
        try:
            with self:
                yield
        finally:
            self._is_paused = True
