"""Booleans that a step reads from its batch between the blocks, and how to compute them again.

A step may branch on them: Hugging Face drops a mask that is all ones, so batches of equal shapes
may run different operations. A trace of a model with 24 layers takes 150 ms, too long for each
microbatch. So the trace records the operations that compute each such boolean from the batch, and
only these are repeated for the next microbatch, to find whether a record fits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import map_operands, tensors_in
from lightning_pipeoffload.runtime.cut.record_part import BY_LENGTHS, RecordPart
from lightning_pipeoffload.runtime.shapes import has_shape_only, storage_key, written_arguments


@dataclass(frozen=True)  # no tuple, which would be mapped
class _Number:
    value: int


@dataclass
class _Call:
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]
    written: list[int]
    answer: bool | None  # the boolean that it returns


@dataclass(eq=False)
class BatchFlags(RecordPart):
    """The booleans that a step reads from its batch, as a part of its record.

    Attributes:
        calls: The operations that compute the booleans from the batch.
        constants: By number, copies of tensors that do not depend on the batch and that these
            operations write in place, from before the write.
    """

    calls: list[_Call] = field(default_factory=list, metadata=BY_LENGTHS)
    constants: dict[int, Tensor] = field(default_factory=dict, metadata=BY_LENGTHS)

    @property
    def flag_values(self) -> tuple[bool, ...]:
        """The values of the booleans in the trace, in order."""
        return tuple(call.answer for call in self.calls if call.answer is not None)

    @torch.no_grad()
    def matches_batch(self, leaves: Sequence[Tensor]) -> bool:
        """Recompute the booleans from a microbatch's tensors; return whether all are the same."""
        values = dict(enumerate(leaves)) | self.constants
        if any(call.written for call in self.calls):
            values = {number: value.clone() for number, value in values.items()}

        def fill(leaf: Any) -> Any:
            return values[leaf.value] if isinstance(leaf, _Number) else leaf

        for call in self.calls:
            result = call.func(*map_operands(fill, call.args), **map_operands(fill, call.kwargs))
            if call.answer is None:
                values.update(zip(call.results, tensors_in(result), strict=True))
            elif result is not call.answer:
                return False
        return True


class FlagWatch:
    """Finds such booleans in a trace, and the operations that compute them.

    Args:
        flags: The part of the trace's record.
    """

    def __init__(self, flags: BatchFlags) -> None:
        self._flags = flags
        self._alive: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # of tensors that depend on the batch, by their id

    def start(self, batch: Sequence[Tensor]) -> None:
        """Record the tensors of the microbatch."""
        for leaf in batch:
            self._tensor_number(leaf)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation, and record it if it depends on the batch."""
        inputs = tensors_in((args, kwargs))
        if not any(id(tensor) in self._numbers for tensor in inputs) or has_shape_only(
            (args, kwargs)
        ):
            return func(*args, **kwargs)
        written = tensors_in([*written_arguments(func, args, kwargs)])
        for tensor in written:
            if id(tensor) not in self._numbers:
                self._flags.constants[self._tensor_number(tensor)] = tensor.clone()
        operands = map_operands(self._describe, args), map_operands(self._describe, kwargs)
        result = func(*args, **kwargs)
        answer = result if isinstance(result, bool) else None
        if isinstance(result, bool) or (results := tensors_in(result)):
            numbers = [] if isinstance(result, bool) else [*map(self._tensor_number, results)]
            writes = [*map(self._tensor_number, written)]
            self._flags.calls.append(_Call(func, *operands, numbers, writes, answer))
        return result

    def _tensor_number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._alive.append(tensor)  # or another one may get its id
            self._numbers[id(tensor)] = len(self._alive) - 1
        return self._numbers[id(tensor)]

    def _describe(self, leaf: Any) -> Any:
        is_known = isinstance(leaf, Tensor) and id(leaf) in self._numbers
        return _Number(self._numbers[id(leaf)]) if is_known else leaf

    def finish(self) -> bool:
        """Drop the operations that no boolean depends on; release the tensors of the batch.

        Returns:
            Whether the booleans depend only on the batch, not on random numbers; if not, all of
            them are dropped.
        """
        flags = self._flags
        memory = [*map(storage_key, self._alive)] if any(c.written for c in flags.calls) else []
        self._numbers.clear()
        self._alive.clear()
        needed: set[int] = set()
        calls: list[_Call] = []
        for call in reversed(flags.calls):
            leads = call.answer is not None or not needed.isdisjoint(call.results)
            written = {memory[n] for n in call.written}  # a write reaches others by shared memory
            if leads or (written and any(memory[n] in written for n in needed)):
                calls.append(call)
                map_operands(lambda leaf: _add(leaf, needed), (call.args, call.kwargs))
        draws = torch.Tag.nondeterministic_seeded
        is_repeatable = not any(draws in getattr(c.func, "tags", ()) for c in calls)
        flags.calls = calls[::-1] if is_repeatable else []
        flags.constants = {n: v for n, v in flags.constants.items() if n in needed and flags.calls}
        return is_repeatable


def _add(leaf: Any, numbers: set[int]) -> None:
    if isinstance(leaf, _Number):
        numbers.add(leaf.value)
