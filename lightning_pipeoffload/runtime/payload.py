"""What describes a message between two stages: specs of blocks' outputs, and their gradients.

Carried values follow the outputs: :meth:`.record.StepRecord.message_specs_before`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (  # private: see runtime/leaves
    TreeSpec,
    tree_flatten,
    tree_unflatten,
)

from lightning_pipeoffload.runtime.leaves import (
    dataclasses_to_nodes,
    has_dataclasses,
    nodes_to_dataclasses,
)

# Without numbers and strings, which may come from the batch.
_CONSTANT = (type(None), torch.dtype, torch.device)


def dense_stride(tensor: Tensor) -> tuple[int, ...] | None:
    """Return strides without gaps in the order of a tensor's own; None if it is contiguous.

    A dense tensor keeps its strides; one that is expanded or sliced gets those of a clone.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    dense = torch.empty_like(meta)
    return None if dense.is_contiguous() else dense.stride()


@dataclass(frozen=True)
class TensorSpec:
    """Description of a tensor before it exists.

    Attributes:
        gets_gradient: Whether the loss depends on it.
        stride: The strides in which it and its gradient are sent; None: they are contiguous.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    gets_gradient: bool = False
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        trains = tensor.requires_grad
        return cls(tensor.shape, tensor.dtype, trains, trains, dense_stride(tensor))

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def match_stride(self, tensor: Tensor) -> Tensor:
        """Return a tensor of this shape with the strides that the receiver expects."""
        if self.stride is None:
            return tensor.contiguous()
        if tensor.stride() == self.stride:
            return tensor
        return self.empty(tensor.device).copy_(tensor)

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class BlockOutput:
    """A block's output: a pytree with a TensorSpec for each tensor, and plain values as they are.

    Attributes:
        is_template: False where a leaf is neither a tensor nor the same for every batch; then other
            ranks have to run the block, shape-only, to have that leaf.
        is_closed: Whether dataclasses are opened in ``treespec``, which :meth:`fill` closes.
    """

    treespec: TreeSpec
    leaves: tuple[Any, ...]
    is_template: bool
    is_closed: bool = False

    @classmethod
    def of(cls, output: Any) -> BlockOutput:
        is_closed = has_dataclasses(output)
        leaves, treespec = tree_flatten(dataclasses_to_nodes(output) if is_closed else output)
        described = tuple(_describe(leaf) for leaf in leaves)
        is_template = all(isinstance(leaf, (TensorSpec, *_CONSTANT)) for leaf in described)
        return cls(treespec, described, is_template, is_closed)

    @cached_property
    def tensor_specs(self) -> list[TensorSpec]:
        """The specs of the output's tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @cached_property
    def meta_tensors(self) -> list[Tensor]:
        """Its tensors on the meta device."""
        with torch.inference_mode(False):
            return [spec.empty("meta") for spec in self.tensor_specs]

    def with_gradient_flags(self, arrives: Sequence[bool]) -> BlockOutput:
        """Return a copy with ``gets_gradient`` of each tensor."""
        flags = iter(arrives)
        leaves = tuple(
            replace(leaf, gets_gradient=next(flags)) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self.leaves
        )
        return replace(self, leaves=leaves)

    @cached_property
    def _is_tensor(self) -> bool:
        return self.treespec.is_leaf() and bool(self.tensor_specs)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the output with one tensor in place of each spec."""
        if self._is_tensor:
            return tensors[0]
        left = iter(tensors)
        leaves = [next(left) if isinstance(x, TensorSpec) else x for x in self.leaves]
        filled = tree_unflatten(leaves, self.treespec)
        return nodes_to_dataclasses(filled) if self.is_closed else filled


def _describe(leaf: Any) -> Any:
    return TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf


class ReceivedGradients:
    """The gradients of the tensors from the previous stage, which B sends back.

    The stage's graph holds it, so it has the specs of the tensors, which themselves lead to that
    graph.
    """

    __slots__ = ("gradients", "specs")

    def __init__(self, specs: list[TensorSpec]) -> None:
        self.specs = specs
        self.gradients: tuple[Tensor | None, ...] = ()


# Input of every _StartGraph: autograd needs one that requires a gradient, though it never gets one.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


class _StartGraph(torch.autograd.Function):
    """Makes received tensors outputs of a node, which stores their gradients.

    They are not its inputs, so that autograd takes them for new ones, which may be written in
    place.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensors: list[Tensor], received: ReceivedGradients
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.received = received
        entered, plain = [], []
        for tensor, spec in zip(tensors, received.specs, strict=True):
            entered.append(tensor.detach())
            if not spec.requires_grad:
                plain.append(entered[-1])
        if plain:
            ctx.mark_non_differentiable(*plain)
        return tuple(entered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.received.gradients = gradients
        return None, None, None


def start_stage_graph(tensors: list[Tensor], received: ReceivedGradients) -> tuple[Tensor, ...]:
    """Start this stage's graph with received tensors; ``received`` gets their gradients."""
    return _StartGraph.apply(_ANCHOR, tensors, received)


def gradients_to_send(received: ReceivedGradients, sender: str) -> list[Tensor]:
    """Return the gradients of the received tensors that have one.

    ``sender`` is the name of the previous stage's last block, for the error where other tensors
    have a gradient than in the step's first run.
    """
    to_send = []
    gradients = received.gradients or (None,) * len(received.specs)
    for gradient, spec in zip(gradients, received.specs, strict=True):
        if (gradient is not None) != spec.gets_gradient:
            raise RuntimeError(
                f"the loss does not lead back to the same values after {sender} as it did when "
                f"the step was first run on a batch of these shapes, which is all that the stages "
                f"before know: a detach(), or the use of a value, depends on chance, on the "
                f"batch's values or on the step's number, or the backward of a custom function "
                f"returns None; multiply by 0 what is left out, detach() for what never gets a "
                f"gradient, and freeze blocks by requires_grad_(False)"
            )
        if gradient is not None:
            to_send.append(spec.match_stride(gradient))
    return to_send
