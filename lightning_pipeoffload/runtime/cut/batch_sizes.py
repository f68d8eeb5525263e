"""Sizes between the blocks that depend on the values of a step's batch.

Microbatches of equal shapes may differ in them, as in the number of tokens that a mask selects. So
where a step has such sizes, the beginning of the step, up to the block after the last of them, runs
again without values for each microbatch, to find the record that fits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.batch import shape_signature
from lightning_pipeoffload.runtime.cut.batch_flags import BatchFlags, FlagWatch
from lightning_pipeoffload.runtime.cut.block_chain import StageExit
from lightning_pipeoffload.runtime.cut.observers import Observer, RunningTrace
from lightning_pipeoffload.runtime.cut.record_part import RecordPart
from lightning_pipeoffload.runtime.shapes import is_sized_by_values, lengths_argument_index

aten = torch.ops.aten


@dataclass
class DataDependentSizes(RecordPart):
    """The sizes that depend on the batch's values, as a part of a step's record.

    Attributes:
        until: The first call of a block after the last such size; None: there are none.
        values: These sizes, and the shapes of that call's arguments.
    """

    until: int | None = None
    values: tuple[Any, ...] = ()


class SizeObserver(Observer[DataDependentSizes]):
    """Finds such sizes, and booleans, which count as sizes where they are drawn.

    Args:
        trace: The running trace.
        sizes: The part of the record.
        flags: The part with booleans.
        until: The call at which to leave the step, if the sizes before it are wanted; else None.
    """

    def __init__(
        self, trace: RunningTrace, sizes: DataDependentSizes, flags: BatchFlags, until: int | None
    ) -> None:
        super().__init__(trace, sizes)
        self._until = until
        self._flags = FlagWatch(flags)
        self._sizes: list[Any] = []  # shapes and booleans
        self._last_size: int | None = None  # the number of calls before it
        self._last_flag: int | None = None
        self._before_block: list[tuple[int, Any]] = []

    def start(self, batch: Sequence[Tensor]) -> None:
        self._flags.start(batch)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation between the blocks, and note what depends on values."""
        result = self._flags.call(func, args, kwargs)
        if is_sized_by_values(func, args) or lengths_argument_index(func) is not None:
            self._sizes.append(tuple(tensor.shape for tensor in tensors_in(result)))
            self._last_size = self._trace.num_calls
        elif func is aten._local_scalar_dense.default and not (
            args[0].is_floating_point() or args[0].is_complex()
        ):
            # A number may be a length, which the shapes show.
            self._sizes.append(result if isinstance(result, bool) else None)
            if isinstance(result, bool):
                self._last_flag = self._trace.num_calls
            else:
                self._last_size = self._trace.num_calls
        return result

    def before_block(self, index: int, arguments: Any) -> None:
        call = self._trace.num_calls
        is_wanted = call in (self._until, self._last_size, self._last_flag)
        shapes = shape_signature(arguments) if is_wanted else None
        self._before_block.append((len(self._sizes), shapes))
        if call == self._until:
            raise StageExit([])

    def before(self, call: int) -> tuple[Any, ...]:
        """Return the sizes before a call of a block, and the shapes of its arguments."""
        if call >= len(self._before_block):
            return *self._sizes, None
        count, arguments = self._before_block[call]
        return *self._sizes[:count], arguments

    def finish(self) -> None:
        last = [self._last_size] if self._flags.finish() else [self._last_size, self._last_flag]
        until = max((call for call in last if call is not None), default=None)
        if until is not None:
            self._part.until, self._part.values = until, self.before(until)
