"""Compares, copies and restores the values of attributes.

A value includes the contents of lists, dicts, sets, deques and tuples, and the attributes of
objects of the user's classes, three levels deep.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.runtime import forked_randomness, without_garbage_collection
from lightning_pipeoffload.runtime.users_code.sources import RandomGenerators, is_random_generator
from lightning_pipeoffload.runtime.users_code.users_lines import is_library_object

GONE = object()  # the value of an attribute that does not exist
_DEPTH = 3
_LARGEST = 1 << 24  # bytes of an array; a larger one is data
# Optimizers are narrowed to the rank's parameters in the middle of a step.
_NOT_COLLECTIONS = (nn.Module, Tensor, Optimizer, type, FunctionType, MethodType, ModuleType)
_CONTAINERS = (list, set, deque)
_PLAIN_CONTAINERS = {list, dict, tuple, set, deque}
_WALKED_EMPTY = {*_PLAIN_CONTAINERS, OrderedDict}
_REFILLED_EMPTY = _WALKED_EMPTY - {tuple}
_VALUES = (dict.values, OrderedDict.values)
_WRITTEN = (Tensor, np.ndarray)
_PLAIN = {int, float, bool, str, type(None), FunctionType, MethodType}
_LEAVES = {*_PLAIN, Tensor, nn.Parameter, np.ndarray, complex, bytes}
_CONSTANTS = (int, float, complex, str, torch.Size)


class Attribute(NamedTuple):
    """A module of the tree, and the name of one of its attributes.

    Compared by the module's identity: the hash of a torchmetrics object changes with its state.
    """

    part: nn.Module
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attribute) and self.part is other.part and self.name == other.name

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((id(self.part), self.name))


Fingerprint = list[tuple[Any, Any]]
"""Pairs of an object and a state that changes when it is written; holds the objects alive."""


class ContainedValues(tuple[Any, ...]):
    """The values in a container; equal if they are the same objects."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContainedValues) and _are_same(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def _are_same(parts: Collection[Any], others: Collection[Any]) -> bool:
    return len(parts) == len(others) and all(map(is_, parts, others))


def fingerprint(value: Any, depth: int = _DEPTH, longest: int = sys.maxsize) -> Fingerprint:
    """Record a value, the containers in it, and their tensors and arrays.

    Only the length is recorded of a container with more than ``longest`` values.
    """
    if is_plain_value(value):
        return [(value, 0)]
    states: Fingerprint = [(value, _version_or_checksum(value))]
    for container, parts in _walk(value, set(), depth, longest):
        states.append((container, parts))
        if isinstance(parts, int):
            continue
        states += [
            (part, _version_or_checksum(part)) for part in parts if isinstance(part, _WRITTEN)
        ]
    return states


def fingerprint_if_small(value: Any, most: int) -> Fingerprint | None:
    """Record a value as ``fingerprint`` does; None if it contains more than ``most`` values."""
    if is_plain_value(value):
        return [(value, 0)]
    states: Fingerprint = [(value, _version_or_checksum(value))]
    for container, parts in _walk(value, set(), _DEPTH, most):
        most -= most + 1 if isinstance(parts, int) else len(parts)
        if most < 0:
            return None
        states.append((container, parts))
        states += [
            (part, _version_or_checksum(part)) for part in parts if isinstance(part, _WRITTEN)
        ]
    return states


def is_plain_value(value: Any) -> bool:
    """Return whether a value is immutable: a number, a string, a function."""
    return type(value) in _PLAIN


def is_unchanged(before: Fingerprint, after: Fingerprint) -> bool:
    """Return whether two fingerprints show no change."""
    return len(before) == len(after) and all(
        _is_same(old, new) and was == now
        for (old, was), (new, now) in zip(before, after, strict=True)
    )


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _CONSTANTS) and old == new)


def _version_or_checksum(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _version_of(value), value.requires_grad
    is_small = isinstance(value, np.ndarray) and value.nbytes <= _LARGEST
    return zlib.crc32(_bytes_of(value)) if is_small else 0


def _bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    return np.asarray(array).tobytes()  # a masked constant's own tobytes() raises


def _version_of(tensor: Tensor) -> int:
    # Private: counts the writes, but not those through .data. Inference tensors count none.
    return -1 if tensor.is_inference() else tensor._version


# Containers


def _parts_of(container: Any) -> ContainedValues:
    if type(container) in _PLAIN_CONTAINERS:
        return ContainedValues(container.values() if type(container) is dict else container)
    if isinstance(container, dict):
        return ContainedValues(container.values())
    return ContainedValues(
        _fields(container).values() if _has_fields_only(container) else container
    )


def _walk(
    value: Any, visited: set[int], depth: int, longest: int = sys.maxsize
) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a value, down to ``depth`` levels, with the values in it.

    A container with more than ``longest`` values comes with their number, and is not entered.
    """
    if type(value) in _WALKED_EMPTY and not value:  # as most registries of hooks
        if id(value) not in visited:
            visited.add(id(value))
            yield value, ContainedValues()
        return
    level = [value]
    for _ in range(depth):
        below: list[Any] = []
        for each in level:
            container = each if _is_container(each) else _attribute_dict_of(each)
            if container is None or id(container) in visited:
                continue
            visited.add(id(container))
            if longest < sys.maxsize and isinstance(container, Sized) and len(container) > longest:
                yield container, len(container)
                continue
            parts = _parts_of(container)
            yield container, parts
            if not _LEAVES.issuperset(map(type, parts)):
                below += [part for part in parts if type(part) not in _LEAVES]
        level = below


def _is_container(value: Any) -> bool:
    """Return whether a value is a container; excludes dicts that compute their values."""
    if type(value) in _PLAIN_CONTAINERS:
        return True
    if isinstance(value, dict):  # transformers' outputs are dicts that refuse updates
        return type(value).values in _VALUES and not dataclasses.is_dataclass(value)
    return isinstance(value, (*_CONTAINERS, tuple)) and not isinstance(value, torch.Size)


def _attribute_dict_of(value: Any) -> Any:
    """Return the ``__dict__`` of an object of a user's class; a dataclass with slots itself."""
    if (
        isinstance(value, _NOT_COLLECTIONS)
        or is_library_object(value)
        or is_random_generator(value)
    ):
        return None
    space = getattr(value, "__dict__", None)
    if isinstance(space, dict):  # a generic alias has its class's
        return space
    return value if _has_fields_only(value) else None


def _has_fields_only(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not hasattr(value, "__dict__")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def refill(container: Any, contents: Any) -> None:
    """Replace the contents of a container."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)


def _has_same_entries(container: Any, contents: Any) -> bool:
    if isinstance(container, dict):
        has_same_keys = [*container] == [*contents]
        return has_same_keys and _are_same(container.values(), contents.values())
    return _are_same(container, contents)


# Copies


def private_copy(value: Any, copies: dict[int, Any] | None = None, depth: int = _DEPTH) -> Any:
    """Copy the tensors, arrays and containers of a value; preserve shared references.

    Args:
        value: The value.
        copies: Existing copies, by the id of the original.
        depth: How many levels to copy.
    """
    copies = {} if copies is None else copies
    if id(value) not in copies:
        copies[id(value)] = _copy(value, copies, depth)
    return copies[id(value)]


def _copy(value: Any, copies: dict[int, Any], depth: int) -> Any:
    if isinstance(value, Tensor):
        trains = value.requires_grad and value.is_leaf
        is_weight = isinstance(value, nn.Parameter)
        if is_weight:
            return value
        with torch._C.DisableTorchFunction():  # private: this is no call of the step's
            copied = value.detach().clone().requires_grad_(trains)
        if type(value) is Tensor:  # attributes of a tensor too, such as whether it is the model's
            copied.__dict__.update(value.__dict__)
        return copied
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _LARGEST else value
    if depth == 0 or callable(value):
        return value
    copy_parts = _copy_container if _is_container(value) else _copy_object
    return copy_parts(value, partial(private_copy, copies=copies, depth=depth - 1))


def _copy_container(value: Any, copy_value: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        parts = [*map(copy_value, value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    copied = copy.copy(value)
    if isinstance(copied, dict):
        for name, part in value.items():
            dict.__setitem__(copied, name, copy_value(part))  # a subclass may refuse it
    elif not isinstance(copied, set):
        refill(copied, map(copy_value, value))
    return copied


def _copy_object(value: Any, copy_value: Callable[[Any], Any]) -> Any:
    space = _attribute_dict_of(value)
    if space is None:
        return value
    copied = copy.copy(value)
    for name, part in (space if isinstance(space, dict) else _fields(value)).items():
        object.__setattr__(copied, name, copy_value(part))  # also of what is frozen
    return copied


# Restoring


class TensorSnapshot:
    """A snapshot of tensors: their values, storages and versions."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Assigning .data counts no write, but replaces the storage.
        self._seen = [(t, t.data, t.detach().clone(), _version_of(t)) for t in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors whose values these are."""
        return [tensor for tensor, *_ in self._seen]

    @contextmanager
    def restored(self, now: TensorSnapshot | None = None) -> Iterator[None]:
        """Restore these values within the context, and the present ones, ``now``, afterwards."""
        now = now or TensorSnapshot(self.tensors)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Restore the values."""
        for seen in self._seen:
            self._put(*seen)

    def restore_written(self) -> list[Tensor]:
        """Restore the tensors that were written since, and return them."""
        written = [seen for seen in self._seen if is_written(seen[0], *seen[2:])]
        for seen in written:
            self._put(*seen)
        return [tensor for tensor, *_ in written]

    @staticmethod
    def _put(tensor: Tensor, data: Tensor, value: Tensor, version: int) -> None:
        with torch.inference_mode(tensor.is_inference()):
            data.copy_(value)
        if tensor.layout is torch.strided and tensor.data_ptr() != data.data_ptr():
            tensor.data = data
        if version >= 0:
            # Private: autograd compares versions. Saved views share the counter.
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def is_written(tensor: Tensor, copied: Tensor, version: int = 0) -> bool:
    """Return whether a tensor was written since it had ``version`` and was copied."""
    is_counted = not tensor.is_inference() and tensor._version != version
    return is_counted or not _has_same_values(tensor, copied)


@torch.no_grad()
def _has_same_values(tensor: Tensor, copied: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return True
    if tensor.shape != copied.shape or tensor.dtype != copied.dtype:
        return False
    copied = copied.to(tensor.device)
    is_same = (tensor == copied) | ((tensor != tensor) & (copied != copied))  # NaN is itself
    return bool(is_same.all())


class StepState:
    """A copy of the state that a step can change: attributes, containers, tensors and arrays.

    Args:
        places: Modules, each with the name of an attribute, possibly absent.
        tensors: The tensors whose values are copied; None: those in the attributes, and arrays.
    """

    def __init__(
        self, places: Iterable[tuple[nn.Module, str]], tensors: Iterable[Tensor] | None = None
    ) -> None:
        self._values = [(part, name, vars(part).get(name, GONE)) for part, name in places]
        # One walk for each value, and no line of Python for each number in it: it may be large.
        several = {id(value): value for *_, value in self._values if type(value) not in _PLAIN}
        self._empty = {k: v for k, v in several.items() if type(v) in _REFILLED_EMPTY and not v}
        self._insides = {
            key: (each, [*_walk(each, set(), _DEPTH)])
            for key, each in several.items()
            if key not in self._empty
        }
        self._contents = _contents(walked for _, walked in self._insides.values())
        self._compares = tensors is None
        self._arrays: list[tuple[_Array, _Array]] = []
        if tensors is None:
            objects = {
                id(v): v
                for inside in self._insides.values()
                for v in _tensors_and_arrays_in(*inside)
            }
            tensors = [value for value in objects.values() if type(value) is Tensor]
            self._arrays = [
                (value, value.copy())
                for value in objects.values()
                if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST
            ]
        self._tensors = TensorSnapshot(tensors)

    def restore(self) -> set[int]:
        """Restore all; return the ids of objects changed in place, except given tensors."""
        refilled = [each for each in self._contents if not _has_same_entries(*each)]
        refilled += [(container, ()) for container in self._empty.values() if container]
        changed = {id(container) for container, _ in refilled}
        if self._compares:
            changed.update(map(id, self._tensors.restore_written()))
        else:
            self._tensors.restore()
        for array, copied in self._arrays:
            if _bytes_of(array) != _bytes_of(copied):
                changed.add(id(array))
                array[...] = copied
        for container, contents in refilled:  # others may refuse to be written
            refill(container, contents)
        for part, name, value in self._values:
            if value is GONE:
                vars(part).pop(name, None)
            else:
                vars(part)[name] = value
        return changed

    def attributes_with(self, changed: set[int]) -> set[Attribute]:
        """Return the attributes in which these objects are, by their ids."""
        insides = self._insides.items()
        holders = {key for key, each in insides if changed & {*map(id, _objects_in(*each))}}
        holders |= changed & self._empty.keys()
        return {Attribute(part, name) for part, name, value in self._values if id(value) in holders}


@contextmanager
def restoring_attributes(module: nn.Module) -> Iterator[set[Attribute]]:
    """Restore the attributes of a module tree, their contents, and all generators afterwards.

    Yields:
        The attributes that were changed in place; complete only after the context.
    """
    names = [(part, [*vars(part)]) for part in module.modules()]
    with without_garbage_collection():
        state = StepState((part, name) for part, before in names for name in before)
    written: set[Attribute] = set()
    with forked_randomness(), RandomGenerators(module).restoring():
        try:
            yield written
        finally:
            changed = state.restore()
            if changed:
                written |= state.attributes_with(changed)
            for part, before in names:
                for name in vars(part).keys() - before:
                    del vars(part)[name]


_Array = np.ndarray[Any, Any]
_Walked = list[tuple[Any, ContainedValues]]  # a container, and what it held


def _contents(walks: Iterable[Iterable[tuple[Any, ContainedValues]]]) -> list[tuple[Any, Any]]:
    """List each mutable container with a copy of its contents."""
    listed: set[int] = set()
    contents = []
    for container, parts in chain.from_iterable(walks):
        if isinstance(container, (dict, *_CONTAINERS)) and id(container) not in listed:
            listed.add(id(container))
            contents.append((container, container.copy() if isinstance(container, dict) else parts))
    return contents


def _tensors_and_arrays_in(value: Any, walked: _Walked) -> Iterator[Any]:
    """Yield the tensors and arrays of an attribute."""
    if isinstance(value, _WRITTEN):
        yield value
    for _, parts in walked:
        if not _PLAIN.issuperset(map(type, parts)):
            yield from (part for part in parts if isinstance(part, _WRITTEN))


def _objects_in(value: Any, walked: _Walked) -> Iterator[Any]:
    yield value
    yield from (container for container, _ in walked)
    yield from _tensors_and_arrays_in(value, walked)


@contextmanager
def restoring_module(module: nn.Module, written: Container[str]) -> Iterator[None]:
    """Restore gradients, buffers, attributes, generators, and the parameters named ``written``."""
    named = module.named_parameters()
    weights = TensorSnapshot(parameter for name, parameter in named if name in written)
    gradients: list[tuple[Tensor, Tensor | None]] = [(p, p.grad) for p in module.parameters()]
    try:
        with restoring_attributes(module):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        weights.restore()
