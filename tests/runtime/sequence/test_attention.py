"""Slices of a sequence attend as the whole does, by whichever kernel a device has for them."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeoffload.runtime.sequence import (
    BlockOnSlice,
    EarlierSlices,
    SequenceSlice,
    attending_to_slices,
)

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Plain(TorchDispatchMode):
    """Runs each operation; under a mode torch makes no causal_lower_right()."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


class Whole(EarlierSlices):
    """Slices with one graph."""

    def make_shared_leaf(self, part, tensor):
        return tensor


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=ON_GPU)])
def device(request):
    cpu = torch.device("cpu")
    device = cpu if request.param == "cpu" else torch.accelerator.current_accelerator()
    with attending_to_slices(device.type):
        yield device


@pytest.mark.parametrize("heads", [4, 2])  # of keys and values
@pytest.mark.parametrize("dtype", ROUNDING)
def test_slices_attend_as_the_whole(device, dtype, heads):
    torch.manual_seed(0)
    shapes = [(2, 4, 24, 16), *[(2, heads, 24, 16)] * 2]
    leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]

    def attend(*parts):
        return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=heads < 4)

    expected = attend(*leaves)
    earlier, outputs = Whole(), []
    for index, (start, stop) in enumerate(pairwise([0, 5, 16, 24])):
        part = SequenceSlice(index, start, stop, 24)
        with Plain():
            outputs.append(
                BlockOnSlice("block", 0, part, earlier).run(
                    attend, *(leaf[:, :, start:stop] for leaf in leaves)
                )
            )
    found, direction = torch.cat(outputs, 2), torch.randn_like(expected)
    tolerance = {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype]}
    torch.testing.assert_close(found, expected, **tolerance)
    for gradients in zip(
        torch.autograd.grad(found, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
        strict=True,
    ):
        torch.testing.assert_close(*gradients, **tolerance)
