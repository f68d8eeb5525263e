"""Generators that a module holds."""

import torch
from torch import nn

from lightning_pipeoffload.runtime.users_code import RandomGenerators


def test_a_hook_may_take_generators_out_of_a_list():
    module = nn.Module()
    module.sources = [torch.Generator(), torch.Generator()]
    generators = RandomGenerators(module)
    del module.sources[1]
    generators.seed(3)
    first = torch.rand(2, generator=module.sources[0])
    generators.seed(3)
    assert torch.equal(torch.rand(2, generator=module.sources[0]), first)
