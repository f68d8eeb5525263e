"""Finds which dimensions of blocks' arguments and outputs are sequence dimensions.

The step has been traced on the whole sequences of a microbatch. It is traced again on half of each
sequence; dimensions whose size differs are sequence dimensions. Which arguments a block gets may
depend on values, such as whether a mask has padding, which may be at either end. So if the blocks
get other arguments for the first half, the second half is tried. They may also depend on the
length, as with an attention window. So sequences of one token less or more are tried last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime import BlockOutput
from lightning_pipeoffload.runtime.batch import batch_leaves, map_batch
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.sequence import Dims, SequenceDims

Shape = tuple[int, ...]


def find_dims(
    chain: BlockChain, whole: StepRecord, part: Any, trace: Callable[[Any], StepRecord]
) -> SequenceDims:
    """Return the sequence dimensions of each block's arguments and outputs.

    Args:
        chain: The blocks.
        whole: The traced record of a microbatch.
        part: The samples of the microbatch.
        trace: Traces the step on given samples, and returns the record.

    Raises:
        ValueError: The step fails on sequences of other lengths, no dimension changes with the
            length, or a tensor has an unsupported number of sequence dimensions.
    """
    other, error = None, None
    for changed in _of_other_lengths(part):
        try:
            other = trace(changed)
        except Exception as failed:  # with what the user's code cannot do on other sequences
            error = error or failed
            continue
        if _form(other) == _form(whole):
            error = None  # its frames hold the batch, and this one it
            return _compare(chain, whole, other)
    if error is not None and other is None:
        raise ValueError(
            f"num_sequence_slices finds the sequence by a run of the step on half of it, without "
            f"values, which fails ({type(error).__name__}: {error}); let the step take sequences "
            f"of any length, or use num_sequence_slices=1"
        ) from error
    raise ValueError(
        "num_sequence_slices finds no sequence: the step gives its blocks other arguments where "
        "the batch's second dimension is shorter or longer; use num_sequence_slices=1"
    )


def _of_other_lengths(part: Any) -> Iterator[Any]:
    lengths = [t.shape[1] for t in batch_leaves(part) if isinstance(t, Tensor) and t.dim() > 1]
    length = lengths[0] if lengths else 0
    size, places = -(-length // 2), [*range(length)]
    changes = places[:size], places[length // 2 :], places[:-1], places[1:], [*places, -1]
    for kept in (each for each in changes if len(each) not in (0, length)):
        for is_everywhere in (True, False):
            yield map_batch(partial(_select, length, kept, is_everywhere), part)


def _select(length: int, kept: list[int], is_everywhere: bool, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    for dim in range(1, leaf.dim() if is_everywhere else min(leaf.dim(), 2)):
        if leaf.shape[dim] == length:
            leaf = leaf[(slice(None),) * dim + (kept,)]
    return leaf


def _form(record: StepRecord) -> list[list[int | None]]:
    """Return the numbers of dimensions, which do not change with the length of the sequences."""
    calls = record.arguments.shapes
    return [[shape if shape is None else len(shape) for shape in call] for call in calls]


def _compare(chain: BlockChain, whole: StepRecord, other: StepRecord) -> SequenceDims:
    of_whole, of_other = ([*map(_shapes_of, each.outputs)] for each in (whole, other))
    outputs = [_dims_of(*shapes) for shapes in zip(of_whole, of_other, strict=True)]
    lengths = [_length_of(shapes, outputs) for shapes in (of_whole, of_other)]
    arguments = []
    for call, shapes in enumerate(zip(whole.arguments.shapes, other.arguments.shapes, strict=True)):
        arguments.append(_dims_of(*shapes))
        name = chain.block_name(call)
        _check(name, "gets", shapes[0], arguments[-1], lengths[0], range(3))
        _check(name, "returns", of_whole[call], outputs[call], lengths[0], (1,))
    # Of the blocks, and of the code between them.
    per_token = [
        sum(record.work.forward_flops[:-1]) / length
        for record, length in zip((whole, other), lengths, strict=True)
    ]
    quadratic = max((per_token[0] - per_token[1]) / (lengths[0] - lengths[1]), 0.0)
    return SequenceDims(arguments, outputs, per_token[0] - quadratic * lengths[0], quadratic)


def _shapes_of(output: BlockOutput) -> list[Shape]:
    return [spec.shape for spec in output.tensor_specs]


def _dims_of(whole: Sequence[Shape | None], other: Sequence[Shape | None]) -> list[Dims]:
    return [
        tuple(
            dim
            for dim, (a, b) in enumerate(zip(of_whole or (), of_other or (), strict=True))
            if a != b
        )
        for of_whole, of_other in zip(whole, other, strict=True)
    ]


def _length_of(shapes: Sequence[Sequence[Shape]], dims: Sequence[Sequence[Dims]]) -> int:
    for shape, of in zip(shapes[0], dims[0], strict=True):
        if of:
            return shape[of[0]]
    raise ValueError(
        "num_sequence_slices finds no sequence: what the first block returns is as large for half "
        "of the batch's second dimension; use num_sequence_slices=1"
    )


def _check(
    block: str,
    verb: str,
    shapes: Sequence[Shape | None],
    dims: Sequence[Dims],
    length: int,
    counts: Sequence[int],
) -> None:
    for shape, of in zip(shapes, dims, strict=True):
        sizes = [shape[dim] for dim in of] if shape else []
        if len(sizes) not in counts or any(size != length for size in sizes):
            raise ValueError(
                f"{block} {verb} a tensor of shape {list(shape or ())} where sequences have "
                f"{length} tokens, which num_sequence_slices cannot cut; use num_sequence_slices=1"
            )
