"""What a step does with the number of samples of a microbatch, which the user may not mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.cut.loss_terms import Terms, record_terms, terms_of
from lightning_pipeoffload.runtime.cut.observers import Observer, Operation, RunningTrace
from lightning_pipeoffload.runtime.cut.record_part import OF_TRACE, RecordPart
from lightning_pipeoffload.runtime.cut.writes import Writes
from lightning_pipeoffload.runtime.shapes import shape_only_leaves
from lightning_pipeoffload.runtime.users_code import running_user_line

aten = torch.ops.aten
_CLASS_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_MEAN = 1  # of at::Reduction
_SHUFFLES = {aten.randperm.default, aten.randperm.generator}


@dataclass
class SampleUses(RecordPart):
    """Uses of the number of samples, as a part of a step's record.

    In a trace with other samples, the numbers of all but ``class_weights`` are others.

    Attributes:
        class_weights: The line that computes a loss as a mean with class weights; "": none does.
        pairs: Sizes that occur twice in the shape of a result after the blocks, with the line. If
            one is the number of samples, a contrastive loss may compare each sample with all others
            there.
        reordered: Numbers of rows that the step flips, rolls or draws in another order, with the
            line. If one is the number of samples, the step mixes each with another of its batch.
        rows_kept: Of tensors that attributes hold which the step has written: the number of rows,
            the attribute, and the line.
        loss_terms: How the loss follows the number of samples, by line; see :mod:`.loss_terms`.
    """

    class_weights: str = ""
    pairs: set[tuple[int, str]] = field(default_factory=set, metadata=OF_TRACE)
    reordered: set[tuple[int, str]] = field(default_factory=set, metadata=OF_TRACE)
    rows_kept: set[tuple[int, str, str]] = field(default_factory=set, metadata=OF_TRACE)
    loss_terms: Terms = field(default_factory=dict, metadata=OF_TRACE)

    def lines_with_pairs(self, size: int) -> set[str]:
        """Return the lines after the blocks that make a tensor of two dimensions of a size."""
        return {line for count, line in self.pairs if count == size}

    def lines_that_reorder(self, size: int) -> set[str]:
        """Return the lines that put so many rows in another order."""
        return {line for count, line in self.reordered if count == size}

    def kept_rows(self, size: int) -> set[tuple[str, str]]:
        """Return the attributes that keep tensors of so many rows, with the lines."""
        return {(label, line) for rows, label, line in self.rows_kept if rows == size}


class SampleObserver(Observer[SampleUses]):
    """Finds uses of the number of samples; ``writes`` is complete before this finishes."""

    def __init__(self, trace: RunningTrace, uses: SampleUses, writes: Writes) -> None:
        super().__init__(trace, uses)
        self._writes = writes
        self._has_chunks = False

    def record_operation(self, operation: Operation) -> None:
        func, args, _, result, segment = operation
        if func in _CLASS_LOSSES and args[2] is not None and args[3] == _MEAN:
            self._part.class_weights = running_user_line()
        # A search for blocks has none.
        if self._trace.point.is_in_block or not segment == len(self._trace.chain) > 0:
            return
        for shape in (leaf.shape for leaf in shape_only_leaves(result)):
            for size in {size for size in shape if shape.count(size) > 1}:
                self._part.pairs.add((size, running_user_line()))
        record_terms(func, args, result)

    def record_below_autograd(self, operation: Operation) -> None:
        rows = _reordered_rows(operation.func, operation.args)
        if rows is not None:
            self._part.reordered.add((rows, running_user_line()))

    def record_weights_of_chunks(self) -> None:
        """Record that a loss in chunks is a mean with class weights."""
        self._part.class_weights = running_user_line()
        self._has_chunks = True

    def record_loss(self, loss: Tensor) -> None:
        # The divisor of a loss in chunks is recorded already.
        if not self._has_chunks:
            self._part.loss_terms = terms_of(loss)

    def finish(self) -> None:
        for write in self._writes.attributes:
            with_rows = [t for t in tensors_in(write.variable.value) if write.is_users and t.dim()]
            for tensor in with_rows:
                self._part.rows_kept.add((len(tensor), write.variable.label, write.line))


def _reordered_rows(func: Any, args: tuple[Any, ...]) -> int | None:
    """Return how many rows an operation puts in another order; None: it does not."""
    if func in _SHUFFLES:
        return int(args[0])
    if func is aten.flip.default:
        tensor, dims = args
    elif func is aten.roll.default:
        tensor, dims = args[0], args[2] if len(args) > 2 else (0,)  # all values as one row
    else:
        return None
    return len(tensor) if tensor.dim() and {0, -tensor.dim()} & {*dims} else None
