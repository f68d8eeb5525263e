"""What a call can reach through its arguments and its module's attributes, and what it changed.

A block that runs on one rank makes changes that the others repeat: a key-value cache that
was extended, a counter, a list that got an entry. They are found by comparing containers and
attributes by identity, and tensors by version; and sent as a pickle, in which objects that were
there before are named by their place.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.runtime.shapes import Awaited
from lightning_pipeoffload.runtime.users_code import REGISTRIES, is_library_object

_PLAIN = {int, float, bool, str, bytes, complex, type(None), FunctionType, MethodType}
_PLAIN |= {BuiltinFunctionType, ModuleType, type}
_SEQUENCES = (list, deque)
# Private: what an RNN derives from its weights, and anew in a forward where they are others.
_OF_WEIGHTS = REGISTRIES | {"_flat_weights", "_flat_weight_refs"}
_GONE = object()

Place = tuple[Any, ...]
"""The keys, indices and attribute names that lead from the roots to an object."""


class Change(NamedTuple):
    """What is to be done to a container, or to the attributes of an object, on other ranks.

    Attributes:
        target: The container or object, or the tensor.
        removed: Keys that are gone; of a sequence the index from which on it is replaced.
        entries: New values by key; of a sequence those from that index on; of a set all.
    """

    target: Any
    removed: Any
    entries: Any


class ReachedState:
    """The containers, objects and tensors within reach when it was made.

    Inference tensors in it are replaced by others with the same memory, since they count no writes.

    Args:
        roots: The arguments, and in ``"modules"`` a list of the modules whose attributes count.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._modules = roots["modules"]
        self._parents: dict[int, tuple[int, Any]] = {id(roots): (0, None)}
        self._roots = roots
        self._before: list[tuple[Any, Any]] = []  # containers, and what they held
        self._versions: list[tuple[Tensor, Tensor, int]] = []
        self._visit(roots)

    def _visit(self, root: Any) -> None:
        left = [root]
        while left:
            holder = left.pop()
            contents = _contents_of(holder)
            if contents is None:
                continue
            self._before.append((holder, contents))
            entries = contents.items() if isinstance(contents, dict) else enumerate(contents)
            for key, value in [*entries] if not isinstance(contents, set) else ():
                if type(value) in _PLAIN or id(value) in self._parents:
                    continue
                if isinstance(value, Tensor) and value.is_inference():
                    value = _replace_inference_tensor(value, holder, key, contents)
                self._parents[id(value)] = id(holder), key
                if isinstance(value, Tensor):
                    self._record_version(value)
                elif not isinstance(value, nn.Module) or holder is self._modules:
                    left.append(value)

    def _record_version(self, tensor: Tensor) -> None:
        value = tensor
        if isinstance(tensor, Awaited) and tensor.value is not None:
            value = tensor.value
            self._parents.setdefault(id(value), self._parents[id(tensor)])
        if not value.is_inference():
            self._versions.append((tensor, value, value._version))

    def place_of(self, value: Any) -> Place | None:
        """Return where an object was when this was made; None: nowhere within reach."""
        if id(value) not in self._parents:
            return None
        place, key = [], id(value)
        while key != id(self._roots):
            key, step = self._parents[key]
            place.append(step)
        return tuple(reversed(place))

    def changes(self) -> list[Change]:
        """List what has changed since in containers and attributes."""
        found = []
        for holder, before in self._before:
            now = _contents_of(holder)
            change = None if isinstance(holder, tuple) else _compare(before, now)
            if change is not None:
                found.append(Change(holder, *change))
        return found

    def written(self) -> list[tuple[Tensor, Tensor]]:
        """List the tensors that were written in place since, each with its value."""
        versions = self._versions
        return [(tensor, value) for tensor, value, version in versions if value._version != version]


def _replace_inference_tensor(tensor: Tensor, holder: Any, key: Any, contents: Any) -> Tensor:
    """Put a tensor with the same memory in place of an inference tensor, which counts no writes."""
    if isinstance(holder, tuple) or tensor.is_nested:
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    contents[key] = alias
    (holder if isinstance(holder, (dict, *_SEQUENCES)) else vars(holder))[key] = alias
    return alias


def _contents_of(holder: Any) -> Any:
    """Return a copy of what a container holds, or of an object's attributes; None: neither."""
    kind = type(holder)
    if kind is dict or isinstance(holder, dict):
        return dict(holder)
    if kind is list or kind is tuple or isinstance(holder, (*_SEQUENCES, tuple)):
        return [*holder]
    if isinstance(holder, set):
        return set(holder)
    return None if (space := attributes_of(holder)) is None else dict(space)


def attributes_of(value: Any) -> Mapping[str, Any] | None:
    """Return the attributes of a module or of an object of a user's class; None of others."""
    if isinstance(value, nn.Module):
        skipped = _OF_WEIGHTS if isinstance(value, nn.RNNBase) else REGISTRIES
        return {name: each for name, each in vars(value).items() if name not in skipped}
    if isinstance(value, (type, Optimizer, Tensor)) or is_library_object(value) or callable(value):
        return None
    space = getattr(value, "__dict__", None)
    return space if isinstance(space, dict) else None


def _compare(before: Any, now: Any) -> tuple[Any, Any] | None:
    if isinstance(before, set):
        return None if before == now else (None, now)
    if isinstance(before, list):
        start = next(
            (i for i, pair in enumerate(zip(before, now, strict=False)) if not is_(*pair)), None
        )
        start = min(len(before), len(now)) if start is None else start
        return None if start == len(before) == len(now) else (start, now[start:])
    removed = [key for key in before if key not in now]
    entries = {key: each for key, each in now.items() if before.get(key, _GONE) is not each}
    return (removed, entries) if removed or entries else None


def apply(change: Change) -> None:
    """Repeat a change to a container or to attributes."""
    target, removed, entries = change
    if isinstance(target, set):
        target.clear()
        target.update(entries)
    elif isinstance(target, _SEQUENCES):
        while len(target) > removed:
            target.pop()
        target.extend(entries)
    else:
        space = target if isinstance(target, dict) else vars(target)
        kind = OrderedDict if isinstance(space, OrderedDict) else dict
        for key in removed:
            kind.__delitem__(space, key)
        for key, value in entries.items():
            kind.__setitem__(space, key, value)  # transformers' outputs refuse update()


def object_at_place(roots: Mapping[str, Any], place: Place) -> Any:
    """Return the object at a place."""
    value: Any = roots
    for step in place:
        indexed = isinstance(value, (dict, tuple, *_SEQUENCES))
        value = value[step] if indexed else vars(value)[step]
    return value


class ReferencePickler(pickle.Pickler):
    """Pickles objects; those within reach by their place, tensors by a description.

    Args:
        state: What was within reach.
        name_of: Returns the name of a module of the user's module, by its id.
        describe: Returns what the receiver makes a new tensor from.
    """

    def __init__(
        self, state: ReachedState, name_of: Mapping[int, str], describe: Callable[[Tensor], Any]
    ) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self._state, self._name_of, self._describe = state, name_of, describe

    def persistent_id(self, obj: Any) -> Any:
        """Return how the receiver finds or makes an object; None: by its pickle."""
        if type(obj) in _PLAIN:
            return None
        place = self._state.place_of(obj)
        if place is not None:
            return "place", place
        if isinstance(obj, Tensor) and obj.is_nested:  # of torch's encoder with a padding mask
            return "nested", [self._describe(part) for part in obj.unbind()]
        if isinstance(obj, Tensor):
            return "tensor", self._describe(obj)
        if isinstance(obj, nn.Module) and id(obj) in self._name_of:
            return "module", self._name_of[id(obj)]
        return None


class ReferenceUnpickler(pickle.Unpickler):
    """Unpickles what a :class:`ReferencePickler` has pickled on another rank.

    Args:
        data: The pickle.
        roots: As those of the sender's state, of this rank.
        module: The user's module.
        make: Makes a tensor from its description.
    """

    def __init__(
        self,
        data: bytes,
        roots: Mapping[str, Any],
        module: nn.Module,
        make: Callable[[Any], Tensor],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._roots, self._module, self._make = roots, module, make

    def persistent_load(self, pid: Any) -> Any:
        """Return the object that a persistent id stands for."""
        kind, argument = pid
        if kind == "place":
            return object_at_place(self._roots, argument)
        if kind == "nested":
            return torch.nested.as_nested_tensor([self._make(part) for part in argument])
        return self._make(argument) if kind == "tensor" else self._module.get_submodule(argument)
