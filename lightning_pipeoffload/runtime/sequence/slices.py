"""Slices of a microbatch along its sequences, and tensors kept for later slices.

The blocks run on one slice after the other; each attends to the keys and values of those before it.
The code after the blocks gets the outputs of all slices, joined. A tensor of an earlier slice is a
leaf of a later slice's graph; its gradient adds up until the B of the earlier slice::

    F of slice 0    keys, values  ->  leaves
    F of slice 1                      used   keys, values  ->  leaves
    F of slice 2                      used                     used
    B of slice 2                      .grad                    .grad
    B of slice 1                      .grad += ...             starts from its .grad
    B of slice 0                      starts from its .grad
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipeoffload.runtime import TensorSpec, dense_stride
from lightning_pipeoffload.runtime.memory import BytesForLaterSlices
from lightning_pipeoffload.runtime.shapes import storage_key, storage_of
from lightning_pipeoffload.schedule import LEAST_TOKENS, slice_ends

Dims = tuple[int, ...]
"""The dimensions of a tensor that are as long as the sequence: of tokens, then of keys if any."""


@dataclass(frozen=True)
class SequenceSlice:
    """One slice of a microbatch's sequences.

    Attributes:
        index: Its number.
        start: The index of its first token.
        stop: The index after its last token.
        length: The tokens of a whole sequence.
    """

    index: int
    start: int
    stop: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether it ends the sequence."""
        return self.stop == self.length

    def cut(self, tensor: Tensor, dims: Dims) -> Tensor:
        """Return a copy of the slice's part of a tensor; a view would keep the whole memory alive.

        The first of ``dims`` is cut to the tokens from ``start`` to ``stop``. The second one, the
        keys of an attention mask, is cut to the tokens from 0 to ``stop``.
        """
        for place, dim in enumerate(dims):
            start = 0 if place else self.start
            tensor = tensor.narrow(dim, start, self.stop - start)
        return tensor.clone()

    def cut_spec(self, spec: TensorSpec, dims: Dims) -> TensorSpec:
        """Return the spec of what :meth:`cut` returns for a tensor with this spec."""
        part = self.cut(spec.empty("meta"), dims)
        return replace(spec, shape=part.shape, stride=dense_stride(part))


@dataclass(frozen=True)
class SequenceDims:
    """The sequence dimensions of the arguments and outputs of blocks, by call.

    Attributes:
        arguments: For each leaf of a call's arguments its dimensions; () if it is not cut.
        outputs: The dimensions of each tensor of its output.
        linear: Operations of the blocks for each token.
        quadratic: Operations for each pair of tokens.
    """

    arguments: Sequence[Sequence[Dims]]
    outputs: Sequence[Sequence[Dims]]
    linear: float = 1.0
    quadratic: float = 0.0

    def most_slices(self, outputs: Sequence[TensorSpec]) -> int:
        """Return the most slices of sequences that are as long as in the first block's outputs."""
        return max(1, self._length(outputs) // LEAST_TOKENS)

    def _length(self, outputs: Sequence[TensorSpec]) -> int:
        (dim, *_) = self.outputs[0][0]
        return outputs[0].shape[dim]

    def slices(self, outputs: Sequence[TensorSpec], num_slices: int) -> list[SequenceSlice]:
        """Cut sequences, as long as in the first block's ``outputs``, into slices of equal work.

        Raises:
            ValueError: They would have less than two tokens.
        """
        length = self._length(outputs)
        work = self.linear * length, self.quadratic * length**2
        ends = (0, *slice_ends(length, num_slices, *work))
        return [SequenceSlice(i, ends[i], ends[i + 1], length) for i in range(num_slices)]


class SharedValue(NamedTuple):
    """A value of a slice that later slices use."""

    edge: GradientEdge
    leaf: Tensor  # what they use


class EarlierSlices:
    """The tensors that slices of a microbatch on one stage keep for later slices.

    Attributes:
        masks: For each mask and slice the block that gets it, and a function that returns whether
            the mask lets the slice attend to later slices.
        outputs: The outputs of the last block, of each slice.
        keys_and_values: Each slice's keys and values, by the block's call and attention's index.
    """

    def __init__(self) -> None:
        self.outputs: list[list[Tensor]] = []
        self.masks: list[tuple[str, Callable[[], Tensor]]] = []
        self.keys_and_values: defaultdict[tuple[int, int], list[tuple[Tensor, Tensor]]]
        self.keys_and_values = defaultdict(list)
        self._shared: defaultdict[int, list[SharedValue]] = defaultdict(list)

    def make_shared_leaf(self, part: SequenceSlice, tensor: Tensor) -> Tensor:
        """Return a leaf with the value of a slice's tensor, for the graphs of later slices."""
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaf.requires_grad_()
            self._shared[part.index].append(SharedValue(get_gradient_edge(tensor), leaf))
        return leaf

    def drop(self) -> None:
        """Drop all tensors, where no B follows.

        Otherwise they would not be freed: their graphs and this object refer to each other.
        """
        self.outputs.clear()
        self.masks.clear()
        self.keys_and_values.clear()
        self._shared.clear()

    def bytes_kept_by_slice(self, part: SequenceSlice) -> BytesForLaterSlices:
        """Return the size of the tensors that a slice keeps for later slices, after its F."""
        pairs = self.keys_and_values.values()
        kept = [tensor for pair in pairs for tensor in pair[part.index]]
        kept += self.outputs[part.index] if part.index < len(self.outputs) else []
        storages = {storage_key(tensor): storage_of(tensor).nbytes() for tensor in kept}
        gradients = (t.numel() * t.element_size() for t in kept if t.requires_grad)
        num_tokens = part.stop - part.start
        return BytesForLaterSlices(sum(storages.values()), sum(gradients), num_tokens)

    def pop_edges_and_gradients(
        self, part: SequenceSlice
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the further edges at which a slice's B begins, and their gradients."""
        self._finish_mask_checks()
        del self.outputs[part.index :]
        for of_attention in self.keys_and_values.values():
            del of_attention[part.index :]
        edges, gradients = [], []
        for edge, leaf in self._shared.pop(part.index, ()):
            if leaf.grad is not None:
                edges.append(edge)
                gradients.append(leaf.grad)
        return edges, gradients

    def _finish_mask_checks(self) -> None:
        for name, is_open in self.masks:
            if is_open():
                raise ValueError(
                    f"the mask that {name} gets in this batch lets tokens attend to later ones, "
                    f"which slices of sequences do not; use a causal mask, or num_sequence_slices=1"
                )
        self.masks.clear()
