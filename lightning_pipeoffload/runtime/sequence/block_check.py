"""The check that a block computes on slices of a sequence what it computes on the whole.

A block that looks along the sequence by other means than causal attention (a scan, a convolution,
positions of its own) would train on other numbers without an error. So each block runs once on a
whole sequence and on its slices, on random values, in float32 and without dropout. There right
blocks differ by rounding, and wrong ones by a thousand times that; in bfloat16 rounding is as
large. Parameters that begin at zero are random too: behind a gate of zero all blocks are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten  # private: see runtime/leaves

from lightning_pipeoffload.runtime.leaves import output_tensors
from lightning_pipeoffload.runtime.randomness import seeded
from lightning_pipeoffload.runtime.sequence.attention import BlockOnSlice
from lightning_pipeoffload.runtime.sequence.slices import Dims, EarlierSlices, SequenceSlice
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.snapshot import private_copy

_MOST = 1e-4  # of the largest number


class BlockCheck:
    """Runs one block on a whole sequence and on slices of it.

    Args:
        name: The name of the block.
        block: The block.
        call: Its call, where calls of the block itself are intercepted.
        arguments: What it gets of a whole sequence; what other blocks compute has no values.
        dims: Where the sequence is in them.
        output_dims: Where it is in what the block returns.
        slices: The slices.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        call: Callable[..., Any],
        arguments: Any,
        dims: Sequence[Dims],
        output_dims: Sequence[Dims],
        slices: Sequence[SequenceSlice],
    ) -> None:
        self._name, self._slices = name, slices
        self._block = _Called(block, call)
        self._dims, self._output_dims = dims, output_dims
        self._leaves, self._form = tree_flatten(arguments)

    def check(self) -> None:
        """Compare both.

        Raises:
            ValueError: They differ, or the block fails on a slice.
        """
        device = next((leaf.device for leaf in self._leaves if isinstance(leaf, Tensor)), "cpu")
        with seeded(0), self._in_float32(torch.device(device)):
            leaves, weights = [_with_values(leaf) for leaf in self._leaves], self._weights()
            whole = self._run(weights, leaves)
            try:
                parts = self._parts(EarlierSlices())
                found = [self._run(weights, leaves, part) for part in parts]
            except Exception as error:
                raise ValueError(
                    f"{self._name} fails on a slice of its sequence ({type(error).__name__}: "
                    f"{error}); use num_sequence_slices=1"
                ) from error
            self._compare(whole, found)

    def _parts(self, earlier: EarlierSlices) -> Iterator[BlockOnSlice]:
        return (BlockOnSlice(self._name, 0, part, earlier) for part in self._slices)

    def _run(
        self,
        weights: dict[str, Tensor],
        leaves: Sequence[Any],
        on_slice: BlockOnSlice | None = None,
    ) -> list[Tensor]:
        block = self._block
        if on_slice is not None:
            cut = zip(leaves, self._dims, strict=True)
            leaves = [on_slice.part.cut(leaf, dims) if dims else leaf for leaf, dims in cut]
        args, kwargs = tree_unflatten([private_copy(leaf) for leaf in leaves], self._form)

        def run() -> Any:
            return functional_call(block, weights, args, kwargs)

        output = run() if on_slice is None else on_slice.run(run)
        return [tensor.detach() for tensor in output_tensors(output)]

    def _weights(self) -> dict[str, Tensor]:
        # Not detached: torch's own transformer layers call no attention where nothing trains.
        weights = {name: _not_zero(value) for name, value in self._block.named_parameters()}
        named = weights | dict(self._block.named_buffers())
        return {name: _as_float32(tensor) for name, tensor in named.items()}

    def _compare(self, whole: Sequence[Tensor], slices: Sequence[Sequence[Tensor]]) -> None:
        for index, expected in enumerate(whole):
            found = torch.cat([part[index] for part in slices], self._output_dims[index][0])
            if found.shape != expected.shape or not expected.is_floating_point():
                continue
            error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
            if not error <= _MOST:
                raise ValueError(
                    f"{self._name} computes something else on slices of a sequence than on the "
                    f"whole ({float(error):.1e} of the largest number): num_sequence_slices is for "
                    f"blocks that look along the sequence by scaled_dot_product_attention alone, "
                    f"with is_causal=True or a causal mask (attn_implementation='sdpa' of "
                    f"transformers); use num_sequence_slices=1"
                )

    @contextmanager
    def _in_float32(self, device: torch.device) -> Iterator[None]:
        """Run the block without dropout and autocast; autograd saves nothing for the F around."""
        modes = [(module, module.training) for module in self._block.modules()]
        dtype = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(Tensor.detach, _same))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
            for module, _ in modes:
                module.training = False
            try:
                yield
            finally:
                for module, training in modes:
                    module.training = training


class _Called(nn.Module):
    """A block, whose call is given."""

    def __init__(self, block: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self._call = block, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _with_values(leaf: Any) -> Any:
    if isinstance(leaf, ShapeOnly):
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        return torch.randn(leaf.shape, dtype=dtype, device=leaf.device)
    return _as_float32(leaf.detach()) if isinstance(leaf, Tensor) else leaf


def _not_zero(weight: Tensor) -> Tensor:
    if not weight.is_floating_point() or weight.detach().any():
        return weight
    values = torch.randn_like(weight)
    if weight.dim() > 1:
        values /= weight.shape[-1] ** 0.5  # as large as what a linear layer begins with
    return values.requires_grad_(weight.requires_grad)


def _as_float32(tensor: Tensor) -> Tensor:
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
    return tensor.float() if is_narrow else tensor


def _same(value: Any) -> Any:
    return value
