"""Records the lines where a step copies a value from the device to the host, which has to wait.

Such a device read (``item()``, ``if mask.all():``) between the blocks is repeated by each stage of
a rank, since each stage runs the code before its own blocks. If the operand is computed only from
the batch and from constants, all stages read the same value. Then the value that the first stage
has read is returned to the later ones, without a wait (:mod:`..step.read_cache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.cut.observers import Observer, Operation, RunningTrace
from lightning_pipeoffload.runtime.cut.record_part import RecordPart
from lightning_pipeoffload.runtime.shapes import is_sized_by_values, written_arguments
from lightning_pipeoffload.runtime.users_code import format_source_line, running_frames

aten = torch.ops.aten

_TORCHS = Path(torch.__file__).parent
_OURS = Path(__file__).parents[2]
_COPIES = {aten._to_copy, aten.copy_}
_WITHOUT_VALUES = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
_READERS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.cpu,
}  # no operation shows them on the CPU


class ReadPlace(NamedTuple):
    """A line of the user's code that reads a value from the device, and its segment.

    ``segment`` is the number of calls of blocks before the read.
    """

    segment: int
    code: CodeType
    line: int


@dataclass
class DeviceReads(RecordPart):
    """The device reads of a step, as a part of its record.

    Attributes:
        lines: The lines that read, each with a description of where in the step it did so first.
        common: The lines between the blocks whose operands are computed only from the batch and
            from constants, so that each stage of a rank reads the same values there.
    """

    lines: dict[str, str] = field(default_factory=dict)
    common: frozenset[ReadPlace] = frozenset()


class ReadObserver(Observer[DeviceReads]):
    """Finds device reads; ``assumed`` fills with the blocks in which a made-up value is read."""

    def __init__(self, trace: RunningTrace, reads: DeviceReads, assumed: Iterable[int]) -> None:
        super().__init__(trace, reads)
        self._device_type, self._assumed = trace.device.type, assumed
        self._places: dict[ReadPlace, bool] = {}
        # By the id of the tensor, whether it is computed from the batch and constants alone.
        self._values: dict[int, tuple[bool, Tensor]] = {}
        self._numbers_are_common = True  # Python's, by now

    def start(self, batch: Sequence[Tensor]) -> None:
        self._values = {id(leaf): (True, leaf) for leaf in batch}

    def finish(self) -> None:
        # Reads after one of a made-up value in a block may depend on that value.
        blocks = self._trace.calls.blocks
        last_segment = min(map(blocks.index, self._assumed), default=len(blocks))
        places = (place for place, is_common in self._places.items() if is_common)
        self._part.common = frozenset(each for each in places if each.segment <= last_segment)
        self._values = {}

    def record_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _READERS:
            self._record_read(args[0])
            if self._is_between_blocks:
                self._numbers_are_common &= self._is_common(args[0])

    def record_below_autograd(self, operation: Operation) -> None:
        func, args, kwargs, result, _ = operation
        if not isinstance(func, torch._ops.OpOverload):
            return
        if func.overloadpacket in _COPIES:
            if result.device.type == "cpu" != self._device_type:
                self._record_read(args[1] if func is aten.copy_.default else args[0])
        elif _reads(func, args):
            self._record_read(args[0])
        if self._is_between_blocks:
            self._record_if_common(func, args, kwargs, result)

    @property
    def _is_between_blocks(self) -> bool:
        """Whether code between the blocks runs."""
        segment, is_in_block = self._trace.point
        return not is_in_block and segment < len(self._trace.chain)

    def _record_read(self, tensor: Any) -> None:
        """Record the line that reads a tensor, if that is on the device."""
        if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
            frame = _innermost_user_frame()
            line = format_source_line(frame.f_code.co_filename, frame.f_lineno)
            self._part.lines.setdefault(line, self._trace.chain.describe_point(*self._trace.point))

    def _record_if_common(
        self, func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record whether an operation between blocks depends only on the batch and constants."""
        is_common = self._makes_common(func, tensors_in((args, kwargs)))
        if _reads(func, args):
            self._numbers_are_common &= is_common
        if func is aten._local_scalar_dense.default:
            frame = _innermost_user_frame()
            place = ReadPlace(self._trace.num_calls, frame.f_code, frame.f_lineno)
            self._places[place] = is_common and self._places.get(place, True)
            return
        for written in written_arguments(func, args, kwargs):
            if not is_common and self._is_common(written):
                self._numbers_are_common = False  # its memory may be that of others
        self._values.update((id(tensor), (is_common, tensor)) for tensor in tensors_in(result))

    def _makes_common(self, func: torch._ops.OpOverload, inputs: list[Tensor]) -> bool:
        if not self._numbers_are_common:
            return False
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws or func.overloadpacket in _WITHOUT_VALUES:
            return False
        # What is lifted has been made of Python's numbers.
        return func is aten.lift_fresh.default or all(map(self._is_common, inputs))

    def _is_common(self, tensor: Any) -> bool:
        return self._values.get(id(tensor), (False,))[0]


def _reads(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    scalars = aten._local_scalar_dense.default, aten.equal.default
    return func in scalars or is_sized_by_values(func, args)


def _innermost_user_frame() -> FrameType:
    """Return the innermost frame of code that is neither torch's nor this package's."""
    frames = list(running_frames())
    return next((f for f in frames if not _is_passed(f.f_code.co_filename)), frames[0])


@cache
def _is_passed(filename: str) -> bool:
    return not {_TORCHS, _OURS}.isdisjoint(Path(filename).parents)
