"""Follows the parameters of a module while it is being made, in the order in which they appear.

The order is the same each time the module is made from the same state. So what a first run has
shown of a parameter, where it ends up and who needs it, is known in a second run when it appears.
"""

from __future__ import annotations

import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.making.parameter_shape import ParameterShape
from lightning_pipeoffload.runtime.making.unfilled_memory import MarkingEmptyMemory
from lightning_pipeoffload.runtime.shapes.remote_tensor import install_draws, remove_draws
from lightning_pipeoffload.runtime.shapes.step_rules import StepRules
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot, find_slots

_MOST_KEPT = 32 << 20  # bytes


class FreedMemory:
    """Counts the bytes of dropped parameters, and returns freed memory to the system in between.

    glibc keeps freed memory between blocks in use, and takes new memory for tensors that do not fit
    these gaps: without this, most of the module would stay resident.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        # Of glibc only; others give large blocks back at once.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def note(self, num_bytes: int) -> None:
        """Note that so much is about to be freed."""
        if self._num_bytes > _MOST_KEPT:
            self.give_back()
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """Give back what is free."""
        self._num_bytes = 0
        if self._trim is not None:
            self._trim(0)


class Appearance(NamedTuple):
    """A parameter as it appeared.

    Attributes:
        name: Of the attribute that it became; of a copy, that of the original.
        owner: Class of the module that has it; of a copy, "copy".
        shape: Of the parameter.
        dtype: Of the parameter.
    """

    name: str
    owner: str
    shape: torch.Size
    dtype: torch.dtype


class RegisteredParameters(ABC):
    """The parameters of a module while it is being made.

    Args:
        module: The user's, as it is before.

    Attributes:
        appeared: Each of them, in order; those that are there before come first.
        num_found: How many are there before.
        rules: What holds for shapes, as in a step, where code computes with them.
    """

    rules = StepRules()

    def __init__(self, module: nn.Module) -> None:
        self.appeared: list[Appearance] = []
        self._freed = FreedMemory()
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        for slot in parameters_in(module):
            if self.index_of(slot.tensor) is None:
                self._know(slot.tensor, self._count(slot.attribute, slot.path, slot.tensor))
        self.num_found = len(self.appeared)

    @abstractmethod
    def take(self, index: int, parameter: Tensor) -> Tensor:
        """Return what is to stand in a module for a parameter that has appeared."""

    @abstractmethod
    def take_copy(self, index: int, parameter: Tensor) -> Tensor | None:
        """Return what is to stand for a deep copy of a parameter; None: a real copy."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """See each parameter that modules get, and each that is copied."""
        hook: Callable[..., Any] = self._register  # what it returns is taken for the parameter
        handle = register_module_parameter_registration_hook(hook)
        plain = nn.Parameter.__deepcopy__

        def copy(parameter: nn.Parameter, memo: dict[int, Any]) -> Tensor:
            return self._copy(parameter, memo, plain)

        nn.Parameter.__deepcopy__ = copy  # type: ignore[method-assign,assignment]
        install_draws()
        try:
            with IN_FORCE.during(self.rules), MarkingEmptyMemory():
                yield
        finally:
            self._freed.give_back()
            remove_draws()
            nn.Parameter.__deepcopy__ = plain  # type: ignore[method-assign]
            handle.remove()

    def index_of(self, parameter: Tensor) -> int | None:
        """Return the place of a parameter, or of what stands for it, in the order."""
        known, index = self._known.get(id(parameter), (None, None))
        return index if known is not None and known() is parameter else None

    def copy(self, parameter: Tensor, memo: dict[int, Any]) -> Tensor:
        """Return a deep copy of a shape."""
        return self._copy(parameter, memo, ParameterShape.__deepcopy__)

    def _register(self, module: nn.Module, name: str, parameter: Tensor) -> Tensor:
        index = self.index_of(parameter)
        if index is None:
            index = self._count(name, type(module).__qualname__, parameter)
            self._know(parameter, index)
        return self._stand_in(index, parameter)

    def _stand_in(self, index: int, parameter: Tensor) -> Tensor:
        stand_in = self.take(index, parameter)
        if stand_in is not parameter:
            self._freed.note(parameter.nbytes)
        self._know(stand_in, index)
        return stand_in

    def _copy(self, parameter: Tensor, memo: dict[int, Any], plain: Any) -> Tensor:
        if id(parameter) in memo:
            known: Tensor = memo[id(parameter)]
            return known
        original = self.index_of(parameter)
        name = "parameter" if original is None else self.appeared[original].name
        index = self._count(name, "copy", parameter)
        made = self.take_copy(index, parameter)
        if made is None:
            made = plain(parameter, memo)
        memo[id(parameter)] = made
        self._know(made, index)
        return made

    def _count(self, name: str, owner: str, parameter: Tensor) -> int:
        self.appeared.append(Appearance(name, owner, parameter.shape, parameter.dtype))
        return len(self.appeared) - 1

    def _know(self, parameter: Tensor, index: int) -> None:
        self._known[id(parameter)] = weakref.ref(parameter), index


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by each of its names."""
    first: dict[int, str] = {}
    return {s.name: first.setdefault(id(s.tensor), s.name) for s in parameters_in(module)}


def parameters_in(module: nn.Module) -> list[Slot]:
    """List the places of a module's parameters."""
    return [slot for slot in find_slots(module) if slot.kind == "_parameters"]
