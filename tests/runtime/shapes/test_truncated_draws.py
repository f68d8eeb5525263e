"""``trunc_normal_`` of what another stage has draws as many numbers as there."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build
from tests.support.small_modules import Regression, call_step, linear_blocks

OPTIONS = {
    "most are inside": {},
    "of a generator": {"generator": torch.Generator()},
    "few are inside": {"mean": 2.0, "std": 1.0, "a": -1.0, "b": 1.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_every_rank_draws_the_same(options):
    width = 32
    module = Regression(linear_blocks(2, width), width)
    pipeline = InProcessPipeline(module, build("1f1b", 2, 2), call_step)
    pipeline.run(torch.randn(4, width), 2)
    drawn = [anew(rank.module, **options) for rank in pipeline.ranks]
    assert torch.equal(*drawn)
    assert torch.equal(drawn[0], anew(module, **options))


def anew(module, **options):
    """Initialize all weights anew; return what is drawn next."""
    torch.manual_seed(1)
    generator = options.get("generator")
    if generator is not None:
        generator.manual_seed(1)
    for parameter in module.parameters():
        nn.init.trunc_normal_(parameter, **options)
    return torch.randn(3, generator=generator)


def test_the_module_that_is_let_go_has_torchs_own_again():
    pipeline = InProcessPipeline(Regression(linear_blocks(2)), build("1f1b", 1, 2), call_step)
    assert nn.init._no_grad_trunc_normal_.__module__ != "torch.nn.init"
    pipeline.ranks[0].detach()
    assert nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init"
