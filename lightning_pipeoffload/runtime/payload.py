"""What travels between two stages: the tensors that a block hands on, and their gradients."""

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

from lightning_pipeoffload.runtime.direct_function import DirectFunction

# Numbers and strings are none of them: they may come from the batch.
_CONSTANT = (type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it exists.

    Attributes:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        requires_grad: Whether autograd follows the tensor.
        gets_gradient: Whether the loss leads back to it, too.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    gets_gradient: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Describe ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad, tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def has_shape_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is as described, but for its gradient."""
        return self.shape == tensor.shape and self.dtype == tensor.dtype


@dataclass(frozen=True)
class BlockOutput:
    """What a block hands on: a pytree with specs for its tensors.

    Attributes:
        leaves: A TensorSpec for each tensor, plain values as they are.
        is_template: False where a leaf is neither a tensor nor the same for every batch; then the
            block has to run, shape-only, to have it.
    """

    treespec: TreeSpec
    leaves: tuple[Any, ...]
    is_template: bool

    @classmethod
    def of(cls, output: Any) -> BlockOutput:
        """Describe ``output``."""
        leaves, treespec = tree_flatten(output)
        described = tuple(_describe(leaf) for leaf in leaves)
        is_template = all(isinstance(leaf, (TensorSpec, *_CONSTANT)) for leaf in described)
        return cls(treespec, described, is_template)

    @cached_property
    def payload(self) -> list[TensorSpec]:
        """The tensors that travel to the next stage."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @cached_property
    def metas(self) -> list[Tensor]:
        """The shapes of the payload, as tensors on the meta device."""
        with torch.inference_mode(False):
            return [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in self.payload]

    def with_gradients(self, arrives: Sequence[bool]) -> BlockOutput:
        """Return the same, with whether a gradient of each tensor comes back."""
        flags = iter(arrives)
        leaves = tuple(
            replace(leaf, gets_gradient=next(flags)) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self.leaves
        )
        return replace(self, leaves=leaves)

    @cached_property
    def _is_tensor(self) -> bool:
        return self.treespec.is_leaf() and bool(self.payload)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Build the output from one tensor for each spec."""
        if self._is_tensor:
            return tensors[0]
        left = iter(tensors)
        leaves = [next(left) if isinstance(x, TensorSpec) else x for x in self.leaves]
        return tree_unflatten(leaves, self.treespec)


def _describe(leaf: Any) -> Any:
    return TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf


@dataclass
class Received:
    """What came from the previous stage, and the gradients that go back."""

    specs: list[TensorSpec]
    gradients: tuple[Tensor | None, ...] = ()


# Of all that enters: nothing comes to its gradient, but autograd wants something that asks for one.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


class _Enter(DirectFunction):
    """Brings what was received into the stage's graph and keeps its gradients.

    The tensors come in beside autograd, which so makes them fresh ones that may be written in
    place.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensors: list[Tensor], received: Received
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.received = received
        entered = tuple(tensor.detach() for tensor in tensors)
        pairs = zip(entered, received.specs, strict=True)
        ctx.mark_non_differentiable(*(t for t, spec in pairs if not spec.requires_grad))
        return entered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.received.gradients = gradients
        return None, None, None


def enter(tensors: list[Tensor], received: Received) -> tuple[Tensor, ...]:
    """Make what was received the start of this stage's graph; its gradients go to ``received``."""
    return _Enter.apply(_ANCHOR, tensors, received)


def gradients_to_send(received: Received, sender: str) -> list[Tensor]:
    """Return the gradients of what was received, of those tensors of which one is expected.

    Args:
        received: What came from the previous stage.
        sender: The name of that stage's last block.

    Raises:
        RuntimeError: Other tensors have one than the step's first run has shown.
    """
    gradients = received.gradients or (None,) * len(received.specs)
    arrived = [gradient is not None for gradient in gradients]
    if arrived != [spec.gets_gradient for spec in received.specs]:
        raise RuntimeError(
            f"the loss does not lead back to the same values behind {sender} as it did when the "
            f"step was first run on a batch of these shapes, which is all that the stages before "
            f"know: a detach(), or the use of a value, depends on chance, on the batch's values or "
            f"on the step's number, or the backward of a custom function returns None; multiply by "
            f"0 what is left out, detach() for what never gets a gradient, and freeze blocks by "
            f"requires_grad_(False)"
        )
    return [gradient for gradient in gradients if gradient is not None]
