"""Weight gradients apart from input gradients: the W of a zero-bubble schedule.

Kernels at the dispatcher's autograd keys see each linear layer, matrix product and convolution,
however the model calls it. Where the weight is one that :func:`mark` was told of, the backward
returns the input gradient only and puts (input, output gradient) into the queue of that stage and
microbatch, which W empties; nothing else of the graph stays alive.
``torch.distributed.pipelining`` walks the autograd graph instead and keeps all of it until W.

Parameters of other operations (norms, embeddings, scales) get their gradient in B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

aten = torch.ops.aten

_MARK = "_pipeoffload_deferred"
# Views and casts save no tensors, so backward may pass them once per use.
_TRANSPARENT = {
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
    "ToCopyBackward0", "SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0",
    "SliceBackward0", "SelectBackward0", "ReshapeAliasBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "UnsqueezeBackward0", "CloneBackward0",
}  # fmt: skip

_LONGEST_VIEW = 8  # of a weight: einsum permutes, adds dimensions and joins others

# Process-wide on purpose: autograd runs backward in threads of its own, which would not see a
# thread's or a context's variable.
_active: WeightGradQueue | None = None
_saving = False
_reading = False
_promised: Callable[[], Tensor] | None = None


class Keeper(Protocol):
    """Keeps what waits for W, on the device or elsewhere."""

    def pack_for_weight(self, tensor: Tensor) -> Any:
        """Keep a tensor."""

    def fetch(self, saved: Any) -> Callable[[], Tensor]:
        """Return what gives the tensor back."""


class WeightGradQueue:
    """Weight gradients of one stage and microbatch, from its B to its W.

    Args:
        immediate: compute each gradient at once, for a fused backward.
        keeper: of what waits; None: it stays as it is.

    Attributes:
        flops: of the gradients that came through here.
    """

    def __init__(self, immediate: bool = False, keeper: Keeper | None = None) -> None:
        self.immediate = immediate
        self.keeper = keeper
        self.flops = 0
        self._entries: list[Callable[[], None]] = []
        self._outer: WeightGradQueue | None = None

    def __enter__(self) -> None:
        global _active
        self._outer, _active = _active, self

    def __exit__(self, *error: object) -> None:
        global _active
        _active, self._outer = self._outer, None

    def put(self, compute: Callable[[], None], flops: int = 0) -> None:
        """Keep ``compute`` for W."""
        self.flops += flops
        if self.immediate:
            compute()
        else:
            self._entries.append(compute)

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor for W; return what gives it back."""
        if self.keeper is None or self.immediate:
            return lambda: tensor
        return self.keeper.fetch(self.keeper.pack_for_weight(tensor))

    @torch.no_grad()
    def run(self) -> None:
        """Compute and accumulate all, in the order of the backward; each frees its tensors."""
        entries = self._entries[::-1]
        self._entries.clear()
        while entries:
            entries.pop()()


def deferring(queue: WeightGradQueue) -> AbstractContextManager[None]:
    """Let marked weights' gradients go to ``queue``; for F too, whose graph decides it."""
    return queue


def mark(parameter: nn.Parameter) -> None:
    """Say that the gradient of ``parameter`` may be left for W."""
    setattr(parameter, _MARK, True)


def defer_weight_grad(parameter: Tensor, compute: Callable[[], Tensor]) -> None:
    """Leave the gradient of ``parameter`` for the W of this stage and microbatch.

    For custom kernels: call it inside ``autograd.Function.backward`` and return None for the
    parameter.

    Args:
        parameter: a parameter of the model.
        compute: returns the gradient, shaped like ``parameter``; called once, at W, or at once when
            no split is under way.
    """

    def add() -> None:
        with torch.no_grad():
            _accumulate(parameter, compute())

    if _active is None:
        add()
    else:
        _active.put(add)


class _Call:
    """One call of an operation with a deferred weight; subclasses know the mathematics.

    Each method runs under no_grad.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *options: Any) -> None:
        self.weight = weight
        self.bias = bias
        self.options = options
        self.trains_bias = bias is not None and bias.requires_grad
        self.version = weight._version

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        raise NotImplementedError

    def accumulate(self, x: Tensor, grad: Tensor) -> None:
        raise NotImplementedError

    def flops(self, x: Tensor, grad: Tensor) -> int:
        raise NotImplementedError

    def check_unchanged(self) -> None:
        if self.weight._version != self.version:
            raise RuntimeError(
                f"a weight of shape {tuple(self.weight.shape)} was changed in place between the "
                f"forward and the backward that needs it; change weights in the optimizer's step "
                f"only"
            )


class _Linear(_Call):
    """``x @ weight.T + bias`` with x ``[..., in]``, weight ``[out, in]``."""

    def forward(self, x: Tensor) -> Tensor:
        return aten.linear.default(x, self.weight, self.bias)

    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad.matmul(self.weight)

    def accumulate(self, x: Tensor, grad: Tensor) -> None:
        rows = grad.reshape(-1, grad.shape[-1])
        _accumulate_product(self.weight, rows.t(), x.reshape(-1, x.shape[-1]))
        if self.trains_bias:
            _accumulate(self.bias, rows.sum(0))

    def flops(self, x: Tensor, grad: Tensor) -> int:
        return 2 * grad.numel() * x.shape[-1]


class _MatrixProduct(_Call):
    """``x @ weight (+ bias)`` with x ``[rows, in]``, weight ``[in, out]``, bias ``[out]``."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return aten.mm.default(x, self.weight)
        return aten.addmm.default(self.bias, x, self.weight)

    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad.mm(self.weight.t())

    def accumulate(self, x: Tensor, grad: Tensor) -> None:
        _accumulate_product(self.weight, x.t(), grad)
        if self.trains_bias:
            _accumulate(self.bias, grad.sum(0))

    def flops(self, x: Tensor, grad: Tensor) -> int:
        return 2 * grad.numel() * x.shape[-1]


class _BatchedProduct(_Call):
    """``x[i] @ weight[i]`` with x ``[batch, rows, in]``, weight ``[batch, in, out]``."""

    def forward(self, x: Tensor) -> Tensor:
        return aten.bmm.default(x, self.weight)

    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad.bmm(self.weight.transpose(1, 2))

    def accumulate(self, x: Tensor, grad: Tensor) -> None:
        _accumulate(self.weight, x.transpose(1, 2).bmm(grad))

    def flops(self, x: Tensor, grad: Tensor) -> int:
        return 2 * grad.numel() * x.shape[-1]


class _GroupedProduct(_Call):
    """``x[rows of group i] @ weight[i]`` with x ``[rows, in]``, weight ``[groups, in, out]``."""

    def forward(self, x: Tensor) -> Tensor:
        return aten._grouped_mm.default(x, self.weight, *self.options)

    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return aten._grouped_mm.default(
            grad.contiguous(), self.weight.transpose(-2, -1), *self.options
        )

    def accumulate(self, x: Tensor, grad: Tensor) -> None:
        _accumulate(self.weight, aten._grouped_mm.default(x.t(), grad.contiguous(), *self.options))

    def flops(self, x: Tensor, grad: Tensor) -> int:
        return 2 * grad.numel() * x.shape[-1]


class _Convolution(_Call):
    """``convolution(x, weight, bias, *options)`` as aten has it."""

    def forward(self, x: Tensor) -> Tensor:
        return aten.convolution.default(x, self.weight, self.bias, *self.options)

    def _gradients(self, x: Tensor, grad: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        sizes = None if self.bias is None else list(self.bias.shape)
        return aten.convolution_backward.default(grad, x, self.weight, sizes, *self.options, mask)

    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return self._gradients(x, grad, [True, False, False])[0]

    def accumulate(self, x: Tensor, grad: Tensor) -> None:
        _, weight_grad, bias_grad = self._gradients(x, grad, [False, True, self.trains_bias])
        _accumulate(self.weight, weight_grad)
        if self.trains_bias:
            _accumulate(self.bias, bias_grad)

    def flops(self, x: Tensor, grad: Tensor) -> int:
        transposed = self.options[3]
        pixels = x if transposed else grad
        return 2 * pixels.numel() * math.prod(self.weight.shape[1:])


class _Keep(torch.autograd.Function):
    """The identity; saves x before the operation that follows has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _DeferredCall(torch.autograd.Function):
    """An operation whose only input to autograd is x; the weight is kept by reference.

    ``keeper`` is the node that has saved x; None: this one does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, keeper: Any, call: _Call) -> Tensor:
        if keeper is None:
            ctx.save_for_backward(x)
        ctx.keeper = keeper
        ctx.call = call
        return call.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        call: _Call = ctx.call
        call.check_unchanged()
        x, fetch = _read_input(ctx.keeper or ctx)
        _queue_or_run(call, x, fetch, grad)
        return call.input_gradient(x, grad) if ctx.needs_input_grad[0] else None, None, None, None


def _read_input(node: Any) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """Return what ``node`` saved, and how W gets it if this is a stand-in."""
    global _reading, _promised
    _reading, _promised = True, None
    try:
        (x,) = node.saved_tensors
        return x.detach(), _promised
    finally:
        _reading, _promised = False, None


def _queue_or_run(call: _Call, x: Tensor, fetch: Callable[[], Tensor] | None, grad: Tensor) -> None:
    if _active is None:
        call.accumulate(fetch() if fetch else x, grad)
        return
    fetch_x = fetch or _active.keep(x)
    fetch_grad = _active.keep(grad)
    _active.put(lambda: call.accumulate(fetch_x(), fetch_grad()), call.flops(x, grad))


def is_saving_weight_input() -> bool:
    """Whether what autograd saves now is the input of a deferred operation: only W reads it."""
    return _saving


def is_reading_weight_input() -> bool:
    """Whether that input is read back by the B of its operation, which hands it on to W."""
    return _reading


def promise(fetch: Callable[[], Tensor]) -> None:
    """Say, from the hook that unpacks the input, how W gets it; B does with its shape."""
    global _promised
    _promised = fetch


@contextmanager
def for_backward() -> Iterator[None]:
    """Let what a hook itself saves or reads inside be for B, whatever it does that for."""
    global _saving, _reading
    outer = _saving, _reading
    _saving = _reading = False
    try:
        yield
    finally:
        _saving, _reading = outer


def _apply(call: _Call, x: Tensor) -> Tensor:
    # The first layer's input needs no gradient, but its weight does: something must ask for one.
    if not x.requires_grad:
        with _saving_input():
            return _DeferredCall.apply(x, torch.empty(0, requires_grad=True), None, call)
    if not _is_saving_hooked():
        return _DeferredCall.apply(x, None, None, call)
    # A Function saves after its forward has run; a checkpoint's recomputation, which stops at the
    # last tensor saved, would so run the block's last operation in vain.
    with _saving_input():
        kept = _Keep.apply(x)
    return _DeferredCall.apply(kept, None, kept.grad_fn, call)


@contextmanager
def _saving_input() -> Iterator[None]:
    global _saving
    _saving = True
    try:
        yield
    finally:
        _saving = False


def _is_saving_hooked() -> bool:
    """Whether what autograd saves goes through hooks, as inside a checkpoint."""
    # Private: nothing public tells, and without hooks the second node would be paid for nothing.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _is_deferred(weight: Tensor | None) -> bool:
    """Whether ``weight`` is a marked parameter, or a view or cast of one."""
    if weight is None or not weight.requires_grad:
        return False
    if weight.is_leaf:
        return getattr(weight, _MARK, False)
    return _leads_to_mark(weight.grad_fn)


def _leads_to_mark(node: Any) -> bool:
    for _ in range(_LONGEST_VIEW):
        variable = getattr(node, "variable", None)
        if variable is not None:
            return getattr(variable, _MARK, False)
        if node.name() not in _TRANSPARENT:
            return False
        node = node.next_functions[0][0]
    return False


def _accumulate(parameter: Tensor | None, gradient: Tensor) -> None:
    """Add to ``.grad`` as autograd does, hooks included."""
    assert parameter is not None
    if not parameter.is_leaf or _has_hooks(parameter):
        torch.autograd.backward(parameter, gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _accumulate_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``.grad``, without a temporary where that is possible."""
    grad = parameter.grad if parameter.is_leaf else None
    if grad is None or _has_hooks(parameter) or not grad.dtype == left.dtype == right.dtype:
        _accumulate(parameter, left.mm(right))
    else:
        grad.addmm_(left, right)


def _has_hooks(parameter: Tensor) -> bool:
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def _takes_part(weight: Tensor, bias: Tensor | None) -> bool:
    if _active is None or not torch.is_grad_enabled() or not _is_deferred(weight):
        return False
    if torch.is_anomaly_enabled():  # which looks at what autograd itself computes
        return False
    return bias is None or not bias.requires_grad or _is_deferred(bias)


def _linear(original: Any) -> Callable[..., Tensor]:
    def kernel(keys: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _takes_part(weight, bias):
            return _apply(_Linear(weight, bias), x)
        return original.call_boxed(keys, x, weight, bias)

    return kernel


def _mm(original: Any) -> Callable[..., Tensor]:
    def kernel(keys: Any, left: Tensor, right: Tensor) -> Tensor:
        if _takes_part(right, None):
            return _apply(_MatrixProduct(right, None), left)
        if _takes_part(left, None):
            return _apply(_MatrixProduct(left.t(), None), right.t()).t()
        return original.call_boxed(keys, left, right)

    return kernel


def _bmm(original: Any) -> Callable[..., Tensor]:
    def kernel(keys: Any, left: Tensor, right: Tensor) -> Tensor:
        if _takes_part(right, None):
            return _apply(_BatchedProduct(right, None), left)
        if _takes_part(left, None):
            call = _BatchedProduct(left.transpose(1, 2), None)
            return _apply(call, right.transpose(1, 2)).transpose(1, 2)
        return original.call_boxed(keys, left, right)

    return kernel


def _addmm(original: Any) -> Callable[..., Tensor]:
    def kernel(keys: Any, bias: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Tensor:
        unscaled = all(scale == 1 for scale in scales.values())
        if unscaled and bias.dim() == 1 and _takes_part(right, bias):
            return _apply(_MatrixProduct(right, bias), left)
        return original.call_boxed(keys, bias, left, right, **scales)

    return kernel


def _grouped_mm(original: Any) -> Callable[..., Tensor]:
    def kernel(keys: Any, left: Tensor, right: Tensor, *options: Any, **named: Any) -> Tensor:
        by_rows = left.dim() == 2 and right.dim() == 3 and len(options) == 1 and not named
        if by_rows and _takes_part(right, None):
            return _apply(_GroupedProduct(right, None, *options), left)
        return original.call_boxed(keys, left, right, *options, **named)

    return kernel


def _convolution(original: Any) -> Callable[..., Tensor]:
    def kernel(keys: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        if _takes_part(weight, bias):
            return _apply(_Convolution(weight, bias, *options), x)
        return original.call_boxed(keys, x, weight, bias, *options)

    return kernel


_KERNELS = {
    "linear": _linear,
    "mm": _mm,
    "bmm": _bmm,  # of einsum too
    "addmm": _addmm,
    "convolution": _convolution,
    "_grouped_mm": _grouped_mm,  # private: the experts of Hugging Face's mixtures
}
_libraries: dict[str, torch.library.Library] = {}


def install_kernels(device_type: str) -> None:
    """Put the kernels in place for one type of device; again is harmless.

    They cost 2 to 4 us a call while nothing is deferred, so :func:`remove_kernels` after training.
    """
    if device_type in _libraries:
        return
    key = f"Autograd{device_type.upper()}"
    library = torch.library.Library("aten", "IMPL")
    for name, make_kernel in _KERNELS.items():
        original = torch.library.get_kernel(f"aten::{name}", key)
        library.impl(name, make_kernel(original), key, with_keyset=True)
    _libraries[device_type] = library


def remove_kernels() -> None:
    """Give the dispatcher its own kernels back."""
    while _libraries:
        # Private: a Library unregisters when it is collected, which is too late to rely on.
        _libraries.popitem()[1]._destroy()
