"""Pending parameters: replicas send them to each other after a step, while the next one begins.

The first use waits for them: the first F of a rank, once its message has arrived, and between
batches any torch function that gets one of them as an argument::

    rank 0   step [sent and received] F 0      F 1
    rank 1   step [sent and received   ]  F 0      F 1      <- as long as the first F takes to come
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # private, with these: a mode begins and ends on top of all others
    _pop_mode,
    _push_mode,
)
from typing_extensions import override

from lightning_pipeoffload.runtime.leaves import tensors_in

_NO_MEMORY = 0


class PendingParameters:
    """The broadcasts of parameters that this rank has started and not waited for.

    Attributes:
        may_wait: Whether waiting may be deferred: nothing between steps reads parameters, or a
            :class:`SettlingMode` watches for it.
    """

    def __init__(self) -> None:
        self.may_wait = False
        self._ends: list[Callable[[], None]] = []
        self._memory: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._ends)

    def add(self, end: Callable[[], None], parameters: Iterable[Tensor]) -> None:
        """Defer ``end``, which waits for a broadcast and stores its values, if that is allowed.

        Args:
            end: Called before any of the parameters is read or written.
            parameters: The parameters that the broadcast writes.
        """
        self._ends.append(end)
        self._memory.update(map(_address_of, parameters))
        self._memory.discard(_NO_MEMORY)
        if not self.may_wait:
            self.settle()

    def settle(self) -> None:
        """Wait for all of them."""
        while self._ends:
            self._ends.pop(0)()
        self._memory.clear()

    def forget(self) -> None:
        """Discard them without waiting, after an error."""
        self._ends.clear()
        self._memory.clear()
        self.may_wait = False

    def are_in(self, values: Any) -> bool:
        """Whether the arguments of a call contain a pending parameter or a view of one."""
        return any(_address_of(tensor) in self._memory for tensor in tensors_in(values))


class SettlingMode(TorchFunctionMode):
    """Waits for pending parameters before a torch function gets one of them as an argument.

    It may start and stop inside contexts of the user's, which may be modes as well; so it is put
    below all modes that are active.
    """

    def __init__(self, *pending: PendingParameters) -> None:
        super().__init__()
        self._pending = pending

    def start(self) -> None:
        above = _pop_modes()
        self.__enter__()
        for mode in above:
            _push_mode(mode)

    def stop(self) -> None:
        for mode in _pop_modes():
            if mode is not self:
                _push_mode(mode)

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # An attribute's tensor shares the memory, so that its own use is noticed.
        is_attribute = getattr(func, "__name__", "") == "__get__"
        for pending in self._pending if not is_attribute else ():
            if pending and pending.are_in((args, kwargs)):
                pending.settle()
        return func(*args, **(kwargs or {}))


def _pop_modes() -> list[TorchFunctionMode]:
    """Remove all active modes and return them, the lowest first."""
    modes: list[TorchFunctionMode] = []
    while _get_current_function_mode() is not None:
        modes.insert(0, _pop_mode())
    return modes


def _address_of(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without memory
        return _NO_MEMORY
