"""Weights that replicas send each other after a step, while the next batch begins.

Whoever comes to them first waits for them: the first F of a rank when its message is there, and
between batches any call of torch that is given one of them::

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

_NONE = 0  # the memory of a tensor that has none


class WeightsUnderWay:
    """What one rank's replicas have started to send and nobody has waited for.

    Attributes:
        may_wait: Whether what follows a step leaves weights alone, or is watched.
    """

    def __init__(self) -> None:
        self.may_wait = False
        self._ends: list[Callable[[], None]] = []
        self._memory: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._ends)

    def add(self, end: Callable[[], None], weights: Iterable[Tensor]) -> None:
        """Let what has been started end later, if it may.

        Args:
            end: A function that waits for it, and puts the values where they belong.
            weights: What is not to be read or written before that.
        """
        self._ends.append(end)
        self._memory.update(map(_memory_of, weights))
        self._memory.discard(_NONE)
        if not self.may_wait:
            self.settle()

    def settle(self) -> None:
        """Wait for all; nothing happens where all are there."""
        while self._ends:
            self._ends.pop(0)()
        self._memory.clear()

    def forget(self) -> None:
        """Wait for nothing more, after an error."""
        self._ends.clear()
        self._memory.clear()
        self.may_wait = False

    def are_in(self, values: Any) -> bool:
        """Whether the arguments of a call hold one of them, or share its memory."""
        return any(_memory_of(tensor) in self._memory for tensor in tensors_in(values))


class SettlingMode(TorchFunctionMode):
    """Waits for weights under way before a call of torch is given one of them.

    It may begin and end in the middle of contexts of the user's, which are modes as well.

    Args:
        weights: Several of them, each with an end of its own.
    """

    def __init__(self, *weights: WeightsUnderWay) -> None:
        super().__init__()
        self._weights = weights

    def start(self) -> None:
        """Watch, below all modes that there are."""
        above = _take_modes()
        self.__enter__()
        _put_modes(above)

    def stop(self) -> None:
        """Watch no longer."""
        _put_modes(mode for mode in _take_modes() if mode is not self)

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # What an attribute gives shares the memory, by which its use is known.
        is_attribute = getattr(func, "__name__", "") == "__get__"
        for weights in self._weights if not is_attribute else ():
            if weights and weights.are_in((args, kwargs)):
                weights.settle()
        return func(*args, **(kwargs or {}))


def _take_modes() -> list[TorchFunctionMode]:
    """Return the modes that there are, the lowest first, and leave none."""
    modes: list[TorchFunctionMode] = []
    while _get_current_function_mode() is not None:
        modes.insert(0, _pop_mode())
    return modes


def _put_modes(modes: Iterable[TorchFunctionMode]) -> None:
    for mode in modes:
        _push_mode(mode)


def _memory_of(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without memory
        return _NONE
