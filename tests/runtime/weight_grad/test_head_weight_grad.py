"""Weight gradients after the blocks, which the last stage's B computes."""

import pytest
import torch

from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.measure import measure_saved_memory, move_head_w_to_b
from lightning_pipeoffload.runtime.run import Pipeline, split_into_microbatches
from lightning_pipeoffload.runtime.weight_grad import WeightGradQueue
from lightning_pipeoffload.schedule import Costs
from tests.runtime.weight_grad.test_chunked_loss import Model, tokens
from tests.support.comparison import train
from tests.support.small_modules import users_step

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("zb_h1", {"bias": True}),
        ("zb_h1", {"tied": True}),
        ("zb_v", {"tied": True}),
        ("1f1b", {}),
    ],
)
def test_gradients_are_the_same_to_the_bit(schedule, options):
    module, batch = Model(0, **options), tokens()
    _, waiting = train(module, schedule, 2, batch)
    _, at_once = train(module, schedule, 2, batch, head_weight_grad="B")
    for name, gradient in waiting.gradients.items():
        assert torch.equal(gradient, at_once.gradients[name]), name
    assert all(map(torch.equal, waiting.losses, at_once.losses))


@pytest.mark.parametrize("split", [(2, 2), (4, 0)])
def test_nothing_of_the_head_waits_for_w(split):
    found = {}
    for head in ("W", "B"):
        module, batch = Model(0, classes=4096), tokens(16, 4096)
        settings = CutSettings((0, 1), split=split, head_weight_grad=head)
        rank = Pipeline(module, 0, settings, CPU)
        (part,) = split_into_microbatches(
            rank, batch, 16, users_step(module.training_step), "train", 0
        )
        found[head] = measure_saved_memory(rank, part)[-1], rank.cut.costs
        rank.detach()
    logits = 16 * 6 * 4096 * 8
    (waiting, costs), (at_once, after) = found["W"], found["B"]
    assert waiting.activation_bytes == at_once.activation_bytes
    assert waiting.residue_bytes - at_once.residue_bytes >= logits
    assert after.backward_weight[-1] < costs.backward_weight[-1]
    assert sum(after.backward_input) + sum(after.backward_weight) == pytest.approx(
        sum(costs.backward_input) + sum(costs.backward_weight)
    )


def test_costs_of_segments_with_the_head_in_b_are_those_of_its_stage():
    segments = Costs(1, [2, 2, 2], [3, 3, 4], activation=5, weight_residue=[5, 5, 6])
    found = move_head_w_to_b(segments, 3)
    assert found.backward_input == (2, 2, 6)
    assert found.backward_weight == (3, 3, 0)
    assert found.weight_residue == (5, 5, 0)


def test_another_pipeline_of_the_module_has_no_marks_of_the_first():
    module, queue = Model(0), WeightGradQueue(has_at_once=True)
    for head, is_computed_in_b in (("B", True), ("W", False)):
        rank = Pipeline(module, 0, CutSettings((0,), head_weight_grad=head), CPU)
        split_into_microbatches(rank, tokens(), 2, users_step(module.training_step), "train", 0)
        assert queue.is_computed_in_b((module.head.weight,)) == is_computed_in_b
        rank.detach()


def test_a_weight_that_is_not_marked_waits():
    weight = torch.ones(2, 2, requires_grad=True)
    assert not WeightGradQueue(has_at_once=True).is_computed_in_b((weight, weight.t()))
