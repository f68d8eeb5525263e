"""How the state of what steps draw from, and collect in, is read and set back."""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from lightning_pipeoffload.runtime.users_code.look import Parts
from lightning_pipeoffload.runtime.users_code.rewindable import Rewindable

_LARGEST = 1 << 24  # bytes of an array or tensor; a larger one is a data set, which no step writes


class SourceKind(NamedTuple):
    """How to treat one kind of object.

    Attributes:
        read: A function that returns its state.
        write: A function that sets it.
        draws: Whether each use gives another value; else it holds what it was given.
        goes_on: Whether a stage goes on from the state that it has left.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    draws: bool = True
    goes_on: bool = True


def generator_kind(value: Any) -> SourceKind | None:
    """Return how to treat what draws; None for all else.

    Python's iterators, and text files that are read, have no state that could be read; see
    :func:`is_iterator`.
    """
    if isinstance(value, io.IOBase):
        return _kind_of_file(value)
    kind = next((_GENERATORS[cls] for cls in type(value).__mro__ if cls in _GENERATORS), None)
    return kind if kind is not None and _has_state(value) else None


def collection_kind(value: Any) -> SourceKind | None:
    """Return how to treat what holds values; None for all else."""
    if type(value) is Tensor:
        return _TENSOR if value.nbytes <= _LARGEST else None
    return next((_COLLECTIONS[cls] for cls in type(value).__mro__ if cls in _COLLECTIONS), None)


def is_iterator(value: Any) -> bool:
    """Whether a value has to be replaced by a :class:`.rewindable.Rewindable`."""
    if isinstance(value, io.TextIOBase):
        return not value.closed and value.readable() and not value.writable()
    return hasattr(type(value), "__next__") and not isinstance(value, (io.IOBase, Rewindable))


def is_same_state(before: Any, after: Any) -> bool:
    """Whether two states that were read are one."""
    if isinstance(before, (Tensor, np.ndarray)):
        return before is after or _have_same_elements(before, after)
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            is_same_state(value, after[name]) for name, value in before.items()
        )
    return bool(before == after)


def _have_same_elements(before: Any, after: Any) -> bool:
    if type(before) is not type(after) or before.shape != after.shape:
        return False
    # As bytes: what is not a number is the same as itself.
    return before is after or _bytes(before) == _bytes(after)


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        value = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return bytes(value.tobytes())


def _kind_of_file(file: Any) -> SourceKind | None:
    if file.closed or not file.seekable():
        return None
    return _WRITTEN_FILE if file.writable() else _READ_FILE


def _has_state(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes <= _LARGEST and value.flags.writeable
    return not isinstance(value, random.SystemRandom)


def _write_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _read_bits(generator: np.random.Generator) -> Any:
    return generator.bit_generator.state


def _write_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _write_state(bits: np.random.BitGenerator, state: Any) -> None:
    bits.state = state


def _read_legacy(generator: np.random.RandomState) -> Any:
    return generator.get_state(legacy=False)


def _copy_values(values: dict[str, Any]) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}


def _read_sobol(engine: SobolEngine) -> Any:
    return _copy_values(vars(engine))


def _write_sobol(engine: SobolEngine, state: Any) -> None:
    vars(engine).update(_copy_values(state))


def _place_and_size(file: Any) -> tuple[int, int]:
    position = file.tell()
    size: int = file.seek(0, io.SEEK_END)
    file.seek(position)
    return position, size


def _cut_off(file: Any, state: tuple[int, int]) -> None:
    position, size = state
    if _place_and_size(file)[1] > size:
        file.truncate(size)
    file.seek(position)


def _write_elements(array: Any, state: Any) -> None:
    array[...] = state


def _write_tensor(tensor: Tensor, state: Tensor) -> None:
    if not is_same_state(tensor, state):  # else its version would count a write
        with torch.no_grad():
            tensor.copy_(state)


def _write_list(container: Any, state: Parts) -> None:
    container.clear()
    container.extend(state)


def _read_dict(container: dict[Any, Any]) -> Parts:
    return Parts(part for item in dict.items(container) for part in item)


def _write_dict(container: dict[Any, Any], state: Parts) -> None:
    container.clear()
    container.update(zip(state[::2], state[1::2], strict=True))


def _write_set(container: set[Any], state: set[Any]) -> None:
    container.clear()
    container.update(state)


_GENERATORS: dict[type[Any], SourceKind] = {
    torch.Generator: SourceKind(torch.Generator.get_state, _write_generator),
    np.random.Generator: SourceKind(_read_bits, _write_bits),
    np.random.BitGenerator: SourceKind(lambda bits: bits.state, _write_state),
    np.random.RandomState: SourceKind(_read_legacy, np.random.RandomState.set_state),
    random.Random: SourceKind(random.Random.getstate, random.Random.setstate),
    SobolEngine: SourceKind(_read_sobol, _write_sobol),
    Rewindable: SourceKind(Rewindable.position, Rewindable.rewind),
    np.ndarray: SourceKind(np.ndarray.copy, _write_elements),
}
_READ_FILE = SourceKind(lambda file: file.tell(), lambda file, position: file.seek(position))
_WRITTEN_FILE = SourceKind(_place_and_size, _cut_off, draws=False, goes_on=False)
_TENSOR = SourceKind(Tensor.clone, _write_tensor, draws=False)
_COLLECTIONS: dict[type[Any], SourceKind] = {
    list: SourceKind(Parts, _write_list, draws=False),
    deque: SourceKind(Parts, _write_list, draws=False),
    dict: SourceKind(_read_dict, _write_dict, draws=False),
    set: SourceKind(set.copy, _write_set, draws=False),
}
