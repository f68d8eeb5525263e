"""Carried values: sent between stages in addition to the blocks' outputs.

A residual around a block, the encoder's output in every block of a decoder, a skip of a U-Net, an
auxiliary loss: the step makes such a value before a cut and uses it behind. The sender has it as a
real tensor, the receiver as a shape-only one, in the same place of the same step. So a value is
named by its **port**, the place where the step makes it: the segment (see :mod:`.trace`) and the
number of the call of a torch function there. Both sides count those calls alike, for they run the
same Python code on the same batch. A value that later stages need is sent with the payload; a stage
in between hands it on. Its gradient comes back the same way, summed over all uses. A skip over
three stages::

    stage 0   makes h, x        sends x, h
    stage 1   uses x, makes y   sends y, h      (hands h on)
    stage 2   uses y and h      sends back the gradients of both
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime.cut.crossings import (
    CallCounter,
    Crossing,
    Port,
    mark_as_the_models,
)
from lightning_pipeoffload.runtime.leaves import map_output, output_tensors
from lightning_pipeoffload.runtime.shapes.shape_only import Awaited, ShapeOnly


class CarriedValues(CallCounter):
    """The carried values of one F of a stage: received, used, and sent with the payload.

    Attributes:
        counts: Whether the step's calls are to be counted: values are wanted that no block returns.
    """

    def __init__(
        self, coming: Sequence[Crossing], going: Sequence[Crossing], derivation: str = ""
    ) -> None:
        super().__init__()
        self._derivation = derivation  # see StepRecord
        self._incoming = [crossing.port for crossing in coming if crossing.port]
        self._outgoing = [crossing.port for crossing in going if crossing.port]
        self._wanted = _places({*self._incoming, *self._outgoing})
        self._digests = {c.port[:2]: c.digest for c in (*coming, *going) if c.port}
        self.counts = any(call for _, call in self._wanted)
        self._awaited: dict[Port, Awaited] = {}
        self._values: dict[Port, Tensor] = {}
        self._early: dict[Port, Tensor] = {}  # received before the step makes their stand-ins

    def see(self, call: int, result: Any, args: tuple[Any, ...]) -> Any:
        """Record a result that the stage receives or sends as a carried value."""
        place = self.segment, call
        is_it = place in self._wanted and self._digests[place] == self.digest
        return self._note(call, self._wanted[place], result) if is_it else result

    def leave_block(self, call: int, output: Any) -> Any:
        """Record the output of a block's call and start the next segment."""
        self.start(call + 1)
        if self.counts:
            for leaf in output_tensors(output):
                mark_as_the_models(leaf)
        places = self._wanted.get((call + 1, 0))
        return self._note(0, places, output) if places else output

    def deliver(self, tensors: Sequence[Tensor]) -> None:
        """Set the values of the stand-ins to the received tensors.

        Raises:
            RuntimeError: The step has not made one of these values, unlike in its first run.
        """
        for port, tensor in zip(self._incoming, tensors, strict=True):
            stand_in = self._awaited.get(port)
            self._values[port] = tensor
            mark_as_the_models(tensor)
            if stand_in is None and port.segment > self.segment:
                self._early[port] = tensor  # the step makes it after a later call of a block
            elif stand_in is None or stand_in.meta.shape != tensor.shape:
                raise RuntimeError(_ANOTHER_WAY + self._derivation)
            else:
                stand_in.receive(tensor)
        self._awaited.clear()

    def to_hand_on(self) -> list[Tensor]:
        """Return the carried values that the next stage receives besides outputs.

        Raises:
            RuntimeError: The step has not made one of these values, unlike in its first run.
        """
        if not self._values.keys() >= set(self._outgoing):
            raise RuntimeError(_ANOTHER_WAY + self._derivation)
        return [self._values[port] for port in self._outgoing]

    def _note(self, call: int, places: Iterable[int], result: Any) -> Any:
        place = -1

        def note(leaf: Any) -> Any:
            nonlocal place
            place += isinstance(leaf, Tensor)
            if place not in places or not isinstance(leaf, Tensor):
                return leaf
            port = Port(self.segment, call, place)
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

        return map_output(note, result)


_ANOTHER_WAY = (
    "the step computes other values between its blocks than when it was first run on a batch of "
    "these shapes, so what goes to later stages is not found; let each step call the same "
    "operations, or compute in a block what depends on chance or on the number of the step"
)


def _places(ports: Iterable[Port]) -> Mapping[tuple[int, int], set[int]]:
    places: dict[tuple[int, int], set[int]] = {}
    for port in ports:
        places.setdefault((port.segment, port.call), set()).add(port.place)
    return places
