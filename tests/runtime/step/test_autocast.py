"""Autocast around interleaved forwards and backwards: casts are shared, backwards run outside."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeoffload.runtime.step import backward_mode, sharing_casts, without_mha_fastpath

CPU = torch.device("cpu")


class CountCasts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func is torch.ops.aten._to_copy.default
        if is_cast and isinstance(args[0], nn.Parameter):
            self.weights.append(args[0])
        return func(*args, **(kwargs or {}))

    @property
    def count(self):
        return len(self.weights)


def test_each_weight_is_cast_once_where_lightning_casts_at_every_use():
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    context = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with context, CountCasts() as casts, sharing_casts(CPU):
        for _ in range(3):
            loss = linear(x).sum()
            with backward_mode(CPU):
                loss.backward()
    assert casts.count == 2
    assert torch.is_autocast_cache_enabled()


def test_a_use_without_gradient_does_not_cost_the_next_one_its_gradient():
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), sharing_casts(CPU):
        with torch.no_grad():
            linear(x)
        assert linear(x).requires_grad


def test_a_backward_keeps_the_precision_of_its_forward():
    x = torch.ones(2, 4, requires_grad=True)
    weight = torch.full((4, 4), 1 + 2**-12)  # bfloat16 has no such number
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            loss = torch.mm(x, weight).sum()
        with backward_mode(CPU):
            loss.backward()
    assert torch.equal(x.grad, weight.sum(1).expand(2, 4))


def test_torchs_layers_give_the_same_type_with_gradients_and_without():
    layer, x = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True).eval(), torch.ones(1, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x).dtype
        with torch.no_grad(), without_mha_fastpath(CPU):
            assert layer(x).dtype == expected
    assert torch.backends.mha.get_fastpath_enabled()
