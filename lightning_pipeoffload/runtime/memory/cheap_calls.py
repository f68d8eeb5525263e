"""Calls of cheap operations, remembered so that their results can be computed again.

A norm, an activation or a dropout mask costs far less time than its result costs memory
(PipeOffload, section 4; "selective recomputation" of Korthikanti et al., 2022). A call here is an
operation with its inputs, each of which is a tensor that is kept or the result of another call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.randomness import replayed_generator

aten = torch.ops.aten


class Store(Protocol):
    """Where tensors stay between F and backward; two functions that autograd's hooks could be."""

    def pack(self, tensor: Tensor) -> Any:
        """Keep a tensor."""

    def unpack(self, handle: Any) -> Tensor:
        """Return what ``pack`` got."""


class ValueSource:
    """Where a value comes from: a tensor, or a result of a call.

    Args:
        tensor: The value, where it can only be kept.
        call: What computes it, where it can be computed.
        index: The index of the result among the call's.
    """

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
        """Calls in a row that computing the value takes."""
        return 0 if self.call is None else self.call.depth

    @property
    def bytes_read(self) -> int:
        """Bytes of the tensors that computing the value takes, parameters left out."""
        return self._num_bytes if self.call is None else self.call.bytes_read

    @property
    def is_needed_in_b(self) -> bool:
        """Whether B computes something on the way to the value."""
        return self.call is not None and self.call.is_needed_in_b

    def kept_as(self, handle: Any, num_bytes: int) -> None:
        """Take the value, of so many bytes, from the store from now on."""
        self.tensor, self.call, self._handle, self._num_bytes = None, None, handle, num_bytes

    def leaves(self) -> Iterator[Tensor]:
        """Find the tensors that would have to be kept for this value, and are not yet."""
        if self.call is not None:
            for source in self.call.inputs():
                yield from source.leaves()
        elif self.tensor is not None:
            yield self.tensor

    def is_intact(self) -> bool:
        """Whether nothing that the value comes from was written since."""
        if self.call is not None:
            return all(source.is_intact() for source in self.call.inputs())
        return self.tensor is None or self.tensor._version == self.version

    def claim(self, store: Store, for_w: bool) -> None:
        """Make sure that the value can be had in B or in W, once more than so far."""
        if self.call is not None:
            self.call.claim(store, for_w)
        elif self.tensor is not None:
            self.kept_as(store.pack(self.tensor), self._num_bytes)

    def value(self, store: Store, for_w: bool) -> Tensor:
        """Return the value."""
        if self.call is not None:
            return self.call.result(self.index, store, for_w)
        return store.unpack(self._handle)


@dataclass
class _Uses:
    """Uses of a call's results in B, or in W: announced, done, and the results meanwhile."""

    num_claims: int = 0
    num_done: int = 0
    results: tuple[Tensor, ...] | None = None


class CheapCall:
    """One call of an operation.

    The results are computed at their first use and freed after the last; for B and W apart, so that
    nothing stays in between.

    Args:
        operation: An overload of aten.
        arguments: The arguments of the call, with a :class:`ValueSource` in each tensor's place.
        options: The keyword arguments of the call, without tensors.
        generator: Device and state of the generator that the call draws from.
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
        """Bytes of the tensors that computing it takes, parameters left out."""
        return sum(source.bytes_read for source in self.inputs())

    @property
    def is_needed_in_b(self) -> bool:
        """Whether B computes this call, or one of those before it."""
        return self._in_b.num_claims > 0 or any(s.is_needed_in_b for s in self.inputs())

    def inputs(self) -> Iterator[ValueSource]:
        """Return the sources among the arguments."""
        return (argument for argument in self._arguments if isinstance(argument, ValueSource))

    def claim(self, store: Store, for_w: bool) -> None:
        """Announce one more use; the first one makes sure of the inputs."""
        uses = self._in_w if for_w else self._in_b
        if not uses.num_claims:
            for source in self.inputs():
                source.claim(store, for_w)
        uses.num_claims += 1

    def result(self, index: int, store: Store, for_w: bool) -> Tensor:
        """Return a result, for one of the uses."""
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


_NAMES = (
    "native_layer_norm", "_fused_rms_norm",
    "gelu", "silu", "relu", "leaky_relu", "elu", "mish", "hardswish", "sigmoid", "tanh", "glu",
    "native_dropout", "_to_copy", "mul.Tensor", "mul.Scalar", "add.Tensor", "pow.Tensor_Scalar",
)  # fmt: skip
_RANDOM = {"native_dropout"}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


CHEAP = {operation: name in _RANDOM for name in _NAMES if (operation := _overload(name))}
"""The operations, and whether they draw random numbers."""


def bernoulli(like: Tensor, probability: float = 0.5) -> Callable[[], Tensor]:
    """Return what makes ``like`` as ``like.bernoulli_(probability)`` did, from its shape alone."""
    make = _empties_like(like)
    return lambda: make().bernoulli_(probability)


def dropout_mask(like: Tensor, *options: Any) -> Callable[[], Tensor]:
    """Return what makes the mask of ``native_dropout(like, *options)``, from the shape alone."""
    make = _empties_like(like)
    return lambda: aten.native_dropout.default(make(), *options)[1]


def _empties_like(like: Tensor) -> Callable[[], Tensor]:
    """Return what makes tensors of the layout, dtype and device of ``like``, without keeping it."""
    size, stride, dtype, device = like.shape, like.stride(), like.dtype, like.device
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device=device)
