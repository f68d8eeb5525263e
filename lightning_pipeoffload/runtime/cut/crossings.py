"""Values that later segments of a step use, besides the outputs passed from block to block.

A **port** identifies the call that makes a value. The trace and the stages count calls in the same
way, so the ports of the trace are valid on every stage, as those of values to send and receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import (  # private: to run a block without the mode around it
    TorchFunctionMode,
    _get_current_function_mode,
)

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.leaves import leaves_of, tensors_in
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot


class Port(NamedTuple):
    """Identifies the call of a step that makes a value."""

    segment: int  # the number of calls of blocks before; the output of call k has segment k + 1
    call: int  # the number of a call of a torch function in it, from 1 on; 0: the block before
    place: int  # among the tensors of what the call returned


@dataclass
class Crossing:
    """A value that later segments use, besides the output passed to the next block."""

    port: Port | None  # None: no call of a torch function has returned it
    made_in: int  # a segment of the record, as used_in
    used_in: int  # the last segment that needs it
    shape: torch.Size
    dtype: torch.dtype
    trains_from: int | None  # the segment from which on it requires a gradient; None: never
    origins: frozenset[str]  # names of what it is computed from
    line: str  # of the user's code that needs it; "" if none is found
    digest: int = 0  # of the names of the functions called in the segment until it is made
    led_back: list[tuple[int, int]] | None = None
    """Pairs of segments between which the loss leads back to it; None: all."""
    stride: tuple[int, ...] | None = None  # see TensorSpec

    def crosses(self, block: int) -> bool:
        """Return whether the value crosses the cut before ``block``."""
        return self.made_in < block <= self.used_in

    def spec_before(self, block: int) -> TensorSpec:
        """Return the spec of the value at the cut before ``block``."""
        trains = self.trains_from is not None and self.trains_from < block
        pairs = self.led_back
        leads_back = pairs is None or any(made < block <= used for made, used in pairs)
        return TensorSpec(self.shape, self.dtype, trains, trains and leads_back, self.stride)


def mark_as_the_models(tensor: Tensor) -> None:
    """Mark a weight or a tensor computed from one: on another stage it may be shape-only."""
    tensor.is_the_models = True  # type: ignore[attr-defined]


def mark_slots(slots: Iterable[Slot], chain: BlockChain) -> None:
    """Mark the weights, and the buffers of blocks and of modules with weights."""
    found = list(slots)
    with_weights = {id(slot.module) for slot in found if slot.kind == "_parameters"}
    for slot in found:
        if id(slot.module) in with_weights or chain.index_of(slot.name) is not None:
            mark_as_the_models(slot.tensor)


class CallCounter(TorchFunctionMode):
    """Counts, between two calls of blocks, the calls that compute tensors from marked ones.

    Calls that make constants are not counted: a step may cache a mask or a table of positions
    between calls.

    Attributes:
        segment: The number of calls of blocks before.
        digest: A hash of the names of the functions called since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start(0)
        self._is_paused = False

    def start(self, segment: int) -> None:
        """Count from the start of ``segment`` on."""
        self.segment = segment
        self.digest = 0
        self._call = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_paused or not _makes_the_models(result, (args, kwargs)):
            return result
        self._call += 1
        self.digest = hash((self.digest, getattr(func, "__name__", "")))
        return self.see(self._call, result, args)

    def see(self, call: int, result: Any, args: tuple[Any, ...]) -> Any:
        """Return the result of a counted call, or a replacement."""
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop counting within the context."""
        # Removes itself from the stack of modes unless a mode of the user's is above it: some
        # code is slower under a mode.
        is_on_top = _get_current_function_mode() is self
        if is_on_top:
            self.__exit__(None, None, None)
        try:
            with self.uncounted():
                yield
        finally:
            if is_on_top:
                self.__enter__()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Stop counting within the context, where code may enter or leave torch function modes."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Count again within the context, which is inside of :meth:`paused`."""
        self._is_paused = False
        try:
            with self:
                yield
        finally:
            self._is_paused = True


def _makes_the_models(result: Any, arguments: Any) -> bool:
    made = tensors_in(result)
    if not made or not any(_is_the_models(leaf) for leaf in leaves_of(arguments)):
        return False
    for leaf in made:
        mark_as_the_models(leaf)
    return True


def _is_the_models(leaf: Any) -> bool:
    return isinstance(leaf, ShapeOnly) or hasattr(leaf, "is_the_models")
