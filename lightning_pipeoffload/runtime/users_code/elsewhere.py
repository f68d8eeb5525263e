"""Placeholders for values that are on another rank or stage; to use one raises."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_pipeoffload.runtime.users_code.users_lines import calling_line, in_brackets


class Placeholder:
    """Raises its message whatever is done with it; copies and pickles are placeholders too."""

    __slots__ = ()
    message: str

    def _use(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self.message}{in_brackets(calling_line())}")

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
    left = [tree]
    while left:
        part = left.pop(0)
        if isinstance(part, Placeholder):
            part._use()
        if isinstance(part, (list, tuple)):
            left.extend(part)
        elif isinstance(part, dict):
            left.extend(part.values())
    raise RuntimeError("a value that another rank has is used")


class Elsewhere(Placeholder):
    """Stands for an attribute."""

    __slots__ = ("message", "own")
    __hash__ = object.__hash__

    def __init__(self, message: str, own: Any) -> None:
        self.message = message
        self.own = own

    def __repr__(self) -> str:
        return f"<{self.message}>"
