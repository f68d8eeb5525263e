"""The operations whose weight gradient can wait for W, with their gradient formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipeoffload.runtime.weight_grad.queue import (
    AddProduct,
    add_product_to_grad,
    add_to_grad,
)

aten = torch.ops.aten

# torch's own bindings, which take 4 us less than aten's operators. Private: _grouped_mm.
PLAIN_CALLS: dict[str, Callable[..., Tensor]] = {
    "linear": nn.functional.linear,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "addmm": torch.addmm,
    "convolution": torch.convolution,
    "_grouped_mm": torch._grouped_mm,
}


class DeferredCall:
    """One call of an operation with a deferred weight; its methods run under no_grad.

    Args:
        weight: A marked parameter, or views and a cast of one.
        *options: Further arguments of the operation.

    Attributes:
        trained_weights: The weights whose gradients :meth:`accumulate_weight_grad` adds to.
        version: Counts the writes to the weight until this call.
        is_kernel: Whether :meth:`forward` calls one operation of torch, whose autograd kernel is
            this package's; else several, which need their own.
    """

    is_kernel = True

    def __init__(self, weight: Tensor, bias: Tensor | None, *options: Any) -> None:
        self.weight = weight
        self.bias = bias
        self.options = options
        self.trains_bias = bias is not None and bias.requires_grad
        self.trained_weights: tuple[Tensor, ...] = (weight,)
        if bias is not None and self.trains_bias:
            self.trained_weights = weight, bias
        self.version = weight._version

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of x; ``grad`` is that of the result."""
        raise NotImplementedError

    def accumulate_weight_grad(
        self, x: Tensor, grad: Tensor, add_product: AddProduct = add_product_to_grad
    ) -> None:
        """Compute the gradients of weight and bias, and add them to ``.grad``.

        Args:
            x: The operation's input.
            grad: The gradient of its result.
            add_product: Adds the product of two matrices to the weight's gradient.
        """
        raise NotImplementedError

    def flops(self, x: Tensor, grad: Tensor) -> int:
        """Return the floating-point operations of the product in :meth:`accumulate_weight_grad`."""
        return 2 * grad.numel() * x.shape[-1]

    def refuse_change(self) -> NoReturn:
        """Raise the error for a weight whose version is no longer :attr:`version` in B."""
        raise RuntimeError(
            f"a weight of shape {tuple(self.weight.shape)} was changed in place between the "
            f"forward and the backward that needs it; change weights in the optimizer's step only"
        )


class Linear(DeferredCall):
    """``x @ weight.T + bias`` with x ``[..., in]``, weight ``[out, in]``."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        # A view, as torch saves for linear: its value stays while a step assigns another tensor to
        # weight.data, as binary networks do. For other operations torch saves the weight itself.
        self._value = self.weight.detach()
        return nn.functional.linear(x, self.weight, self.bias)

    @override
    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad.matmul(self._value.conj())

    @override
    def accumulate_weight_grad(
        self, x: Tensor, grad: Tensor, add_product: AddProduct = add_product_to_grad
    ) -> None:
        rows = grad.reshape(-1, grad.shape[-1])
        add_product(self.weight, rows.t(), x.reshape(-1, x.shape[-1]).conj())
        if self.bias is not None and self.trains_bias:
            # A bias of one number is broadcast.
            add_to_grad(self.bias, rows.sum(0).sum_to_size(self.bias.shape))


class MatrixProduct(DeferredCall):
    """``x @ weight (+ bias)`` with x ``[rows, in]``, weight ``[in, out]``, bias ``[out]``.

    :meth:`accumulate_weight_grad` takes x ``[..., in]`` too, for compiled regions.
    """

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)

    @override
    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad.mm(self.weight.mH)

    @override
    def accumulate_weight_grad(
        self, x: Tensor, grad: Tensor, add_product: AddProduct = add_product_to_grad
    ) -> None:
        rows = grad.reshape(-1, grad.shape[-1])
        add_product(self.weight, x.reshape(-1, x.shape[-1]).mH, rows)
        if self.bias is not None and self.trains_bias:
            # A bias of one number is broadcast.
            add_to_grad(self.bias, rows.sum(0).sum_to_size(self.bias.shape))


class BatchedProduct(DeferredCall):
    """``x[i] @ weight[i]`` with x ``[batch, rows, in]``, weight ``[batch, in, out]``."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)

    @override
    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad.bmm(self.weight.mH)

    @override
    def accumulate_weight_grad(
        self, x: Tensor, grad: Tensor, add_product: AddProduct = add_product_to_grad
    ) -> None:
        add_to_grad(self.weight, x.mH.bmm(grad))


class LeftProduct(DeferredCall):
    """``weight @ x`` with weight ``[out, in]``, x ``[in, columns]``, or batches of both."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.weight, x) if x.dim() == 2 else torch.bmm(self.weight, x)

    @override
    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return self.weight.mH.matmul(grad)

    @override
    def accumulate_weight_grad(
        self, x: Tensor, grad: Tensor, add_product: AddProduct = add_product_to_grad
    ) -> None:
        if x.dim() == 2:
            add_product(self.weight, grad, x.mH)
        else:
            add_to_grad(self.weight, grad.bmm(x.mH))

    @override
    def flops(self, x: Tensor, grad: Tensor) -> int:
        return 2 * grad.numel() * x.shape[-2]


class GroupedProduct(DeferredCall):
    """``x[rows of group i] @ weight[i]`` with x ``[rows, in]``, weight ``[groups, in, out]``."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, *self.options)

    @override
    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return aten._grouped_mm.default(
            grad.contiguous(), self.weight.transpose(-2, -1), *self.options
        )

    @override
    def accumulate_weight_grad(
        self, x: Tensor, grad: Tensor, add_product: AddProduct = add_product_to_grad
    ) -> None:
        add_to_grad(self.weight, aten._grouped_mm.default(x.t(), grad.contiguous(), *self.options))


class Convolution(DeferredCall):
    """``convolution(x, weight, bias, *options)`` as aten has it; x is ``[batch, in, *pixels]``."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.convolution(x, self.weight, self.bias, *self.options)

    def _gradients(self, x: Tensor, grad: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        sizes = None if self.bias is None else list(self.bias.shape)
        return aten.convolution_backward.default(grad, x, self.weight, sizes, *self.options, mask)

    @override
    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        return self._gradients(x, grad, [True, False, False])[0]

    @override
    def accumulate_weight_grad(
        self, x: Tensor, grad: Tensor, add_product: AddProduct = add_product_to_grad
    ) -> None:
        _, weight_grad, bias_grad = self._gradients(x, grad, [False, True, self.trains_bias])
        add_to_grad(self.weight, weight_grad)
        if self.trains_bias:
            add_to_grad(self.bias, bias_grad)

    @override
    def flops(self, x: Tensor, grad: Tensor) -> int:
        transposed = self.options[3]
        pixels = x if transposed else grad
        return 2 * pixels.numel() * math.prod(self.weight.shape[1:])
