"""The microbatches of a plan are whole when they are made."""

import torch

from lightning_pipeoffload.runtime.cut.partition import CutSettings
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.step.batch_slice import make_microbatches
from tests.support.small_modules import Regression, linear_blocks, users_step

CPU = torch.device("cpu")


def test_microbatches_have_places_and_weights():
    pipeline = Pipeline(Regression(linear_blocks(2)), 0, CutSettings((0,)), CPU)
    step = users_step(pipeline.module.step)
    slices = pipeline.cut_batch(torch.ones(2, 4), 1, step, "train", 0)
    found = make_microbatches(slices, [0.25, 0.75])
    pipeline.detach()
    assert [(m.index, m.weight) for m in found] == [(0, 0.25), (1, 0.75)]
    assert {m.differentiate for m in found} == {torch.Tensor.backward}
