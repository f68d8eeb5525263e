"""Runs a task in a pipeline and without one, on the same microbatches and random numbers."""

import copy

import torch

from lightning_pipeoffload.runtime import mix_seed, seed_all
from lightning_pipeoffload.runtime.batch import batch_size
from lightning_pipeoffload.schedule import build, forward_only
from tests.support.families import call_step
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import Outcome, assert_same, split_batch

SCHEDULES = ["1f1b", "zb_h1", "interleaved_1f1b"]
NUM_MICROBATCHES = 4


def train_plain(module, batch, size=2):
    """Train a copy of ``module``; draws before the blocks are those of the pipeline's."""
    module = copy.deepcopy(module)
    losses = []
    for index, part in enumerate(split_batch(batch, size)):
        seed_all(mix_seed(mix_seed(0, index), 0))
        loss = call_step(module, part)
        (loss * batch_size(part) / batch_size(batch)).backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}
    return Outcome(losses, gradients, dict(module.named_buffers()))


def train(module, schedule, num_ranks, batch, **options):
    """Train it in a pipeline."""
    plan = build(schedule, num_ranks, NUM_MICROBATCHES)
    pipeline = InProcessPipeline(module, plan, call_step, **options)
    losses = pipeline.run(batch, batch_size(batch) // NUM_MICROBATCHES)
    gradients, buffers = pipeline.named_gradients(), pipeline.named_buffers()
    return pipeline, Outcome(losses, gradients, buffers)


def assert_trains_exactly(module, batch, schedule="zb_h1", num_ranks=4, **options):
    """Compare losses and gradients of one step."""
    pipeline, found = train(module, schedule, num_ranks, batch, **options)
    assert_same(found, train_plain(module, batch, batch_size(batch) // NUM_MICROBATCHES))
    return pipeline


@torch.no_grad()
def evaluate(module, batch, num_ranks=2, **options):
    """Return the losses of a pipeline that evaluates."""
    plan = forward_only(build("1f1b", num_ranks, NUM_MICROBATCHES))
    pipeline = InProcessPipeline(module.eval(), plan, call_step, **options)
    return pipeline.run(batch, batch_size(batch) // NUM_MICROBATCHES)


@torch.no_grad()
def evaluate_plain(module, batch):
    """Return the losses of the module alone."""
    losses = []
    for index, part in enumerate(split_batch(batch, batch_size(batch) // NUM_MICROBATCHES)):
        seed_all(mix_seed(mix_seed(0, index), 0))
        losses.append(call_step(module.eval(), part))
    return losses
