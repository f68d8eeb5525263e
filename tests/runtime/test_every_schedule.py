"""Every schedule there is runs and gives the plain module's gradients."""

from functools import cache

import pytest
import torch

from lightning_pipeoffload.schedule import SCHEDULES, build
from tests.support.pairs import by_shape, slow
from tests.support.small_modules import MODELS, assert_same, run_pipeline, run_plain


@cache
def plain(name, num_microbatches):
    torch.manual_seed(0)
    module, batch = MODELS[name].make().double(), MODELS[name].batch(num_microbatches)
    return module, batch, run_plain(module, batch, size=1)


@pytest.mark.parametrize("name", by_shape(SCHEDULES))
def test_gradients_over_two_ranks_are_the_plain_modules(name):
    assert_exact(name, 2, "gpt_tied")


@pytest.mark.parametrize("name", ["v", *map(slow, ["zb", "zb_v", "grouped", "po_h"])])
def test_gradients_over_four_ranks_are_the_plain_modules(name):
    assert_exact(name, 4, "mlp")


def assert_exact(name, num_ranks, model):
    module, batch, expected = plain(model, 2 * num_ranks)
    found = run_pipeline(module, build(name, num_ranks, 2 * num_ranks), batch, size=1)
    assert_same(found, expected)
