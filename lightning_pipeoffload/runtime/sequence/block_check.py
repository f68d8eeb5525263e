"""The check that a block computes the same on slices of a sequence as on the whole.

A block that mixes tokens by other means than causal attention (a scan, a convolution, position
indices that it computes itself) would compute wrong numbers on slices, without an error. So each
block runs on a whole sequence and on its slices, in float32, and outputs and gradients are
compared. Correct blocks differ by rounding, wrong ones by a thousand times that; in bfloat16 the
rounding error would be as large as the difference.

The comparison runs twice, on made-up values, since real ones may hide a difference:

1. Parameters, and buffers whose elements are all equal, are perturbed by a tenth. Otherwise a gate
   of zero, a mixing weight of one or a convolution initialized as the identity hides its operand.
2. Tokens are large and nearly equal, integer inputs random, so that experts overflow their
   capacity, and equal lengths become different ones. The gradient of the output is zero, so that
   only gradients of a loss inside the block, such as a router's, remain.

Blocks run in training mode. A random operation fills its result with one number, and dropout keeps
all elements, so that both runs draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode  # private: torch's own modes use it
from torch.utils._pytree import tree_flatten, tree_unflatten  # private: see runtime/leaves
from typing_extensions import override

from lightning_pipeoffload.runtime import output_tensors, seed_all, seed_torch, seeded
from lightning_pipeoffload.runtime.sequence.attention import BlockOnSlice
from lightning_pipeoffload.runtime.sequence.slices import Dims, EarlierSlices, SequenceSlice
from lightning_pipeoffload.runtime.shapes import DRAWS_BY_SHAPE, FACTORIES, ShapeOnly
from lightning_pipeoffload.runtime.users_code import private_copy
from lightning_pipeoffload.runtime.weight_grad import NO_HOOKS

aten = torch.ops.aten
_MOST = 1e-4  # of the largest number
_VARIATION = 0.1
_LARGE = 10.0  # times what a norm returns


class SlicedBlockCheck:
    """Runs one block on a whole sequence and on slices of it.

    Args:
        name: The name of the block.
        block: The block.
        call: Calls the block without interception.
        arguments: Its arguments for a whole sequence, in which outputs of other blocks are
            shape-only.
        dims: The sequence dimensions of the arguments.
        output_dims: The sequence dimensions of the block's outputs.
        slices: The slices.
        since: The end of a refusal.
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
        since: str = "",
    ) -> None:
        self._name, self._slices, self._since = name, slices, since
        self._block, self._call = _BlockRunner(block), call
        self._dims, self._output_dims = dims, output_dims
        self._leaves, self._form = tree_flatten(arguments)

    def check(self) -> None:
        """Compare outputs and gradients of the whole sequence and of its slices.

        Raises:
            ValueError: They differ by more than rounding, or the block fails on a slice.
        """
        device = next((leaf.device for leaf in self._leaves if isinstance(leaf, Tensor)), "cpu")
        with seeded(0), _in_float32(torch.device(device)):
            weights = self._perturbed_weights()
            self._compare(weights, [*map(_varied_input, self._leaves, self._dims)], 1.0)
            self._compare(weights, [*map(_extreme_input, self._leaves, self._dims)], 0.0)

    def _perturbed_weights(self) -> dict[str, Tensor]:
        # They train as before: torch's own transformer layers call no attention where none does.
        weights = {
            name: _perturbed(weight).requires_grad_(weight.requires_grad)
            for name, weight in self._block.named_parameters()
        }
        buffers = {
            name: _perturbed(buffer).abs() if _is_constant(buffer) else _as_float32(buffer).clone()
            for name, buffer in self._block.named_buffers()
        }
        return weights | buffers

    def _compare(self, weights: dict[str, Tensor], leaves: Sequence[Any], gradient: float) -> None:
        length = self._slices[0].length
        run = partial(self._run, weights, leaves, gradient)
        try:
            whole = run([SequenceSlice(0, 0, length, length)])
        except IndexError:
            if gradient:
                raise
            return  # the block takes no whole numbers that are made up
        try:
            results_of_slices = run(self._slices)
        except Exception as error:
            raise ValueError(
                f"{self._name} fails on a slice of its sequence ({type(error).__name__}: "
                f"{error}); use num_sequence_slices=1"
            ) from error
        for expected, of_slices in zip(whole, results_of_slices, strict=True):
            self._compare_tensors(expected, of_slices)

    def _run(
        self,
        weights: dict[str, Tensor],
        leaves: Sequence[Any],
        gradient: float,
        slices: Sequence[SequenceSlice],
    ) -> list[Tensor]:
        """Return the outputs, and gradients of arguments that are cut along the sequence."""
        # The backward is inside too: it may run parts of the block again.
        run = partial(self._run_slices, leaves, gradient, slices)
        results: list[Tensor] = functional_call(self._block, weights, (run,))
        return results

    def _run_slices(
        self, leaves: Sequence[Any], gradient: float, slices: Sequence[SequenceSlice]
    ) -> list[Tensor]:
        earlier = _SlicesInOneGraph()
        results = [self._run_slice(leaves, part, earlier) for part in slices]
        dims = [dim for (dim, *_) in self._output_dims]
        outputs = [torch.cat(parts, dim) for *parts, dim in zip(*results, dims, strict=True)]
        outputs = [output for output in outputs if output.is_floating_point()]
        ends = [output for output in outputs if output.requires_grad]
        cut = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        seed_all(0)
        grads = [torch.randn_like(output) * gradient for output in ends]
        gradients = torch.autograd.grad(ends, cut, grads, allow_unused=True) if ends and cut else ()
        zero = torch.zeros(1)
        return [output.detach() for output in outputs] + [
            zero if gradient is None else gradient for gradient in gradients
        ]

    def _run_slice(
        self, leaves: Sequence[Any], part: SequenceSlice, earlier: EarlierSlices
    ) -> list[Tensor]:
        parts = [
            part.cut(leaf, dims) if isinstance(leaf, Tensor) else private_copy(leaf)
            for leaf, dims in zip(leaves, self._dims, strict=True)
        ]
        args, kwargs = tree_unflatten(parts, self._form)
        seed_all(0)
        on_slice = BlockOnSlice(self._name, 0, part, earlier, has_dropout=False)
        with _ConstantDraws():
            return output_tensors(on_slice.run(self._call, *args, **kwargs))

    def _compare_tensors(self, expected: Tensor, sliced: Tensor) -> None:
        if sliced.shape == expected.shape:
            error = float((sliced - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        else:
            error = inf
        if not error <= _MOST:
            raise ValueError(
                f"{self._name} computes something else on slices of a sequence than on the "
                f"whole ({error:.1e} of the largest number): num_sequence_slices is for "
                f"blocks that look along the sequence by scaled_dot_product_attention alone, "
                f"with is_causal=True or a causal mask (attn_implementation='sdpa' of "
                f"transformers); use num_sequence_slices=1{self._since}"
            )


class _BlockRunner(nn.Module):
    """A block; ``functional_call`` of it runs a function with other weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class _SlicesInOneGraph(EarlierSlices):
    """Slices with one graph."""

    @override
    def make_shared_leaf(self, part: SequenceSlice, tensor: Tensor) -> Tensor:
        return tensor


class _ConstantDraws(TorchDispatchMode):
    """Makes each random operation draw the same number for all elements; dropout keeps all.

    Then a block draws the same on a slice as on the whole sequence.
    """

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        seed_torch(0)
        if kwargs.get("generator") is not None:
            kwargs["generator"].manual_seed(0)
        result = func(*args, **kwargs)
        if func.overloadpacket in _DRAWS and result.numel():
            result.fill_(result.flatten()[0])
        return result


_DRAWS = {aten.rand, aten.randn, aten.randint, *DRAWS_BY_SHAPE, *FACTORIES}


@contextmanager
def _in_float32(device: torch.device) -> Iterator[None]:
    """Run the block without autocast; autograd saves nothing for the F around."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        with saved_tensors_hooks(*NO_HOOKS), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _varied_input(leaf: Any, dims: Dims) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, ShapeOnly):
        return (
            _zeros_in_float32(leaf).normal_().requires_grad_()
            if leaf.is_floating_point()
            else _zeros_in_float32(leaf)
        )
    if leaf.is_floating_point() and len(dims) == 1:
        return _perturbed(leaf).requires_grad_()
    return _as_float32(leaf.detach())


def _extreme_input(leaf: Any, dims: Dims) -> Any:
    is_tensor = isinstance(leaf, Tensor)
    if is_tensor and leaf.is_floating_point() and len(dims) == 1 and leaf.requires_grad:
        shared = [1 if dim in (0, *dims) else size for dim, size in enumerate(leaf.shape)]
        values = _zeros_in_float32(leaf)
        token = torch.randn(shared, dtype=values.dtype, device=values.device)
        return values.normal_(std=_VARIATION).add_(token).mul_(_LARGE).requires_grad_()
    is_number = is_tensor and leaf.dtype in _WHOLE and not isinstance(leaf, ShapeOnly)
    if is_number and leaf.dim() and leaf.numel() and len(dims) < 2:
        least, most = int(leaf.min()), int(leaf.max())
        least = least // 2 if least == most else least
        return torch.randint_like(leaf, least, most + 1)
    return _varied_input(leaf, dims)


_WHOLE = {torch.int64, torch.int32}


def _zeros_in_float32(leaf: Tensor) -> Tensor:
    dtype = leaf.dtype
    if leaf.is_floating_point():
        dtype = torch.promote_types(dtype, torch.float32)
    return torch.zeros(leaf.shape, dtype=dtype, device=leaf.device)


def _is_constant(tensor: Tensor) -> bool:
    is_one = tensor.is_floating_point() and tensor.numel() > 0
    return is_one and bool(tensor.eq(tensor.flatten()[0]).all())


def _perturbed(tensor: Tensor) -> Tensor:
    """Change each number by a tenth, and zeros by a tenth of the other numbers."""
    values = _as_float32(tensor.detach())
    if not values.is_floating_point():
        return values.clone()
    is_finite = values.isfinite()
    size = values.where(is_finite, 0).square().mean().sqrt()
    fan = values.shape[-1] if values.dim() > 1 else 1
    size = size.where(size > 0, fan**-0.5 / _VARIATION)  # as large as a linear layer's
    by = torch.randn_like(values) * _VARIATION * values.abs().where(values != 0, size)
    return values.where(~is_finite, values + by)


def _as_float32(tensor: Tensor) -> Tensor:
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
    return tensor.float() if is_narrow else tensor
