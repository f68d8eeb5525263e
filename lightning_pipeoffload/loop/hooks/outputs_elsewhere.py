"""What hooks get as a step's outputs on ranks that do not have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any, NoReturn

from torch import Tensor


class ElsewhereError(BaseException):
    """A hook asked for what is on another rank; no ``Exception``, for hooks may catch those."""


def numbers_in(outputs: Any) -> dict[str, Any]:
    """Return the plain numbers in what a step returned, by name; a tensor alone is the loss."""
    named = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
    return {name: value for name, value in named.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.dim() == 0)


class OutputsElsewhere(dict[str, Any]):
    """Stands for a step's outputs: numbers come from global rank 0, all else is not here.

    Args:
        fetch: A function that waits for the outputs' numbers and returns them.
    """

    def __init__(self, fetch: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._fetch = fetch

    def __getitem__(self, key: str) -> Any:
        numbers = self._fetch()
        if key not in numbers:
            raise ElsewhereError
        return numbers[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a number, if it is one; ``default`` is for what is nowhere."""
        return self[key]

    @classmethod
    def __torch_function__(cls, *args: Any) -> NoReturn:
        raise ElsewhereError

    def _leave(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ElsewhereError

    __iter__ = __len__ = __contains__ = __bool__ = __float__ = __int__ = __reduce_ex__ = _leave
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _leave
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __getattr__ = _leave
    keys = values = items = copy = _leave
    __hash__ = None
