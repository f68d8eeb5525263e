import pytest
import torch

from lightning_pipeoffload.runtime.direct_function import DirectFunction


class Product(DirectFunction):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def test_it_is_a_function_of_autograd():
    x = torch.ones(2, requires_grad=True)
    product = Product.apply(x, 3)
    product.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))
    assert product.grad_fn.name() == "ProductBackward"


def test_a_transform_is_refused_as_torch_does():
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.vmap(lambda x: Product.apply(x, 3))(torch.ones(2))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.vjp(lambda x: Product.apply(x, 3), torch.ones(2))
