"""Watches the operations of F, to know how each tensor came about.

Below autograd, where a result is seen before autograd saves it. A result's call is known as long as
the result is alive, by its storage; that alone keeps no result alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home

from lightning_pipeoffload.runtime.memory.cheap_calls import (
    CHEAP,
    CheapCall,
    ValueSource,
    bernoulli,
    dropout_mask,
)
from lightning_pipeoffload.runtime.randomness import generator_state
from lightning_pipeoffload.runtime.shapes.shape_only import storage_of

aten = torch.ops.aten

# A longer row of calls is not cheap, and its inputs would stay alive meanwhile.
_MAX_DEPTH = 16
_BERNOULLI = aten.bernoulli_.float
_DROPOUT = aten.native_dropout.default
# Dropout on CPU scales its mask in place.
_IN_PLACE = {aten.div_.Scalar: aten.div.Tensor}


@dataclass
class _Known:
    """Where a live storage comes from, as long as its version is this one.

    Attributes:
        storage: Expires with the result.
        source: The source of its value.
        version: The version of the tensor when it was computed.
        geometry: Size, stride, offset and dtype of the value.
    """

    storage: StorageWeakRef
    source: ValueSource
    version: int
    geometry: tuple[Any, ...]


class CallRecorder(TorchDispatchMode):
    """Records the cheap calls inside of it.

    Args:
        kinds: The types of the tensors to follow.
    """

    def __init__(self, kinds: tuple[type[Tensor], ...] = (Tensor,)) -> None:
        super().__init__()
        self._kinds = kinds
        self._known: dict[int, _Known] = {}
        self._swept_at = 64

    def find(self, tensor: Tensor) -> tuple[ValueSource, tuple[Any, ...]] | None:
        """Find where a tensor, or what it is a view of, comes from.

        Returns:
            The source, and the geometry (size, stride, offset, dtype) of its value; None: unknown,
            or written since.
        """
        known = self._known.get(_key(tensor))
        if known is None or known.version != tensor._version or known.storage.expired():
            return None
        return known.source, known.geometry

    def forget(self) -> None:
        """Forget all calls that nobody claimed."""
        self._known.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in CHEAP and _is_recordable(args, options, (*self._kinds, nn.Parameter)):
            return self._run_cheap(func, args, options)
        if not _writes(func):
            return func(*args, **options)
        return self._run_writing(func, args, options)

    def _run_cheap(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        generator = _generator_of(args[0]) if CHEAP[func] else None
        results = func(*args, **options)
        outputs = results if isinstance(results, tuple) else (results,)
        if outputs[0].device == args[0].device:
            call = CheapCall(func, [self._source_of(a) for a in args], options, generator)
            for index, output in enumerate(outputs):
                self._remember(output, ValueSource(call=call, index=index), output._version)
            if func is _DROPOUT:
                mask = CheapCall(dropout_mask(*args), [], {}, generator)
                self._remember(outputs[1], ValueSource(call=mask), outputs[1]._version)
        return results

    def _run_writing(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        written = args[0] if args and isinstance(args[0], Tensor) else None
        call = None if written is None else self._rewrite(func, written, args[1:], options)
        result = func(*args, **options)
        for tensor in (*args, *options.values()):
            if isinstance(tensor, Tensor):
                self._known.pop(_key(tensor), None)
        if call is not None and written is not None:
            # The version counts up after this level has returned.
            self._remember(written, ValueSource(call=call), written._version + 1)
        return result

    def _rewrite(
        self, func: Any, written: Tensor, rest: tuple[Any, ...], options: dict[str, Any]
    ) -> CheapCall | None:
        """Return the call whose result is what ``func`` is about to write, if there is one."""
        if type(written) not in self._kinds or not _is_whole(written) or options:
            return None
        if func is _BERNOULLI:
            return CheapCall(bernoulli(written, *rest), [], {}, _generator_of(written))
        if func in _IN_PLACE and (found := self.find(written)) is not None:
            return CheapCall(_IN_PLACE[func], [found[0], *rest], {})
        return None

    def _source_of(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        found = self.find(argument)
        if found is None or found[1] != _geometry(argument) or found[0].depth >= _MAX_DEPTH:
            return ValueSource(argument)
        return found[0]

    def _remember(self, tensor: Tensor, source: ValueSource, version: int) -> None:
        storage = StorageWeakRef(storage_of(tensor))
        self._known[_key(tensor)] = _Known(storage, source, version, _geometry(tensor))
        if len(self._known) >= self._swept_at:
            self._known = {k: e for k, e in self._known.items() if not e.storage.expired()}
            self._swept_at = 2 * len(self._known) + 64


def _key(tensor: Tensor) -> int:
    # Private: an address of data can be another storage's later; a weak reference holds this one.
    return storage_of(tensor)._cdata


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _generator_of(tensor: Tensor) -> tuple[torch.device, Tensor]:
    return tensor.device, generator_state(tensor.device)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize == storage_of(tensor).nbytes()


def _is_recordable(
    args: tuple[Any, ...], options: dict[str, Any], kinds: tuple[type[Tensor], ...]
) -> bool:
    tensors = [a for a in args if isinstance(a, Tensor)]
    return (
        bool(tensors)
        and tensors[0] is args[0]
        and all(type(t) in kinds and _is_plain(t) for t in tensors)
        and not any(isinstance(value, Tensor) for value in options.values())
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


@cache
def _writes(func: Callable[..., Any]) -> bool:
    return bool(func._schema.is_mutable)  # type: ignore[attr-defined]
