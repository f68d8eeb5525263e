"""Placeholders for values that another rank has; to use one raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any, NoReturn

from torch import Tensor


class _Placeholder:
    """Raises its message whatever is done with it; copies and pickles are placeholders too."""

    __slots__ = ()
    message: str

    def _use(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self.message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for those of any object
            raise AttributeError(name)
        self._use()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _raise_first((args, kwargs or {}))

    __iter__ = __len__ = __contains__ = __float__ = __int__ = __index__ = _use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _use
    __floordiv__ = __mod__ = __pow__ = __neg__ = __abs__ = __matmul__ = __round__ = _use
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __call__ = __str__ = __format__ = _use
    __getitem__ = __setitem__ = __delitem__ = _use

    def __bool__(self) -> bool:
        self._use()


def _raise_first(tree: Any) -> NoReturn:
    """Raise the message of the first placeholder among a function's arguments."""
    left = [tree]
    while left:
        part = left.pop(0)
        if isinstance(part, _Placeholder):
            part._use()
        if isinstance(part, (list, tuple)):
            left.extend(part)
        elif isinstance(part, dict):
            left.extend(part.values())
    raise RuntimeError("a value that another rank has is used")


class Elsewhere(_Placeholder):
    """Stands for an attribute.

    Args:
        message: What to raise.
        own: What this rank has in its place, which its steps go on with.
    """

    __slots__ = ("message", "own")
    __hash__ = object.__hash__

    def __init__(self, message: str, own: Any) -> None:
        self.message = message
        self.own = own

    def __repr__(self) -> str:
        return f"<{self.message}>"


class OutputsElsewhere(_Placeholder, dict[str, Any]):
    """Stands for a step's outputs, of which numbers are on all ranks.

    Args:
        kind: The step.
        root: The global rank that has the others.
        fetch: A function that waits for the numbers and returns them.
    """

    def __init__(self, kind: str, root: int, fetch: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.message = (
            f"of what {kind} returns, only numbers are on every rank; the rest is on global rank "
            f"{root}. Use self.log in {kind} and trainer.callback_metrics here, or keep it in an "
            f"attribute for a hook of the epoch's end"
        )
        self._fetch = fetch

    def __getitem__(self, key: str) -> Any:
        """Return a number.

        Raises:
            RuntimeError: It is none.
        """
        numbers = self._fetch()
        return numbers[key] if key in numbers else self._use()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number, as ``[key]`` does."""
        return self[key]

    def __bool__(self) -> bool:
        return True

    __reduce_ex__ = keys = values = items = copy = _Placeholder._use


def numbers_in(outputs: Any) -> dict[str, Any]:
    """Return the plain numbers in what a step returned, by name; a tensor alone is the loss."""
    named = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
    return {name: value for name, value in named.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.dim() == 0)
