"""Every schedule there is runs and gives the plain module's gradients."""

import pytest
import torch

from lightning_pipeoffload.schedule import SCHEDULES, build
from tests.support.small_modules import MODELS, assert_same, run_pipeline, run_plain


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    model = MODELS["gpt_tied"]
    module, batch = model.make().double(), model.batch(8)
    return module, batch, run_plain(module, batch, size=1)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [(name, 2) for name in SCHEDULES]
    + [(name, 4) for name in ("zb", "zb_v", "v", "interleaved_1f1b", "grouped", "po_h")],
)
def test_gradients_are_the_plain_modules(plain, name, num_ranks):
    module, batch, expected = plain
    found = run_pipeline(module, build(name, num_ranks, 8), batch, size=1)
    assert_same(found, expected)
