"""The values that ranks hold for each other while a step runs whole, and how others get them."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.comm import PeerLostError, PipelineGroup
from lightning_pipeoffload.runtime.shapes import HeldOutput, HeldState, HeldValue
from lightning_pipeoffload.runtime.users_code import in_brackets, running_user_line

PATIENCE = timedelta(minutes=5)
"""How long a rank that has ended its run waits for the others, which may run other code."""

_CALL_THE_SAME = (
    "in a step that runs whole and in a hook, code outside of the blocks has to do the same on all "
    "ranks; call them outside of `if trainer.is_global_zero`"
)


class ValueRequest(NamedTuple):
    number: int
    holder: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Header(NamedTuple):
    """What the owner of a unit sends when it has run, or needs a value to go on.

    Attributes:
        serial: The number of headers before it, equal on all ranks.
        subject: The unit, and a checksum of the shapes of its arguments.
        request: The value that the owner needs to go on; None: the unit has run.
        result: The pickled result and changes.
    """

    serial: int
    subject: tuple[str, int]
    request: ValueRequest | None = None
    result: bytes = b""


class HeldValues:
    """The values that ranks hold for each other, and how they get them.

    Attributes:
        running: The unit that this rank runs for all; None: code runs that all ranks run.
    """

    def __init__(self, group: PipelineGroup) -> None:
        self._group = group
        self._num_headers = 0
        self._num_values = 0
        self._outputs: WeakValueDictionary[int, HeldOutput] = WeakValueDictionary()
        self._weights: set[int] = set()
        self._weight_bytes = 0
        self._states: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._fetched: list[HeldState] = []
        self.running: tuple[str, int] | None = None

    def next_value_number(self) -> int:
        self._num_values += 1
        return self._num_values

    def is_registered_state(self, tensor: Tensor) -> bool:
        """Whether other ranks have no value of a tensor that this rank's units wrote."""
        return any(tensor is each for each in self._states.values())

    def register_state(self, number: int, tensor: Tensor) -> None:
        """Note what a unit of this rank has written, for units of other ranks that read it."""
        self._states[number] = tensor

    def make_held_state(
        self, number: int, like: Tensor, origin: str, holder: int, device: torch.device
    ) -> HeldState:
        """Return a tensor without a value for what a unit of another rank has written."""
        return HeldState.create(like, device, origin, number, holder, self.fetch)

    def make_held_output(
        self,
        number: int,
        like: Tensor,
        origin: str,
        holder: int,
        device: torch.device | None = None,
    ) -> HeldOutput:
        """Return a tensor for what a unit of ``holder`` has returned.

        Args:
            number: Identifies it on all ranks.
            like: The value, on its holder; elsewhere a tensor of its shape.
            origin: What it is, for messages.
            holder: The rank that has the value.
            device: The tensor's device; None: that of ``like``.
        """
        device = like.device if device is None else device
        held: HeldOutput = HeldOutput.create(like, device, origin, number, holder, self.fetch)
        held.value = like if holder == self._group.rank else None
        self._outputs[number] = held
        return held

    def make_held_weight(self, value: Tensor, name: str, holder: int) -> HeldOutput:
        """Return a tensor for a weight, which stays with its owner unless code reads it."""
        held = self.make_held_output(self.next_value_number(), value, name, holder)
        held._is_param = isinstance(value, nn.Parameter)  # private: isinstance(_, Parameter) asks
        self._weights.add(held.number)
        return held

    def fetch(self, held: HeldValue) -> None:
        """Get a value that code reads, where it can be had; called on all ranks, or in a unit."""
        if self.running is not None:
            if held.value is None:
                self._request(held)
        elif isinstance(held, HeldOutput) and not held.is_everywhere:
            self.broadcast(held)

    def broadcast(self, held: HeldOutput) -> None:
        """Send an output to all ranks, which all call this."""
        value = held.meta if held.value is None else held.value
        received = self._group.broadcast_to_devices(value, held.holder)
        if held.value is None:
            held.value = received
            self._weight_bytes += received.nbytes if held.number in self._weights else 0
        held.is_everywhere = True

    def pop_weight_bytes(self) -> int:
        """Return the bytes of other ranks' weights that code has read since the last call."""
        taken, self._weight_bytes = self._weight_bytes, 0
        return taken

    def _request(self, held: HeldValue) -> None:
        """Ask, from within a unit, for a value of another rank; the others wait for the header."""
        assert self.running is not None
        request = ValueRequest(held.number, held.holder, tuple(held.meta.shape), held.meta.dtype)
        self.send_header(self.running, request)
        if isinstance(held, HeldOutput):
            self.broadcast(held)
            return
        assert isinstance(held, HeldState)
        # Not kept: the holder may write the tensor in place.
        held.value = self._group.broadcast_to_devices(held.meta, held.holder)
        self._fetched.append(held)

    def begin_unit(self, subject: tuple[str, int]) -> None:
        """From now on a value that code needs is requested: the other ranks do not run it."""
        self.running = subject

    def end_unit(self) -> None:
        """Forget the values that the unit has requested, and that its holder may change."""
        self.running = None
        while self._fetched:
            self._fetched.pop().value = None

    def send_header(
        self, subject: tuple[str, int], request: ValueRequest | None = None, result: bytes = b""
    ) -> None:
        header = Header(self._num_headers, subject, request, result)
        self._num_headers += 1
        self._group.broadcast_message(pickle.dumps(header), self._group.global_rank)

    def receive_result(self, subject: tuple[str, int], owner: int) -> bytes:
        """Wait for the result of a unit; answer the requests before it."""
        while True:
            header = Header(
                *pickle.loads(self._group.broadcast_message(b"", self._group.global_ranks[owner]))
            )
            if (header.serial, header.subject) != (self._num_headers, subject):
                other = " on other shapes" if header.subject[0] == subject[0] else ""
                raise RuntimeError(
                    f"this rank calls {subject[0]}{in_brackets(running_user_line())} where global "
                    f"rank {self._group.global_ranks[owner]} has run {header.subject[0]}{other}; "
                    f"{_CALL_THE_SAME}"
                )
            self._num_headers += 1
            if header.request is None:
                return header.result
            self._broadcast_requested(header.request)

    def _broadcast_requested(self, request: ValueRequest) -> None:
        output = self._outputs.get(request.number)
        if output is not None:
            self.broadcast(output)
            return
        tensor = self._states.get(request.number)
        if tensor is None:
            if request.holder == self._group.rank:
                raise RuntimeError(
                    "a block of another rank reads what a block of this rank had written into an "
                    "argument, and which no longer exists here"
                )
            tensor = torch.empty(request.shape, dtype=request.dtype, device="meta")
        self._group.broadcast_to_devices(tensor, request.holder)

    def broadcast_live_outputs(self) -> None:
        """Send the outputs that still exist on all ranks, at the end of a run, to all.

        Raises:
            RuntimeError: Another rank has not ended its run, so it may wait for this one's blocks.
        """
        outputs = [held for held in self._outputs.values() if held.number not in self._weights]
        alive = [held.number for held in outputs if not held.is_everywhere]
        try:
            have_some = self._group.agree_on_any(bool(alive), PATIENCE)
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"this rank has ended its step, and another one has not for "
                f"{PATIENCE.total_seconds():.0f} s; {_CALL_THE_SAME}"
            ) from error
        if have_some:
            of_ranks = self._group.gather(alive)
            for number in sorted(set(alive).intersection(*of_ranks)):
                self.broadcast(self._outputs[number])
