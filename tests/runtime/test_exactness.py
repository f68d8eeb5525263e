"""Loss and every gradient are the plain module's, for every kind of model.

``test_every_schedule`` has the other schedules.
"""

from functools import cache

import pytest
import torch

from lightning_pipeoffload.schedule import build
from tests.support.pairs import first, pairs
from tests.support.small_modules import MODELS, assert_same, run_pipeline, run_plain

SIZES = [("interleaved_1f1b", 2), ("zb_v", 2), ("1f1b", 4), ("zb_h1", 1), ("po_h", 2)]


@cache
def prepared(name):
    torch.manual_seed(0)
    module, batch = MODELS[name].make().double(), MODELS[name].batch(8)
    return module, batch, run_plain(module, batch, size=2)


@pytest.mark.parametrize(("name", "size"), first(4, pairs([*MODELS], SIZES)))
def test_gradients_are_the_plain_modules(name, size):
    schedule, num_ranks = size
    module, batch, plain = prepared(name)
    found = run_pipeline(module, build(schedule, num_ranks, 4), batch, size=2)
    assert_same(found, plain)


@pytest.mark.parametrize(("schedule", "num_ranks"), SIZES[:3])
def test_running_statistics_are_the_plain_modules(schedule, num_ranks):
    module, batch, plain = prepared("cnn")
    found = run_pipeline(module, build(schedule, num_ranks, 4), batch, size=2)
    torch.testing.assert_close(found.buffers, plain.buffers)
