"""What comes back to an interpreter from the ranks that it has forked.

A fork copies every object, so an object of the interpreter has the same ``id`` in each rank. A
rank's values are pickled with such ids in place of the objects, so that an attribute that refers to
the trainer comes back as one that refers to the interpreter's trainer.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeoffload.runtime.shapes import is_4bit
from lightning_pipeoffload.runtime.users_code import Slot, find_slots, refill

log = logging.getLogger(__name__)

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_CONTAINERS = (list, dict, set, deque)
# Attributes of torch and Lightning, which are not the user's.
_OF_LIBRARIES = frozenset(vars(LightningModule())) - {"training"}

# The name of an attribute, and a digest of its value; None where it cannot be pickled.
_Digests = Mapping[str, tuple[int, bytes | None]]


class _Attributes(NamedTuple):
    changed: dict[str, Any]
    removed: list[str]


class ReturnedState:
    """The objects of an interpreter's trainer, whose state is replaced by global rank 0's.

    It is made before the fork. These come back: attributes of the module and its children, of
    callbacks and of loggers that have changed; the loops' progress, metrics, the trainer's state.

    Args:
        trainer: The interpreter's trainer.

    Attributes:
        left_out: The module's changed attributes that cannot be pickled, and so do not come back.
    """

    def __init__(self, trainer: Any) -> None:
        module = trainer.lightning_module
        self._trainer = trainer
        self._owners: list[Any] = [*module.modules(), *trainer.callbacks, *trainer.loggers]
        loops = [getattr(trainer, name) for name in _LOOPS]
        tensors = [*module.parameters(), *module.buffers()]
        others = [trainer, trainer.strategy, trainer.datamodule, *loops, *tensors]
        shared = (each for each in [*self._owners, *others] if each is not None)
        self._shared: dict[int, Any] = {id(each): each for each in shared}
        self._before: list[_Digests] = []
        self.left_out: list[str] = []

    def begin(self) -> None:
        """Note every attribute's value, in a rank, before the trainer runs."""
        self._before = [self._digests(owner) for owner in self._owners]

    def dump(self, result: Any, file: IO[bytes]) -> None:
        """Write the state of a rank's trainer, and what it returns."""
        trainer = self._trainer
        # Compared before anything is read: properties such as a logger's directory are cached.
        attributes = [self._changes(*each) for each in zip(self._owners, self._before, strict=True)]
        progress = {name: getattr(trainer, name).state_dict() for name in _LOOPS}
        metrics = {name: dict(getattr(trainer, name)) for name in _METRICS}
        of_trainer = trainer.state, trainer.should_stop, progress, metrics
        _Pickler(file, self._shared).dump((*of_trainer, attributes, self.left_out, result))

    def load(self, file: IO[bytes]) -> Any:
        """Bring the interpreter's objects to the state that was dumped; return the result."""
        trainer = self._trainer
        *of_trainer, attributes, self.left_out, result = _Unpickler(file, self._shared).load()
        trainer.state, trainer.should_stop, progress, metrics = of_trainer
        for name, of_loop in progress.items():
            getattr(trainer, name).load_state_dict(of_loop)
        for name, values in metrics.items():
            refill(getattr(trainer, name), values)
        for owner, (changed, removed) in zip(self._owners, attributes, strict=True):
            for name, value in changed.items():
                _assign_in_place(vars(owner), name, value)
            for name in removed:
                del vars(owner)[name]
        return result

    def _digests(self, owner: Any) -> _Digests:
        return {name: (id(value), self._digest(value)) for name, value in _attributes_of(owner)}

    def _digest(self, value: Any) -> bytes | None:
        hashing = _Hashing()
        try:
            _Pickler(hashing, self._shared).dump(value)
        except Exception:  # whatever a class of the user's raises: then it is not sent
            return None
        return hashing.digest()

    def _changes(self, owner: Any, before: _Digests) -> _Attributes:
        after = self._digests(owner)
        values = dict(_attributes_of(owner))
        names = [name for name, each in after.items() if each[1] != before.get(name, (0, None))[1]]
        if isinstance(owner, nn.Module):
            replaced = (name for name in after if after[name][0] != before.get(name, (0, None))[0])
            self.left_out += [name for name in replaced if after[name][1] is None]
        changed = {name: values[name] for name in names if after[name][1] is not None}
        return _Attributes(changed, [name for name in before if name not in after])


def _attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    is_module = isinstance(owner, nn.Module)
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if not (is_module and name in _OF_LIBRARIES):
            yield name, value


def _assign_in_place(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Replace an attribute; a container keeps its identity, since a cell may have it too."""
    container = attributes.get(name)
    if type(container) is type(value) and isinstance(container, _CONTAINERS):
        refill(container, value)
    else:
        attributes[name] = value


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, shared: Mapping[int, Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    @override
    def persistent_id(self, obj: Any) -> int | None:
        return id(obj) if id(obj) in self._shared else None

    @override
    def reducer_override(self, obj: Any) -> Any:
        """Move tensors to the host: the interpreter must not use the device."""
        if isinstance(obj, Tensor) and (obj.device.type != "cpu" or obj.grad_fn is not None):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], shared: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._shared = shared

    @override
    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]


class _Hashing:
    """A file that keeps a hash of what is written."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


# Weights


def shapes_in(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a module's parameters and buffers, but for 4-bit weights, by name.

    4-bit weights do not train, and are packed in the ranks only.
    """
    return {slot.name: slot.tensor.shape for slot in _returned_slots(module)}


def dump_tensors(module: nn.Module, names: set[str], file: IO[bytes]) -> None:
    """Write a rank's tensors of the given names."""
    tensors = {
        slot.name: slot.tensor.detach().cpu()
        for slot in _returned_slots(module)
        if slot.name in names
    }
    torch.save(tensors, file)


def load_tensors(module: nn.Module, file: IO[bytes]) -> None:
    """Copy tensors that :func:`dump_tensors` has written into those of a module."""
    slots = {slot.name: slot for slot in _returned_slots(module)}
    with torch.no_grad():
        for name, tensor in torch.load(file, weights_only=True).items():
            slots[name].tensor.copy_(tensor)


def _returned_slots(module: nn.Module) -> list[Slot]:
    return [slot for slot in find_slots(module) if not is_4bit(slot.tensor)]
