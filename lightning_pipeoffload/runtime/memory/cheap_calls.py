"""Records calls of cheap operations, whose results can be recomputed.

A norm, an activation or a dropout mask is cheap to compute and large in memory (PipeOffload,
section 4; "selective recomputation" of Korthikanti et al., 2022). A call is recorded with its
inputs, each of which is a saved tensor or the result of another call. Recording happens below
autograd, before autograd saves a result; it keeps no result alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home

from lightning_pipeoffload.runtime import generator_state, replayed_generator
from lightning_pipeoffload.runtime.shapes import has_plain_storage, storage_of

aten = torch.ops.aten

_NAMES = (
    "native_layer_norm", "_fused_rms_norm",
    "gelu", "silu", "relu", "leaky_relu", "elu", "mish", "hardswish", "sigmoid", "tanh", "glu",
    "native_dropout", "_to_copy", "mul.Tensor", "mul.Scalar", "add.Tensor", "pow.Tensor_Scalar",
)  # fmt: skip
_RANDOM = {"native_dropout"}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


# The operations, and whether they draw random numbers.
_CHEAP = {operation: name in _RANDOM for name in _NAMES if (operation := _overload(name))}
# A longer chain of calls is not cheap, and its inputs would stay alive meanwhile.
_MAX_DEPTH = 16
_ALIGNMENT = 16  # elements; kernels load fewer at once
_BERNOULLI = aten.bernoulli_.float
_DROPOUT = aten.native_dropout.default
# Dropout on CPU scales its mask in place.
_IN_PLACE = {aten.div_.Scalar: aten.div.Tensor}


class Store(Protocol):
    """Saves tensors from F to the backward, as saved-tensors hooks do."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, packed: Any) -> Tensor: ...


class ValueSource:
    """The origin of a value: a tensor that must be saved, or result ``index`` of a call."""

    def __init__(
        self, tensor: Tensor | None = None, call: CheapCall | None = None, index: int = 0
    ) -> None:
        self.tensor = tensor
        self.version = 0 if tensor is None else tensor._version
        self.call = call
        self.index = index
        self._num_bytes = 0 if tensor is None or isinstance(tensor, nn.Parameter) else tensor.nbytes
        self._handle: Any = None

    @property
    def depth(self) -> int:
        """The length of the chain of calls that compute the value."""
        return 0 if self.call is None else self.call.depth

    @property
    def bytes_read(self) -> int:
        """Bytes of the tensors, without parameters, from which the value is computed."""
        return self._num_bytes if self.call is None else self.call.bytes_read

    @property
    def is_recomputed_in_b(self) -> bool:
        """Whether B recomputes one of the calls that compute the value."""
        return self.call is not None and self.call.is_recomputed_in_b

    def set_saved_handle(self, handle: Any, num_bytes: int) -> None:
        """Read the value from the store from now on, by ``handle``."""
        self.tensor, self.call, self._handle, self._num_bytes = None, None, handle, num_bytes

    def tensors_to_save(self) -> Iterator[Tensor]:
        """Yield the unsaved tensors that have to be saved to recompute this value."""
        if self.call is not None:
            for source in self.call.inputs():
                yield from source.tensors_to_save()
        elif self.tensor is not None:
            yield self.tensor

    def is_intact(self) -> bool:
        """Return whether no tensor that the value is computed from was written since."""
        if self.call is not None:
            return all(source.is_intact() for source in self.call.inputs())
        return self.tensor is None or self.tensor._version == self.version

    def register_use(self, store: Store, for_w: bool) -> None:
        """Register a future use of the value, in W if ``for_w``, else in B.

        The tensors that it is computed from are saved in ``store``.
        """
        if self.call is not None:
            self.call.register_use(store, for_w)
        elif self.tensor is not None:
            self.set_saved_handle(store.pack(self.tensor), self._num_bytes)

    def value(self, store: Store, for_w: bool) -> Tensor:
        if self.call is not None:
            return self.call.result(self.index, store, for_w)
        return store.unpack(self._handle)


@dataclass
class _Uses:
    """The uses of a call's results in B or in W; holds the results between first and last use."""

    num_claims: int = 0
    num_done: int = 0
    results: tuple[Tensor, ...] | None = None


class CheapCall:
    """One call of an operation, with a :class:`ValueSource` in place of each tensor argument.

    The results are computed at their first use and freed after the last, separately for B and W, so
    that none is alive between them. ``generator`` is the device and state of the random generator
    that the call uses.
    """

    def __init__(
        self,
        operation: Callable[..., Any],
        arguments: list[Any],
        options: dict[str, Any],
        generator: tuple[torch.device, Tensor] | None = None,
    ) -> None:
        self._operation = operation
        self._arguments = arguments
        self._options = options
        self._generator = generator
        self.depth = 1 + max((source.depth for source in self.inputs()), default=0)
        self._in_b, self._in_w = _Uses(), _Uses()

    @property
    def bytes_read(self) -> int:
        return sum(source.bytes_read for source in self.inputs())

    @property
    def is_recomputed_in_b(self) -> bool:
        return self._in_b.num_claims > 0 or any(s.is_recomputed_in_b for s in self.inputs())

    def inputs(self) -> Iterator[ValueSource]:
        return (argument for argument in self._arguments if isinstance(argument, ValueSource))

    def register_use(self, store: Store, for_w: bool) -> None:
        uses = self._in_w if for_w else self._in_b
        if not uses.num_claims:
            for source in self.inputs():
                source.register_use(store, for_w)
        uses.num_claims += 1

    def result(self, index: int, store: Store, for_w: bool) -> Tensor:
        uses = self._in_w if for_w else self._in_b
        results = self._compute(store, for_w) if uses.results is None else uses.results
        uses.num_done += 1
        is_last = uses.num_done >= uses.num_claims
        uses.results = None if is_last else results
        return results[index]

    @torch.no_grad()
    def _compute(self, store: Store, for_w: bool) -> tuple[Tensor, ...]:
        arguments = [
            argument.value(store, for_w) if isinstance(argument, ValueSource) else argument
            for argument in self._arguments
        ]
        with replayed_generator(*self._generator) if self._generator else nullcontext():
            results = self._operation(*arguments, **self._options)
        return results if isinstance(results, tuple) else (results,)


@dataclass
class _Known:
    """The source of a storage's value, valid while the tensor has this version.

    ``storage`` is a weak reference; ``geometry`` is size, stride, offset and dtype.
    """

    storage: StorageWeakRef
    source: ValueSource
    version: int
    geometry: tuple[Any, ...]


class CallRecorder(TorchDispatchMode):
    """Records the cheap calls within the context, on tensors of the given types."""

    def __init__(self, kinds: tuple[type[Tensor], ...] = (Tensor,)) -> None:
        super().__init__()
        self._kinds = kinds
        self._values: dict[int, _Known] = {}
        self._values_of_stage: dict[int, dict[int, _Known]] = {}
        self._swept_at = 64

    def find_source(self, tensor: Tensor) -> tuple[ValueSource, tuple[Any, ...]] | None:
        """Return the source and geometry of the value in a tensor's storage.

        None: the value is unknown, or was written since.
        """
        value = self._values.get(_key(tensor))
        if value is None or value.version != tensor._version or value.storage.expired():
            return None
        return value.source, value.geometry

    def change_stage(self, last: int, stage: int) -> None:
        """Keep the calls of stage ``last``, and continue with those of ``stage``."""
        self._values_of_stage[last] = self._values
        self._values = self._values_of_stage.pop(stage, {})

    def forget(self) -> None:
        """Discard all calls that nothing has claimed."""
        self._values.clear()
        self._values_of_stage.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in _CHEAP and self._is_recordable(args, options):
            return self._run_cheap(func, args, options)
        if not _writes(func):
            return func(*args, **options)
        return self._run_writing(func, args, options)

    def _is_recordable(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        tensors = [a for a in args if isinstance(a, Tensor)]
        kinds = (*self._kinds, nn.Parameter)
        return (
            bool(tensors)
            and tensors[0] is args[0]
            and all(type(t) in kinds and has_plain_storage(t) for t in tensors)
            and not any(isinstance(value, Tensor) for value in options.values())
        )

    def _run_cheap(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        generator = _generator_of(args[0]) if _CHEAP[func] else None
        results = func(*args, **options)
        outputs = results if isinstance(results, tuple) else (results,)
        if outputs[0].device == args[0].device:
            call = CheapCall(func, [self._source_of(a) for a in args], options, generator)
            for index, output in enumerate(outputs):
                self._remember(output, ValueSource(call=call, index=index), output._version)
            if func is _DROPOUT:
                mask = CheapCall(_dropout_mask_factory(*args), [], {}, generator)
                self._remember(outputs[1], ValueSource(call=mask), outputs[1]._version)
        return results

    def _run_writing(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        written = args[0] if args and isinstance(args[0], Tensor) else None
        call = (
            None if written is None else self._out_of_place_call(func, written, args[1:], options)
        )
        result = func(*args, **options)
        for tensor in (*args, *options.values()):
            if isinstance(tensor, Tensor):
                self._values.pop(_key(tensor), None)
        if call is not None and written is not None:
            # The version is incremented after this dispatch level has returned.
            self._remember(written, ValueSource(call=call), written._version + 1)
        return result

    def _out_of_place_call(
        self, func: Any, written: Tensor, rest: tuple[Any, ...], options: dict[str, Any]
    ) -> CheapCall | None:
        """Return a call that computes the value that ``func`` will write; None if none can."""
        is_whole = written.numel() * written.itemsize == storage_of(written).nbytes()
        if type(written) not in self._kinds or not is_whole or options:
            return None
        if func is _BERNOULLI:
            return CheapCall(_bernoulli_factory(written, *rest), [], {}, _generator_of(written))
        if func in _IN_PLACE and (origin := self.find_source(written)) is not None:
            return CheapCall(_IN_PLACE[func], [origin[0], *rest], {})
        return None

    def _source_of(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        origin = self.find_source(argument)
        if origin is None or origin[1] != _geometry(argument) or origin[0].depth >= _MAX_DEPTH:
            return ValueSource(argument)
        return origin[0]

    def _remember(self, tensor: Tensor, source: ValueSource, version: int) -> None:
        storage = StorageWeakRef(storage_of(tensor))
        self._values[_key(tensor)] = _Known(storage, source, version, _geometry(tensor))
        if len(self._values) >= self._swept_at:
            self._values = {k: e for k, e in self._values.items() if not e.storage.expired()}
            self._swept_at = 2 * len(self._values) + 64


def _key(tensor: Tensor) -> int:
    # Private: a data address may be reused; the weak reference holds this address.
    return storage_of(tensor)._cdata


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _generator_of(tensor: Tensor) -> tuple[torch.device, Tensor]:
    return tensor.device, generator_state(tensor.device)


@cache
def _writes(func: Callable[..., Any]) -> bool:
    return bool(func._schema.is_mutable)  # type: ignore[attr-defined]


def _bernoulli_factory(like: Tensor, probability: float = 0.5) -> Callable[[], Tensor]:
    """Return a function that computes ``like.bernoulli_(probability)`` from the shape alone."""
    make = _empty_factory(like)
    return lambda: make().bernoulli_(probability)


def _dropout_mask_factory(like: Tensor, *options: Any) -> Callable[[], Tensor]:
    """Return a function that computes the mask of ``native_dropout`` from the shape alone."""
    make = _empty_factory(like)
    return lambda: aten.native_dropout.default(make(), *options)[1]


def _empty_factory(like: Tensor) -> Callable[[], Tensor]:
    size, stride, dtype, device = like.shape, like.stride(), like.dtype, like.device
    # CUDA's dropout draws for as many elements at once as the address is aligned to.
    shift = int(like.storage_offset()) % _ALIGNMENT
    if not shift or not like.numel():
        return lambda: torch.empty_strided(size, stride, dtype=dtype, device=device)
    length = shift + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return lambda: torch.empty(length, dtype=dtype, device=device).as_strided(size, stride, shift)
