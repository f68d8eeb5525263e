"""Finds the sequence in what blocks get and return: the dimensions that change with its length.

The step is traced on the microbatch, and on one half of its sequences. A mask depends on values,
such as whether there is padding, which may be at either end: so if the first half gets other
arguments than the whole, the second one is tried. It may also depend on the length, as that of a
window does: so last are sequences of one token less, and of one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime.batch_tree import batch_leaves, map_batch
from lightning_pipeoffload.runtime.cut.trace import StepTrace
from lightning_pipeoffload.runtime.leaves import leaves_of, output_tensors
from lightning_pipeoffload.runtime.sequence.slices import Dims, SequenceDims

Shape = tuple[int, ...]


class BlockShapes(StepTrace):
    """A trace that lists the shapes of what blocks get and return, by call.

    Attributes:
        arguments_of: The shapes of the leaves of a call's arguments; None of what is no tensor.
        outputs_of: Those of the tensors of its output.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arguments_of: list[list[Shape | None]] = []
        self.outputs_of: list[list[Shape]] = []

    @override
    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = leaves_of((args, kwargs))
        self.arguments_of.append([_shape_of(leaf) for leaf in leaves])
        output = super().call_block(index, args, kwargs)
        self.outputs_of.append([tensor.shape for tensor in output_tensors(output)])
        return output

    @property
    def forward_flops(self) -> int:
        """Operations of the blocks, and of the code between them."""
        return sum(self.record.forward_flops[:-1])

    @property
    def form(self) -> Any:
        """What does not change with the length of the sequences."""
        return [[shape and len(shape) for shape in shapes] for shapes in self.arguments_of]


def _shape_of(leaf: Any) -> Shape | None:
    return leaf.shape if isinstance(leaf, Tensor) else None


def find_dims(part: Any, trace: Callable[[Any], BlockShapes]) -> SequenceDims:
    """Find the sequence in the arguments and outputs of blocks.

    Args:
        part: A microbatch.
        trace: Traces the step on it, or on half of it.

    Raises:
        ValueError: There is no sequence, or it is not found everywhere.
    """
    whole = trace(part)
    other, error = None, None
    for changed in _of_other_lengths(part):
        try:
            other = trace(changed)
        except Exception as failed:  # with what the user's code cannot do on other sequences
            error = error or failed
            continue
        if other.form == whole.form:
            return _compare(whole, other)
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
    for kept in (places[:size], places[length // 2 :], places[:-1], places[1:], [*places, -1]):
        for is_everywhere in (True, False):
            yield map_batch(partial(_select, length, kept, is_everywhere), part)


def _select(length: int, kept: list[int], is_everywhere: bool, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    for dim in range(1, leaf.dim() if is_everywhere else min(leaf.dim(), 2)):
        if leaf.shape[dim] == length:
            leaf = leaf[(slice(None),) * dim + (kept,)]
    return leaf


def _compare(whole: BlockShapes, other: BlockShapes) -> SequenceDims:
    outputs = [_dims_of(*shapes) for shapes in zip(whole.outputs_of, other.outputs_of, strict=True)]
    lengths = [_length_of(each.outputs_of, outputs) for each in (whole, other)]
    arguments = []
    for call, shapes in enumerate(zip(whole.arguments_of, other.arguments_of, strict=True)):
        arguments.append(_dims_of(*shapes))
        name = whole.chain.block_name(call)
        _check(name, "gets", whole.arguments_of[call], arguments[-1], lengths[0], range(3))
        _check(name, "returns", whole.outputs_of[call], outputs[call], lengths[0], (1,))
    per_token = [each.forward_flops / of for each, of in zip((whole, other), lengths, strict=True)]
    quadratic = max((per_token[0] - per_token[1]) / (lengths[0] - lengths[1]), 0.0)
    return SequenceDims(arguments, outputs, per_token[0] - quadratic * lengths[0], quadratic)


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
