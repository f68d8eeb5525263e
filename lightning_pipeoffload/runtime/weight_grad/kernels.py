"""Kernels at the dispatcher's autograd keys that defer the gradients of marked weights to W."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.weight_grad.calls import (
    PLAIN_CALLS,
    BatchedProduct,
    Convolution,
    DeferredCall,
    GroupedProduct,
    LeftProduct,
    Linear,
    MatrixProduct,
)
from lightning_pipeoffload.runtime.weight_grad.float8 import Float8Product, float8_function
from lightning_pipeoffload.runtime.weight_grad.node import (
    ANCHOR,
    apply_directly,
    apply_with_hooks,
    saving_hooks,
)
from lightning_pipeoffload.runtime.weight_grad.queue import QUEUES, has_hooks

Original = Callable[..., Tensor]
"""Runs an operation as torch does; gets the dispatcher's keys first."""

MakeKernel = Callable[[Original], Callable[..., Tensor]]

_MARK = "_pipeoffload_deferred"
# Views and casts save no tensors, so backward may pass them once per use.
_TRANSPARENT = {
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
    "ToCopyBackward0", "SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0",
    "SliceBackward0", "SelectBackward0", "ReshapeAliasBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "UnsqueezeBackward0", "CloneBackward0",
}  # fmt: skip

_LONGEST_VIEW = 8  # of a weight: einsum permutes, adds dimensions and joins others


def mark_deferrable(parameter: Tensor, waits: bool = True) -> None:
    """Set whether the gradient of ``parameter`` may wait for W."""
    setattr(parameter, _MARK, waits)


def is_deferrable(parameter: Tensor | None) -> bool:
    """Whether the gradient of a parameter may wait for W."""
    # Autograd calls a hook once, with the sum over all uses; W adds the uses one by one.
    return parameter is not None and getattr(parameter, _MARK, False) and not has_hooks(parameter)


def _leaf_of_view(node: Any) -> Tensor | None:
    """Return the leaf that a node views or casts; None if it is another operation."""
    for _ in range(_LONGEST_VIEW):
        variable: Tensor | None = getattr(node, "variable", None)
        if variable is not None or node is None or node.name() not in _TRANSPARENT:
            return variable
        node = node.next_functions[0][0]
    return None


def uses_in(node: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield each leaf that a graph node uses, and whether its gradient could wait for W."""
    if node.name() in _TRANSPARENT:
        return
    for following, _ in node.next_functions:
        leaf = _leaf_of_view(following)
        if leaf is not None:
            yield leaf, node.name() in _PRODUCTS


def _make_deferring_kernel(
    kind: type[DeferredCall],
    original: Original,
    at: tuple[int, int] = (0, 1),
    at_bias: int | None = None,
) -> Callable[..., Any]:
    """Return a kernel that runs an operation so that its weight gradient waits, if it may.

    Weight and bias may be parameters, their views or casts, or not trained.

    Args:
        kind: The operation.
        original: Runs it otherwise; gets what the kernel gets.
        at: The positions of its input and its weight.
        at_bias: That of its bias, if it has one. All these come before its other arguments.
    """
    at_x, at_weight = at
    num_operands = 2 if at_bias is None else 3

    def kernel(keys: Any, *args: Any, **options: Any) -> Any:
        weight = args[at_weight]
        trains = QUEUES and weight.requires_grad and torch.is_grad_enabled()
        if not trains or weight.dim() < 2 or options:
            return original(keys, *args, **options)
        bias = None if at_bias is None or len(args) <= at_bias else args[at_bias]
        if bias is not None and bias.dim() > 1:
            return original(keys, *args)
        for each in (weight,) if bias is None or not bias.requires_grad else (weight, bias):
            leaf = each if each.is_leaf else _leaf_of_view(each.grad_fn)
            # As is_deferrable() decides, without two more calls for each weight of each product.
            # Hooks are read each time: a user may register one between any two batches.
            if (
                leaf is None
                or not getattr(leaf, _MARK, False)
                or leaf._backward_hooks
                or each._backward_hooks
                or getattr(leaf, "_post_accumulate_grad_hooks", None)
            ):
                return original(keys, *args)
        if torch.is_anomaly_enabled():  # which checks autograd's own gradients
            return original(keys, *args)
        call, hooks = kind(weight, bias, *args[num_operands:]), saving_hooks()
        if hooks is None:
            return apply_directly(args[at_x], ANCHOR, call)
        return apply_with_hooks(args[at_x], call, hooks)

    return kernel


def _make_matmul_kernel(
    kind: type[MatrixProduct] | type[BatchedProduct], original: Original
) -> Callable[..., Any]:
    """Return the kernel of a product of two matrices, of which either may be the weight."""
    return _make_deferring_kernel(kind, _make_deferring_kernel(LeftProduct, original, at=(1, 0)))


def _addmm(original: Original) -> Callable[..., Any]:
    plain = _make_deferring_kernel(MatrixProduct, original, at=(1, 2), at_bias=0)

    def kernel(keys: Any, bias: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Any:
        if all(scale == 1 for scale in scales.values()):
            return plain(keys, bias, left, right)
        return original(keys, bias, left, right, **scales)

    return kernel


def _grouped_mm(original: Original) -> Callable[..., Any]:
    by_rows = _make_deferring_kernel(GroupedProduct, original)

    def kernel(keys: Any, left: Tensor, right: Tensor, *options: Any, **named: Any) -> Any:
        if left.dim() == 2 and right.dim() == 3 and len(options) == 1:
            return by_rows(keys, left, right, *options, **named)
        return original(keys, left, right, *options, **named)

    return kernel


def _float8(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    plain = _make_deferring_kernel(Float8Product, lambda keys, *args: original(*args))

    def apply(x: Tensor, weight: Tensor, *options: Any) -> Any:
        if isinstance(x, ShapeOnly):  # a trace, which records a plain product with a weight
            return x.matmul(weight.to(x.dtype))
        # Private: torch asks it too, and refuses its own Function in a transform of torch.func.
        is_plain = type(x) is Tensor and not torch._C._are_functorch_transforms_active()
        return plain(None, x, weight, *options) if is_plain else original(x, weight, *options)

    return apply


_KERNELS: dict[str, MakeKernel] = {
    "linear": partial(_make_deferring_kernel, Linear, at_bias=2),
    "mm": partial(_make_matmul_kernel, MatrixProduct),
    "bmm": partial(_make_matmul_kernel, BatchedProduct),  # of einsum too
    "addmm": _addmm,
    "convolution": partial(_make_deferring_kernel, Convolution, at_bias=2),
    "_grouped_mm": _grouped_mm,  # private: the experts of Hugging Face's mixtures
}
# The names of these operations' nodes when they are not deferred.
_PRODUCTS = {f"{name.title().replace('_', '')}Backward0" for name in _KERNELS}


@contextmanager
def deferring_kernels(device_type: str) -> Iterator[None]:
    """Let the gradients of marked weights wait for W, in the whole process, within the context.

    torch's products on this type of device are replaced for it, which costs 2 to 4 us a call where
    nothing waits.
    """
    with ExitStack() as stack:
        for name, make_kernel in _KERNELS.items():
            kernel = registered_kernel(name, make_kernel, PLAIN_CALLS[name], device_type)
            stack.enter_context(kernel)
        float8 = float8_function()
        if float8 is not None:
            apply = staticmethod(_float8(float8.apply))
            stack.enter_context(replaced(float8, "apply", apply))
        yield


@contextmanager
def registered_kernel(
    name: str, make_kernel: MakeKernel, call: Callable[..., Tensor], device_type: str
) -> Iterator[None]:
    """Have a kernel of an operation in the dispatcher for one type of device, within the context.

    Args:
        name: The operation's name in aten.
        make_kernel: Returns the kernel, from a function that runs the operation as torch does.
        call: The operation as torch's Python functions have it.
        device_type: The type of device.
    """
    key = f"Autograd{device_type.upper()}"
    library = torch.library.Library("aten", "IMPL")
    # Overriding is allowed by default from torch 2.12 on.
    options = {"with_keyset": True, "allow_override": True}
    library.impl(name, make_kernel(_original(name, key, call)), key, **options)
    try:
        yield
    finally:
        # Private: a Library unregisters only when it is garbage-collected.
        library._destroy()
        # Private: what was compiled meanwhile has cached that this key has a kernel, and what is
        # compiled later would find none there, so that parameters got no gradient.
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            getattr(packet, overload)._dispatch_cache.clear()


def _original(name: str, key: str, call: Callable[..., Tensor]) -> Original:
    """Return a function that calls the original operation, and releases the GIL where that matters.

    A kernel that is called directly holds the GIL while it runs: for ever if an accelerator's queue
    is full and another rank is dead. If the key has torch's common kernel, the dispatcher runs that
    kernel at a key that is never replaced, also for operations that it calls inside.
    """
    kernel = torch.library.get_kernel(f"aten::{name}", key)
    if repr(kernel) != repr(torch.library.get_kernel(f"aten::{name}", "AutogradOther")):
        return kernel.call_boxed
    # Private: no public API continues dispatch at a given key. An operator's redispatch() takes
    # 4 us more.
    keys = torch._C.DispatchKey.__members__
    common, own = keys["AutogradOther"], torch._C.DispatchKeySet(keys[key])
    compiling = keys["PythonDispatcher"]  # which finds the key by itself, and would call this again
    included, excluded = torch._C._IncludeDispatchKeyGuard, torch._C._ExcludeDispatchKeyGuard

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        if keyset.has(compiling):
            return kernel.call_boxed(keyset, *args, **kwargs)
        with included(common), excluded(own), torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return run
