"""The product of torchao's float8 linear layers, whose weight gradient waits for W.

torchao computes it in an autograd Function, whose backward returns the gradients of input and
weight together. The first needs the weight and not the input, the second the input and not the
weight. So B and W each call that backward with a narrow matrix of zeros in place of what they do
not need: its product costs next to nothing, and all scales and casts stay torchao's.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime.weight_grad.calls import DeferredCall
from lightning_pipeoffload.runtime.weight_grad.queue import (
    AddProduct,
    add_product_to_grad,
    add_to_grad,
)

_MODULE = "torchao.float8.float8_linear"
_NAME = "matmul_with_hp_or_float8_args"
_NARROW = 16  # the least that float8 products take


def float8_function() -> Any:
    """Return torchao's Function; None where nothing has imported its float8 layers."""
    return getattr(sys.modules.get(_MODULE), _NAME, None)


class _Context:
    """What forward saves for backward."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


class Float8Product(DeferredCall):
    """``x @ weight`` in float8 with x ``[..., in]``, weight ``[in, out]``."""

    is_kernel = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        self._function, self._context = float8_function(), _Context()
        result: Tensor = self._function.forward(self._context, x, self.weight, *self.options)
        self._context.save_for_backward()  # the node has saved x
        return result

    def _gradients(self, x: Tensor, weight: Tensor, grad: Tensor) -> Any:
        self._context.save_for_backward(x, weight)
        try:
            return self._function.backward(self._context, grad)
        finally:
            self._context.save_for_backward()

    @override
    def input_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        narrow = grad.new_zeros(*grad.shape[:-1], _NARROW, dtype=x.dtype)
        gradient: Tensor = self._gradients(narrow, self.weight, grad)[0]
        return gradient

    @override
    def accumulate_weight_grad(
        self, x: Tensor, grad: Tensor, add_product: AddProduct = add_product_to_grad
    ) -> None:
        narrow = self.weight.new_zeros(self.weight.shape[1], _NARROW).t()
        add_to_grad(self.weight, self._gradients(x, narrow, grad)[1])
