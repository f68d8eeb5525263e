"""Where a step makes the values that go from segment to segment, and which of them do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import (  # private: to let a block run without the mode around it
    TorchFunctionMode,
    _get_current_function_mode,
)

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.leaves import leaves_of, tensors_in
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot


def mark_as_the_models(tensor: Tensor) -> None:
    """Say that a tensor is a weight, or computed from one: elsewhere it may be shape-only."""
    tensor.is_the_models = True  # type: ignore[attr-defined]


def mark_slots(slots: Iterable[tuple[Slot, Tensor]], chain: BlockChain) -> None:
    """Mark the weights, and the buffers that go with weights or are in a block."""
    found = list(slots)
    with_weights = {id(slot.module) for slot, _ in found if slot.kind == "_parameters"}
    for slot, tensor in found:
        if id(slot.module) in with_weights or chain.index_of(slot.name) is not None:
            mark_as_the_models(tensor)


class CallCounter(TorchFunctionMode):
    """Counts, in each segment of a step, the calls that make tensors of the model's.

    Not those that make constants: a step may keep a mask or a table of positions from one call to
    the next.

    Attributes:
        segment: The segment of the step that runs.
        digest: A number made of the names of the functions that were called in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segment = 0
        self.digest = 0
        self._call = 0
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
        """Call ``func`` and look at its result."""
        result = func(*args, **(kwargs or {}))
        if self._is_paused or not _makes_the_models(result, (args, kwargs)):
            return result
        self._call += 1
        self.digest = hash((self.digest, getattr(func, "__name__", "")))
        return self.see(self._call, result, args)

    def see(self, call: int, result: Any, args: tuple[Any, ...]) -> Any:
        """Return the result of a call, or what is to stand for it."""
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count."""
        # Steps aside where no mode of the user's is in between: some code is slower under a mode.
        was_paused, self._is_paused = self._is_paused, True
        is_on_top = _get_current_function_mode() is self
        if is_on_top:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if is_on_top:
                self.__enter__()
            self._is_paused = was_paused

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Count again within what is paused."""
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


class Port(NamedTuple):
    """Where a step makes a value.

    Attributes:
        segment: The segment of the step; the output of block k belongs to segment k + 1.
        call: Number of the call of a torch function in it, from 1 on; 0 is the block before.
        place: Its place among the tensors of what the call returned.
    """

    segment: int
    call: int
    place: int


@dataclass
class Crossing:
    """A value that goes from one segment to later ones beside the payload.

    Attributes:
        port: Where the value is made; None: in a way that cannot be followed.
        made_in: Segment that computes it.
        used_in: Last segment that needs it.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        trains_from: Segment from which on it requires a gradient; None: never.
        origins: What it is computed from, by name.
        line: The line of the user's code that needs it; "" if none is found.
        digest: A number made of the calls in the segment up to the one that makes it.
        led_back: Segments between which the loss leads back to it; None: all that there are.
    """

    port: Port | None
    made_in: int
    used_in: int
    shape: torch.Size
    dtype: torch.dtype
    trains_from: int | None
    origins: frozenset[str]
    line: str
    digest: int = 0
    led_back: list[tuple[int, int]] | None = None

    def crosses(self, block: int) -> bool:
        """Whether it goes over the cut before ``block``."""
        return self.made_in < block <= self.used_in

    def spec_before(self, block: int) -> TensorSpec:
        """Describe it as it goes over the cut before ``block``."""
        trains = self.trains_from is not None and self.trains_from < block
        return TensorSpec(self.shape, self.dtype, trains, trains and self._is_led_back_over(block))

    def _is_led_back_over(self, block: int) -> bool:
        return self.led_back is None or any(made < block <= used for made, used in self.led_back)
