"""Ownership, shares of weights, coverage of W, state dict keys, batches of other sizes."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.batch import merge_outputs
from lightning_pipeoffload.runtime.cut import CutSettings, SplitModule
from lightning_pipeoffload.runtime.run import Pipeline, split_into_microbatches
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.weight_grad import kernels as weight_grad_kernels
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import (
    MODELS,
    Outcome,
    Regression,
    assert_same,
    call_step,
    linear_blocks,
    run_pipeline,
    run_plain,
    users_step,
)

CPU = torch.device("cpu")


def after_a_step(module, num_ranks=2, batch=None):
    pipeline = InProcessPipeline(module, build("zb_h1", num_ranks, 2), call_step)
    pipeline.run(torch.randn(2, 4) if batch is None else batch, 1)
    return pipeline


# Who owns what


def test_memory_of_other_ranks_parameters_goes():
    pipeline = Pipeline(Regression(linear_blocks(4)), 0, CutSettings((0, 1)), CPU)
    remote = weakref.ref(pipeline.module.blocks[3].weight)
    split_into_microbatches(
        pipeline, torch.ones(2, 4), 1, users_step(pipeline.module.step), "train", 0
    )
    assert remote() is pipeline.module.blocks[3].weight
    pipeline.commit()
    gc.collect()
    assert remote() is None
    pipeline.detach()


@pytest.mark.parametrize("name", ["gpt_tied", "cnn"])
def test_each_entry_of_the_state_dict_is_saved_by_one_rank_that_has_it(name):
    case = MODELS[name]
    module = case.make().double()
    ranks = after_a_step(module, 2, case.batch(2)).ranks
    for key in module.state_dict():
        owner = ranks[ranks[0].tensors.owner_of(key)]
        assert not isinstance(owner.module.state_dict()[key], ShapeOnly)
        assert ranks[1].tensors.owner_of(key) == ranks[0].tensors.owner_of(key)


def test_a_later_kind_of_step_may_need_a_parameter_elsewhere():
    module = Regression(linear_blocks(2))
    pipeline = Pipeline(module, 1, CutSettings((0, 1)), CPU)
    split_into_microbatches(pipeline, torch.ones(2, 4), 1, users_step(module.step), "validation", 0)
    assert not pipeline.tensors.is_local("embed.weight")

    def tied(x):
        for block in module.blocks:
            x = block(x)
        return (x @ module.embed.weight).sum()

    split_into_microbatches(pipeline, torch.ones(2, 4), 1, users_step(tied), "train", 0)
    assert pipeline.tensors.is_local("embed.weight")
    pipeline.detach()


def test_another_cut_goes_by_the_records_that_there_are():
    module, traces = Regression(linear_blocks(4)), []
    settings = CutSettings((0, 1))
    pipeline = Pipeline(module, 1, settings, CPU, before_trace=lambda: traces.append(""))
    for settings, local in ((CutSettings((0, 1)), {2, 3}), (CutSettings((0, 1, 1, 0)), {1, 2})):
        pipeline.prepare_new_cut(1, settings)
        first, _ = split_into_microbatches(
            pipeline, torch.ones(2, 4), 1, users_step(module.step), "train", 0
        )
        assert first.is_new
        blocks = range(4)
        assert {b for b in blocks if pipeline.tensors.is_local(f"blocks.{b}.weight")} == local
    assert len(traces) == 1
    pipeline.detach()


def now_in_torch():
    checkpoint = torch.utils.checkpoint.CheckpointFunction.forward
    return nn.init._no_grad_trunc_normal_, checkpoint, torch._TorchCompileWrapper.__call__


def test_what_two_pipelines_replace_in_torch_stays_until_both_are_detached():
    gc.collect()  # pipelines that earlier tests had refused are attached until they are collected
    pipelines = [Pipeline(Regression(linear_blocks(2)), 0, CutSettings((0,)), CPU) for _ in "ab"]
    replaced = now_in_torch()
    pipelines[1].detach()
    assert now_in_torch() == replaced
    pipelines[0].detach()
    assert not {*now_in_torch()} & {*replaced}


def test_a_detached_module_is_plain_again():
    module = Regression(linear_blocks(2)).double()
    x = torch.randn(4, 4).double()
    expected = run_plain(module, x, 4)
    pipeline = Pipeline(module, 0, CutSettings((0,)), CPU)
    split_into_microbatches(pipeline, x, 4, users_step(module.step), "train", 0)
    pipeline.commit()
    pipeline.detach()
    assert all(type(block) is nn.Linear for block in module.blocks)
    assert_same(run_plain(module, x, 4), expected)


# How much of the weight gradients' work waits for W


class Mixed(nn.Linear):
    """8 rows: a linear layer from 4 to 6 waits for W, a product with a sum of weights does not."""

    def __init__(self):
        super().__init__(4, 6)
        self.back = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return super().forward(x) @ (self.back + self.back)


def test_coverage_is_what_is_counted_by_hand():
    module = Regression([Mixed() for _ in range(4)])
    pipeline = InProcessPipeline(module, build("zb_h1", 2, 2), call_step)
    pipeline.run(torch.randn(16, 4), 8)
    linear, sums, embed, head = (2 * 8 * n for n in (4 * 6, 6 * 4, 4 * 4, 4))
    stages = [stage for rank in pipeline.ranks for stage in rank.stages.values()]
    assert sum(stage.memories[0].deferred_flops for stage in stages) == 4 * linear + embed + head
    all_flops = sum(rank.weight_flops for rank in pipeline.ranks)
    assert all_flops == 4 * (linear + sums) + embed + head


@pytest.mark.parametrize("name", ["llama", "gpt2", "cnn"])
def test_all_of_a_models_weight_gradients_wait_for_w(name):
    case = MODELS[name]
    ranks = after_a_step(case.make().double(), 2, case.batch(2)).ranks
    deferred = sum(s.memories[0].deferred_flops for rank in ranks for s in rank.stages.values())
    assert deferred == sum(rank.weight_flops for rank in ranks)


# Batches of other sizes


def test_unequal_microbatches_give_the_gradient_of_the_whole_batch():
    module, x = Regression(linear_blocks(4)).double(), torch.randn(7, 4).double()
    found = run_pipeline(module, build("zb_h1", 2, 4), x, 2)
    whole = run_plain(module, x, 7)
    assert_same(Outcome(whole.losses, found.gradients), whole)
    shares = [2 / 7, 2 / 7, 2 / 7, 1 / 7]
    torch.testing.assert_close(merge_outputs(found.losses, shares), whole.losses[0])


def test_what_a_rank_does_not_have_seems_to_be_on_its_device(monkeypatch):
    monkeypatch.setattr(weight_grad_kernels, "deferring_kernels", nullcontext)
    monkeypatch.setattr(SplitModule, "move", lambda tensors: None)
    module, elsewhere, seen = Regression(linear_blocks(2)), torch.device("meta"), []

    def step(part):
        seen.append(module.embed.weight.device)
        return module.step(part)

    pipeline = Pipeline(module, 1, CutSettings((0, 1)), elsewhere)
    split_into_microbatches(
        pipeline, torch.ones(2, 4, device=elsewhere), 2, users_step(step), "train", 0
    )
    pipeline.commit()
    assert {*seen, module.embed.weight.device} == {elsewhere}
