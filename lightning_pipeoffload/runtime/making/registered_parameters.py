"""Tracks the parameters of a module during its construction, in the order of their appearance.

The order is the same whenever the module is constructed from the same state. So a second run can
identify a parameter when it appears, and use its name and stages from the first run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS, forked_randomness, replaced
from lightning_pipeoffload.runtime.shapes import (
    RemoteTensor,
    ShapeOnly,
    StepRules,
    refuse_other_quantized,
    remote_subclass_of,
    trunc_normal_on_shapes,
)
from lightning_pipeoffload.runtime.users_code import Slot, find_slots

aten = torch.ops.aten


class ParameterShape(RemoteTensor):
    """A parameter without a value in a module under construction.

    Operations on it return shape-only tensors, but ``detach`` and ``empty_like`` return this class:
    ``nn.Parameter(parameter)`` requires it, and ``module.to_empty`` would allocate real memory.
    """

    @classmethod
    def like_parameter(cls, parameter: Tensor, origin: str) -> Self:
        """Make a shape like ``parameter``, with its own memory and ``origin`` as its origin."""
        meta = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
        )
        refuse_other_quantized(origin, parameter)
        shape = cls.like_weight(parameter, meta, parameter.device, origin)
        shape._is_param = True  # private: see RemoteTensor
        return shape

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, options = args[0] if args else None, kwargs or {}
        if func is aten.empty_like.default and isinstance(first, ParameterShape):
            device = torch.device(options.get("device") or first.device)
            meta = func(first.meta, **{**options, "device": "meta"})
            return ParameterShape(meta, device, first.origins)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.detach.default and isinstance(first, ParameterShape):
            return ParameterShape(result.meta, result.device, result.origins)
        return result


class ParameterRegistration(NamedTuple):
    """The first registration of a parameter, as attribute ``name`` of a module of class ``owner``.

    A copy has the name of the original, and the owner "copy".
    """

    name: str
    owner: str
    shape: torch.Size
    dtype: torch.dtype


class RegisteredParameters:
    """The parameters of a module under construction, in the order in which they appear.

    This base class replaces each of them with a shape-only tensor; subclasses keep values of some.

    Args:
        module: The module before its construction.

    Attributes:
        appeared: The parameters in order; the existing ones come first.
        num_found: The number of parameters that existed before the construction.
        rules: The rules for operations on shape-only tensors.
    """

    # Observed operations draw no random numbers, and hold no results.
    rules = StepRules(observe=lambda func, args, result: None)

    def __init__(self, module: nn.Module) -> None:
        self.appeared: list[ParameterRegistration] = []
        self._freed = HeapTrimmer()
        self._indices: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._shapes: dict[int, ParameterShape] = {}
        for slot in parameter_slots(module):
            if self.index_of(slot.tensor) is None:
                self._set_index(
                    slot.tensor, self._add_registration(slot.attribute, slot.path, slot.tensor)
                )
        self.num_found = len(self.appeared)

    def keeps_value(self, index: int, parameter: Tensor) -> bool:
        """Return whether the parameter with this index keeps its value; else it gets a shape."""
        return False

    def record_sources(self, index: int, origins: frozenset[str]) -> None:
        """Record from which parameters a parameter was computed; for subclasses, does nothing here.

        Args:
            index: The index of the new parameter in :attr:`appeared`.
            origins: The labels of the parameters that its first value was computed from.
        """

    def label(self, index: int) -> str:
        """Return the name of a parameter for error messages, with the class of its module."""
        return f"{self.appeared[index].name} of {self.appeared[index].owner}"

    @contextmanager
    def tracking_parameters(self) -> Iterator[None]:
        """Track each parameter that is registered or copied within the context."""
        hook: Callable[..., Any] = self._register  # its result becomes the parameter
        # Private: subclasses of Parameter make their instances with it, which no tensor subclass
        # can intercept.
        make_subclass = _make_subclass_of_shapes(Tensor._make_subclass)
        with ExitStack() as stack:
            stack.enter_context(register_module_parameter_registration_hook(hook))
            for kind in (nn.Parameter, ParameterShape):
                copy = self._make_deepcopy(kind.__deepcopy__)
                stack.enter_context(replaced(kind, "__deepcopy__", copy))
            stack.enter_context(replaced(Tensor, "_make_subclass", make_subclass))
            stack.callback(self._freed.trim_heap)
            with (
                ACTIVE_SETTINGS.during(self.rules),
                _MarkingEmptyMemory(),
                trunc_normal_on_shapes(),
            ):
                yield

    def index_of(self, parameter: Tensor) -> int | None:
        """Return the index of a parameter, or of the shape that replaces it; None if it is new."""
        registered, index = self._indices.get(id(parameter), (None, None))
        return index if registered is not None and registered() is parameter else None

    def keep_or_replace(self, index: int, parameter: Tensor) -> Tensor:
        """Return the parameter if it is real, else a shape that replaces it."""
        kept = parameter if self.keeps_value(index, parameter) else self._shape(index, parameter)
        if kept is not parameter:
            self._freed.add_freed_bytes(parameter.nbytes)
        self._set_index(kept, index)
        return kept

    def _register(self, module: nn.Module, name: str, parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):  # made of one that has appeared
            return parameter
        index = self.index_of(parameter)
        if index is None:
            index = self._add_registration(name, type(module).__qualname__, parameter)
            if isinstance(parameter, ShapeOnly):
                self.record_sources(index, parameter.origins)
            self._set_index(parameter, index)
        return self.keep_or_replace(index, parameter)

    def _make_deepcopy(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def copy(parameter: Tensor, memo: dict[int, Any]) -> Tensor:
            if id(parameter) not in memo:
                original = self.index_of(parameter)
                name = "parameter" if original is None else self.appeared[original].name
                index = self._add_registration(name, "copy", parameter)
                if isinstance(parameter, ShapeOnly):
                    self.record_sources(index, parameter.origins)
                keeps_value = self.keeps_value(index, parameter)
                new = plain(parameter, memo) if keeps_value else self._shape(index, parameter)
                memo[id(parameter)] = new
                self._set_index(new, index)
            copied: Tensor = memo[id(parameter)]
            return copied

        return copy

    def _shape(self, index: int, parameter: Tensor) -> ParameterShape:
        if index not in self._shapes:
            shape = ParameterShape.like_parameter(parameter, self.label(index))
            self._shapes[index] = shape
        return self._shapes[index]

    def _add_registration(self, name: str, owner: str, parameter: Tensor) -> int:
        self.appeared.append(ParameterRegistration(name, owner, parameter.shape, parameter.dtype))
        return len(self.appeared) - 1

    def _set_index(self, parameter: Tensor, index: int) -> None:
        self._indices[id(parameter)] = weakref.ref(parameter), index


def _make_subclass_of_shapes(plain: Callable[..., Any]) -> Any:
    def make(
        kind: type[Tensor], data: Tensor, requires_grad: bool = False, *rest: Any, **options: Any
    ) -> Tensor:
        if not isinstance(data, ShapeOnly):
            parameter: Tensor = plain(kind, data, requires_grad, *rest, **options)
            return parameter
        shape = remote_subclass_of(ParameterShape, kind)
        stand_in: Tensor = shape(data.meta, data.device, data.origins, requires_grad)
        stand_in._is_param = True  # private: see RemoteTensor
        return stand_in

    return staticmethod(make)


@contextmanager
def making_parameter_shapes() -> Iterator[None]:
    """Make modules whose parameters have no values; buffers have values."""
    with forked_randomness(), RegisteredParameters(nn.Module()).tracking_parameters():
        yield


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by each of its names."""
    first: dict[int, str] = {}
    return {s.name: first.setdefault(id(s.tensor), s.name) for s in parameter_slots(module)}


def parameter_slots(module: nn.Module) -> list[Slot]:
    """List the slots of a module's parameters."""
    return [slot for slot in find_slots(module) if slot.kind == "_parameters"]


# Memory

_MOST_FREED = 32 << 20  # bytes


class HeapTrimmer:
    """Counts the bytes of dropped parameters, and returns freed memory to the system.

    glibc keeps freed memory between blocks in use, and allocates new memory for tensors that do not
    fit these gaps: without this, most of the module would stay resident.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        # Of glibc only; other allocators return large blocks at once.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def add_freed_bytes(self, num_bytes: int) -> None:
        """Count bytes that are about to be freed."""
        if self._num_bytes > _MOST_FREED:
            self.trim_heap()
        self._num_bytes += num_bytes

    def trim_heap(self) -> None:
        self._num_bytes = 0
        if self._trim is not None:
            self._trim(0)


_MAKERS = {
    *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
    *(Tensor.new_empty, Tensor.new_empty_strided),
}


class _MarkingEmptyMemory(TorchFunctionMode):
    """Sets the first element of ``torch.empty``'s results to NaN, to detect unfilled tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS and type(result) is Tensor and _may_be_marked(result):
            _first_of(result).fill_(torch.nan)
        return result


def begins_with_nan(tensor: Tensor) -> bool:
    """Return whether a tensor is still unfilled since ``torch.empty`` made it."""
    return _may_be_marked(tensor) and bool(_first_of(tensor).isnan().all())


def _may_be_marked(tensor: Tensor) -> bool:
    is_there = not tensor.is_meta and tensor.layout is torch.strided and tensor.numel() > 0
    return is_there and tensor.is_floating_point() and tensor.itemsize > 1


def _first_of(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((1,), (1,))
