"""Carried values: sent between stages in addition to the blocks' outputs.

A residual around a block, the encoder's output in every block of a decoder, a skip of a U-Net, an
auxiliary loss: the step makes such a value before a cut and uses it after. The sender has it as a
real tensor, the receiver as a shape-only one, in the same place of the same step. So a value is
named by its **port**, the place where the step makes it: the number of calls of blocks before,
and the number of the call of a torch function since. Both sides count those calls alike, for they
run the same Python code on the same batch. A value that later stages need is sent with the block's
output; a stage in between forwards it. Its gradient comes back the same way, summed over all uses.
A skip over three stages::

    stage 0   makes h, x        sends x, h
    stage 1   uses x, makes y   sends y, h      (forwards h)
    stage 2   uses y and h      sends back the gradients of both
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import (  # private: to run a block without the mode around it
    TorchFunctionMode,
    _get_current_function_mode,
)

from lightning_pipeoffload.runtime import (
    TensorSpec,
    leaves_of,
    map_output,
    output_tensors,
    tensors_in,
)
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.shapes import Awaited, ShapeOnly
from lightning_pipeoffload.runtime.users_code import Slot


class Port(NamedTuple):
    """Identifies the call of a step that makes a value."""

    num_calls: int  # of blocks before; of the output of call k it is k + 1
    call: int  # the number of a call of a torch function since, from 1 on; 0: the block before
    place: int  # among the tensors of what the call returned


@dataclass
class CarriedValue:
    """A value that later segments use, in addition to the output passed to the next block."""

    port: Port | None  # None: no call of a torch function has returned it
    made_in: int  # a segment of the record, as used_in
    used_in: int  # the last segment that needs it
    shape: torch.Size
    dtype: torch.dtype
    trains_from: int | None  # the segment from which on it requires a gradient; None: never
    origins: frozenset[str]  # names of what it is computed from
    line: str  # of the user's code that needs it; "" if none is found
    digest: int = 0  # of the names of the functions called since the last call of a block
    gradient_spans: list[tuple[int, int]] | None = None
    """Pairs of segments between which the loss leads back to it; None: all."""
    stride: tuple[int, ...] | None = None  # see TensorSpec

    def record_use(self, position: int, trains_from: int | None) -> None:
        """Add a use; ``trains_from`` is where the value requires a gradient by now."""
        self.used_in = max(self.used_in, position)
        self.trains_from = trains_from

    def set_gradient_spans(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Set between which segments the loss leads back to the value."""
        self.gradient_spans = sorted(pairs)

    def crosses(self, block: int) -> bool:
        """Return whether the value crosses the cut before ``block``."""
        return self.made_in < block <= self.used_in

    def spec_before(self, block: int) -> TensorSpec:
        """Return the spec of the value at the cut before ``block``."""
        trains = self.trains_from is not None and self.trains_from < block
        pairs = self.gradient_spans
        leads_back = pairs is None or any(start < block <= used for start, used in pairs)
        return TensorSpec(self.shape, self.dtype, trains, trains and leads_back, self.stride)


def mark_weight_dependent(tensor: Tensor) -> None:
    """Mark a weight or a tensor computed from one: on another stage it may be shape-only."""
    tensor.is_the_models = True  # type: ignore[attr-defined]


def mark_slots(slots: Iterable[Slot], chain: BlockChain) -> None:
    """Mark the weights, and the buffers of blocks and of modules with weights."""
    all_slots = list(slots)
    with_weights = {id(slot.module) for slot in all_slots if slot.kind == "_parameters"}
    for slot in all_slots:
        if id(slot.module) in with_weights or chain.enclosing_block(slot.name) is not None:
            mark_weight_dependent(slot.tensor)


class FunctionCounter(TorchFunctionMode):
    """Counts the torch functions, between two calls of blocks, that have marked operands.

    Marked are weights and tensors computed from them, see :func:`mark_weight_dependent`. Functions
    that compute constants are not counted: a step may cache a mask or a table of positions.

    Attributes:
        num_calls: The number of calls of blocks before.
        digest: A hash of the names of the functions counted since the last of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start(0)
        self._is_paused = False

    def start(self, num_calls: int) -> None:
        """Count anew, after that many calls of blocks."""
        self.num_calls = num_calls
        self.digest = 0
        self._call = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_paused or not _mark_dependent_results(result, (args, kwargs)):
            return result
        self._call += 1
        self.digest = hash((self.digest, getattr(func, "__name__", "")))
        return self.replace_result(self._call, result, args)

    def replace_result(self, call: int, result: Any, args: tuple[Any, ...]) -> Any:
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
        """Stop counting within the context; code in it may enter or exit torch function modes."""
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


def _mark_dependent_results(result: Any, arguments: Any) -> bool:
    results = tensors_in(result)
    if not results or not any(_is_weight_dependent(leaf) for leaf in leaves_of(arguments)):
        return False
    for leaf in results:
        mark_weight_dependent(leaf)
    return True


def _is_weight_dependent(leaf: Any) -> bool:
    return isinstance(leaf, ShapeOnly) or hasattr(leaf, "is_the_models")


class CarriedValues(FunctionCounter):
    """The carried values of one F of a stage: received, used, and sent with the block's output.

    Attributes:
        counts: Whether to count torch functions: some carried value is no output of a block.
    """

    def __init__(
        self,
        received: Sequence[CarriedValue],
        sent: Sequence[CarriedValue],
        derivation_note: str = "",
    ) -> None:
        super().__init__()
        self._derivation = derivation_note  # see StepRecord
        self._incoming = [carried.port for carried in received if carried.port]
        self._outgoing = [carried.port for carried in sent if carried.port]
        self._wanted = _places({*self._incoming, *self._outgoing})
        self._digests = {c.port[:2]: c.digest for c in (*received, *sent) if c.port}
        self.counts = any(call for _, call in self._wanted)
        self._awaited: dict[Port, Awaited] = {}
        self._values: dict[Port, Tensor] = {}
        self._early: dict[Port, Tensor] = {}  # received before the step makes their stand-ins

    def replace_result(self, call: int, result: Any, args: tuple[Any, ...]) -> Any:
        """Record a result that the stage receives or sends as a carried value."""
        place = self.num_calls, call
        is_it = place in self._wanted and self._digests[place] == self.digest
        return self._replace_carried(call, self._wanted[place], result) if is_it else result

    def leave_block(self, call: int, output: Any) -> Any:
        """Record the output of a block's call, and count anew after it."""
        self.start(call + 1)
        if self.counts:
            for leaf in output_tensors(output):
                mark_weight_dependent(leaf)
        places = self._wanted.get((call + 1, 0))
        return self._replace_carried(0, places, output) if places else output

    def fill_stand_ins(self, tensors: Sequence[Tensor]) -> None:
        """Set the values of the stand-ins to the received tensors.

        Raises:
            RuntimeError: The step has not made one of these values, unlike in its first run.
        """
        for port, tensor in zip(self._incoming, tensors, strict=True):
            stand_in = self._awaited.get(port)
            self._values[port] = tensor
            mark_weight_dependent(tensor)
            if stand_in is None and port.num_calls > self.num_calls:
                self._early[port] = tensor  # the step makes it after a later call of a block
            elif stand_in is None or stand_in.meta.shape != tensor.shape:
                raise RuntimeError(_ANOTHER_WAY + self._derivation)
            else:
                stand_in.receive(tensor)
        self._awaited.clear()

    def tensors_to_send(self) -> list[Tensor]:
        """Return the carried values to send to the next stage, in the order of their ports.

        Raises:
            RuntimeError: The step has not made one of these values, unlike in its first run.
        """
        if not self._values.keys() >= set(self._outgoing):
            raise RuntimeError(_ANOTHER_WAY + self._derivation)
        return [self._values[port] for port in self._outgoing]

    def _replace_carried(self, call: int, places: Iterable[int], result: Any) -> Any:
        place = -1

        def replace(leaf: Any) -> Any:
            nonlocal place
            place += isinstance(leaf, Tensor)
            if place not in places or not isinstance(leaf, Tensor):
                return leaf
            port = Port(self.num_calls, call, place)
            received = self._early.pop(port, None)
            if received is not None:
                if leaf.shape != received.shape:
                    raise RuntimeError(_ANOTHER_WAY + self._derivation)
                return received
            if isinstance(leaf, ShapeOnly):
                leaf = self._awaited[port] = Awaited.of(leaf)
            else:
                self._values[port] = leaf
            return leaf

        return map_output(replace, result)


_ANOTHER_WAY = (
    "the step computes other values between its blocks than when it was first run on a batch of "
    "these shapes, so what goes to later stages is not found; let each step call the same "
    "operations, or compute in a block what depends on chance or on the number of the step"
)


def _places(ports: Iterable[Port]) -> Mapping[tuple[int, int], set[int]]:
    places: dict[tuple[int, int], set[int]] = {}
    for port in ports:
        places.setdefault((port.num_calls, port.call), set()).add(port.place)
    return places
