"""A batch as bytes that another process can rebuild: a pickle, and the memory of its tensors.

A pickle alone would copy each tensor several times. So the pickle has numbers in their place, and
the tensors' memory is copied once, into one buffer, and once out of it::

    batch    {"x": view of A, "y": view of A, "z": B}
    packet   structure: {"x": 0, "y": 1, "z": 2}, with offsets and shapes; parts: A, B
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNED = 64  # bytes; no dtype needs more
_SPARE = 4096  # bytes of a storage that are sent although no tensor of the batch has them


class _View(NamedTuple):
    """A tensor as a view of a part."""

    part: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class _StorageSpec(NamedTuple):
    """The memory of one storage, of which tensors of the batch are views.

    ``device`` is its type, and ``is_pinned`` whether it is page-locked host memory.
    """

    num_bytes: int
    device: str = "cpu"
    is_pinned: bool = False


class Packet:
    """A batch, ready to be written into a buffer.

    Args:
        batch: Any object that can be pickled; its tensors may be on any device.

    Attributes:
        structure: The bytes that :class:`ReceivedPacket` needs in addition to the buffer.
        num_bytes: The size of the buffer.
        is_on_host: Whether all tensors are.

    Raises:
        TypeError: Something in the batch cannot be pickled.
    """

    def __init__(self, batch: Any) -> None:
        self._memory: list[Tensor] = []
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler = _BatchPickler(file, 5, buffer_callback=buffers.append)
        try:
            pickler.dump(batch)
        except Exception as error:
            raise TypeError(_explain(batch, error)) from error
        parts, views = self._lay_out(pickler.tensors)
        for buffer in buffers:
            raw = buffer.raw()
            is_empty = not raw.nbytes
            self._memory.append(torch.empty(0) if is_empty else _bytes_of(raw))
            parts.append(_StorageSpec(raw.nbytes))
        self._parts = parts
        self.structure = pickle.dumps((file.getvalue(), parts, views, len(buffers)), 5)
        self.num_bytes = sum([_aligned(part.num_bytes) for part in parts])
        self.is_on_host = {part.device for part in parts} <= {"cpu"}

    def _lay_out(self, tensors: Sequence[Tensor]) -> tuple[list[_StorageSpec], list[_View]]:
        of_storage: dict[tuple[str, int], list[int]] = {}
        for number, tensor in enumerate(tensors):
            key = str(tensor.device), tensor.untyped_storage().data_ptr()
            of_storage.setdefault(key, []).append(number)
        parts: list[_StorageSpec] = []
        views: dict[int, _View] = {}
        for numbers in of_storage.values():
            viewing = [tensors[number] for number in numbers]
            firsts, ends = zip(*map(_span, viewing), strict=True)
            first, end = min(firsts), max(ends)
            first -= first % _ALIGNED
            wanted = sum([tensor.nbytes for tensor in viewing])
            if end - first > 2 * wanted + _SPARE:  # views of a whole data set, say
                for number in numbers:
                    copied = tensors[number].contiguous()
                    views[number] = _view(copied, len(parts), int(copied.storage_offset()))
                    self._add(parts, copied, *_span(copied))
                continue
            for number in numbers:
                tensor = tensors[number]
                offset = int(tensor.storage_offset()) - first // tensor.itemsize
                views[number] = _view(tensor, len(parts), offset)
            self._add(parts, tensors[numbers[0]], first, end)
        return parts, [views[number] for number in range(len(tensors))]

    def _add(self, parts: list[_StorageSpec], tensor: Tensor, first: int, end: int) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), first, (end - first,), (1,))
        self._memory.append(flat)
        is_pinned = tensor.device.type == "cpu" and tensor.is_pinned()
        parts.append(_StorageSpec(end - first, tensor.device.type, is_pinned))

    def write(self, buffer: Tensor) -> None:
        """Copy the tensors into the first ``num_bytes`` bytes of a buffer on the host."""
        for start, part, memory in zip(
            _starts(self._parts), self._parts, self._memory, strict=True
        ):
            buffer[start : start + part.num_bytes].copy_(memory)


class ReceivedPacket:
    """A packet that has come, from which a batch in memory of its own is rebuilt.

    Args:
        structure: That of the packet.
        buffer: The bytes that the packet has written.
    """

    def __init__(self, structure: bytes, buffer: Tensor) -> None:
        self._tree, self._parts, self._views, self._num_buffers = pickle.loads(structure)
        self._buffer: Tensor | None = buffer
        self._memory = [
            torch.empty(part.num_bytes, dtype=torch.uint8, pin_memory=part.is_pinned)
            for part in self._parts
        ]

    def copy(self) -> None:
        """Copy the bytes out of the buffer, which is not used afterwards; any thread may."""
        assert self._buffer is not None
        with torch.inference_mode():  # the memory may be of an evaluation
            for start, own in zip(_starts(self._parts), self._memory, strict=True):
                own.copy_(self._buffer[start : start + own.numel()])
        self._buffer = None

    def rebuild(self, device: torch.device) -> Any:
        """Return the batch, whose bytes have been copied.

        Args:
            device: The accelerator that tensors of an accelerator move to.
        """
        memory = [
            own if part.device == "cpu" else own.to(device)
            for part, own in zip(self._parts, self._memory, strict=True)
        ]
        tensors = [_rebuild(view, memory[view.part]) for view in self._views]
        buffers = [part.numpy() for part in memory[len(memory) - self._num_buffers :]]
        return _BatchUnpickler(self._tree, buffers, tensors).load()


class _BatchPickler(pickle.Pickler):
    """Pickles a batch; plain tensors are collected, and numbered in the pickle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or not _is_plain(value):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, tree: bytes, buffers: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(tree), buffers=buffers)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its memory, shape and strides, and nothing else."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    is_dense = is_dense and not tensor.is_meta and not tensor.is_conj() and not tensor.is_neg()
    return is_dense and not tensor.__dict__


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after the last."""
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return first * tensor.itemsize, first * tensor.itemsize
    strides = tensor.stride()
    last = first + sum(map(mul, tensor.shape, strides)) - sum(strides)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _view(tensor: Tensor, part: int, offset: int) -> _View:
    shape, stride = tuple(tensor.shape), tensor.stride()
    return _View(part, tensor.dtype, offset, shape, stride, tensor.requires_grad)


def _rebuild(view: _View, memory: Tensor) -> Tensor:
    tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
    tensor.set_(memory.untyped_storage(), view.offset, view.shape, view.stride)
    return tensor.requires_grad_() if view.requires_grad else tensor


def _bytes_of(raw: memoryview) -> Tensor:
    if raw.readonly:
        raw = memoryview(bytearray(raw))  # torch warns of memory that it must not write
    return torch.frombuffer(raw, dtype=torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _starts(parts: Sequence[_StorageSpec]) -> Iterator[int]:
    start = 0
    for part in parts:
        yield start
        start += _aligned(part.num_bytes)


def _explain(batch: Any, error: Exception) -> str:
    place, value = _find_unpicklable(batch, "batch")
    return (
        f"{place} is a {type(value).__qualname__} that cannot be pickled ({error}); one process "
        f"of a pipeline reads each batch and sends it to the others: leave this out of batches, "
        f"or give its class a __reduce__ by which pickle can rebuild it"
    )


def _find_unpicklable(value: Any, place: str) -> tuple[str, Any]:
    """Return the innermost part of a value that cannot be pickled, and its place in it."""
    for name, part in _parts_of(value):
        if _fails(part):
            return _find_unpicklable(part, place + name)
    return place, value


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _fails(value: Any) -> bool:
    dump: Callable[[Any], None] = _BatchPickler(io.BytesIO(), 5).dump
    try:
        dump(value)
    except Exception:
        return True
    return False
