"""Every schedule there is runs and gives the plain module's gradients."""

from functools import cache

import pytest
import torch

from lightning_pipeoffload.schedule import SCHEDULES, build
from tests.support.small_modules import MODELS, assert_same, run_pipeline, run_plain


@cache
def plain(name, num_microbatches):
    torch.manual_seed(0)
    module, batch = MODELS[name].make().double(), MODELS[name].batch(num_microbatches)
    return module, batch, run_plain(module, batch, size=1)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "model"),
    [(name, 2, 4, "gpt_tied") for name in SCHEDULES]
    + [(n, 4, 8, "mlp") for n in ("zb", "zb_v", "v", "interleaved_1f1b", "grouped", "po_h")],
)
def test_gradients_are_the_plain_modules(name, num_ranks, num_microbatches, model):
    module, batch, expected = plain(model, num_microbatches)
    found = run_pipeline(module, build(name, num_ranks, num_microbatches), batch, size=1)
    assert_same(found, expected)
