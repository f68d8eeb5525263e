"""Blocks that are captured and replayed, with a stand-in for an accelerator's graphs."""

import logging
from itertools import cycle, islice

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.compiled.block_compiler import warn_once
from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build
from tests.support.pairs import first
from tests.support.small_modules import MODELS, DemoGPT, Regression, call_step, descend
from tests.support.tape import Tape

SIZE, MICROBATCHES = 2, 6
SAMPLES = SIZE * MICROBATCHES


def steps(module, batches, schedule, accumulate=1, **options):
    """Return losses and gradients of a step for each batch, and how many graphs were replayed."""
    pipeline = InProcessPipeline(module, schedule, call_step, **options)
    Tape.num_replays, found = 0, []
    for seed, batch in enumerate(batches):
        losses = pipeline.run(batch, SIZE, seed)
        gradients = {n: g.clone() for n, g in pipeline.named_gradients().items() if g is not None}
        found.append((losses, gradients))
        for rank in pipeline.ranks if not (seed + 1) % accumulate else []:
            descend(rank.module.parameters())
    return found, Tape.num_replays


def replays(module, batches, schedule, **options):
    """Check that graphs change no bit of some steps; return how many were replayed."""
    expected, _ = steps(module, batches, schedule, **options)
    found, num_replays = steps(module, batches, schedule, make_graph_pool=Tape, **options)
    for (losses, gradients), (other_losses, others) in zip(found, expected, strict=True):
        assert all(map(torch.equal, losses, other_losses))
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, others[name]), name
    return num_replays


def of_blocks(count, num_steps, firsts):
    """Count F, B and W of blocks in the steps after the first one, but for the first W's."""
    return count * (3 * (num_steps - 1) * MICROBATCHES - firsts)


@pytest.mark.parametrize("schedule", first(2, ["zb_h1", "1f1b", "zb_v", "zb_h2"]))
def test_dropout_has_the_same_bits(schedule):
    module = DemoGPT(depth=4, dropout=0.3)
    batches = [MODELS["gpt"].batch(SAMPLES) for _ in range(3)]
    found = replays(module, batches, build(schedule, 2, MICROBATCHES))
    assert found == of_blocks(4, 3, firsts=2)


def test_positions_and_masks_go_into_the_graphs():
    module, batches = MODELS["llama"].make(), [MODELS["llama"].batch(SAMPLES)] * 2
    assert replays(module, batches, build("zb_h1", 2, MICROBATCHES)) == of_blocks(8, 2, firsts=1)


class Layer(nn.Linear):
    """A layer of width 4, as blocks are."""

    def __init__(self):
        super().__init__(4, 4)


def network(*layers, count=8):
    torch.manual_seed(0)
    return Regression([layer() for layer in islice(cycle(layers), count)])


def vectors(count=SAMPLES):
    return torch.randn(count, 4)


def test_gradients_add_up_over_batches():
    batches = [vectors() for _ in range(4)]
    found = replays(network(Layer), batches, build("zb_h1", 2, MICROBATCHES), accumulate=2)
    assert found == of_blocks(8, 4, firsts=2)


def test_a_smaller_microbatch_runs_as_it_is_written():
    batches = [vectors(SAMPLES - 1) for _ in range(2)]
    found = replays(network(Layer), batches, build("zb_h1", 2, MICROBATCHES))
    assert found == of_blocks(8, 2, firsts=1) - 8 * 3


class Noting(Layer):
    def forward(self, x):
        self.seen = x.detach()
        return super().forward(x)


class Hooked(Layer):
    def __setstate__(self, state):  # a copy of a parameter has no hooks
        super().__setstate__(state)
        self.weight.register_hook(torch.clone)


class InPlace(Layer):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Deciding(Layer):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum() > 0 else 1)


class Frozen(Layer):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Noting, "it writes attributes"),
        (Hooked, "a parameter has hooks"),
        (InPlace, "a leaf Variable that requires grad"),
        (Deciding, "a value is read during a capture"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_cannot_be_captured_runs_beside_graphs(layer, reason, is_first, caplog):
    # The first block of the second stage is of the kind of the very first one.
    layers = (layer, Layer) if is_first else (Layer, layer)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = replays(network(*layers), [vectors()] * 2, build("zb_h1", 2, MICROBATCHES))
    assert found == of_blocks(4, 2, firsts=1)
    assert caplog.text.count(f"runs as it is written, for it is not captured: {reason}") == 4


def test_hooks_on_saved_tensors_leave_no_graph():
    batches, plan = [vectors()] * 2, build("zb_h1", 2, MICROBATCHES)
    for recompute in ("cheap", "full"):
        assert not replays(network(Layer), batches, plan, recompute=recompute)


def test_a_block_that_two_stages_of_a_rank_share_is_captured_on_the_first_alone():
    module = network(Layer)
    module.blocks[7].weight = module.blocks[0].weight
    found = replays(module, [vectors()] * 2, build("zb_v", 2, MICROBATCHES))
    assert found == of_blocks(7, 2, firsts=1)


def test_frozen_blocks_pass_gradients_on():
    found = replays(network(Layer, Frozen), [vectors()] * 2, build("zb_h1", 2, MICROBATCHES))
    assert found == of_blocks(8, 2, firsts=1) + 4
