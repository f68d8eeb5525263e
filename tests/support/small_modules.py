"""Tiny models with a step, in float64, and what a plain run of them gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_pipeoffload.demos import GPT
from lightning_pipeoffload.runtime import mix_seed, seed_all
from lightning_pipeoffload.runtime.batch import BatchStructure, batch_size
from lightning_pipeoffload.schedule import build
from tests.support.families import TEXT, from_transformers
from tests.support.families import gpt2 as make_gpt2
from tests.support.in_process import InProcessPipeline

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2"]
DEPTH = 8  # blocks: enough for two stages on each of four ranks
VOCABULARY = 16
TOLERANCE = 1e-12


def split_batch(batch, size):
    """Split a batch into parts of ``size`` samples, the last one possibly smaller."""
    return BatchStructure().split(batch, size).parts


class LanguageModel(nn.Module):
    """A model of Hugging Face; its own loss would be computed in float32."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def step(self, tokens):
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class DemoGPT(nn.Module):
    """The demo's LightningModule, without a Trainer to log to."""

    def __init__(self, **options):
        super().__init__()
        sizes = {"vocab_size": VOCABULARY, "context": 6, "width": 8, "depth": DEPTH, "heads": 2}
        self.gpt = GPT(**{**sizes, "dropout": 0.0, **options})

    def step(self, tokens):
        return functional.cross_entropy(self.gpt(tokens).flatten(0, 1), tokens.flatten())


class Classifier(nn.Module):
    """Whatever layers, in an ``nn.Sequential``."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers)

    def step(self, batch):
        return functional.cross_entropy(self.net(batch["x"]), batch["y"])


class Regression(nn.Module):
    """Blocks that a ``glue`` function may stand between; the step is squared error."""

    def __init__(self, blocks, width=4):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def step(self, x):
        return self(x).pow(2).mean()


def linear_blocks(count, width=4):
    return [nn.Linear(width, width) for _ in range(count)]


class Step(Regression):
    """A step in one function of the module, with ``embed``, ``blocks`` and ``head``, and x."""

    def __init__(self, function, blocks=None):
        super().__init__(blocks or linear_blocks(4))
        self.function = function

    def step(self, x):
        return self.function(self, x)


def through(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def loss_of(module, x):
    return module.head(x).pow(2).mean()


def llama(tied):
    heads = {"num_key_value_heads": 1}
    return LanguageModel(
        from_transformers("LlamaForCausalLM", **TEXT, **heads, tie_word_embeddings=tied)
    )


def gpt2(tied):
    return LanguageModel(make_gpt2(tie_word_embeddings=tied))


def mlp():
    layers = [layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.ReLU(inplace=True))]
    return Classifier(*layers, nn.Linear(6, 5))


def cnn():
    def convolution(channels):
        return [nn.Conv2d(channels, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)]

    return Classifier(*convolution(2), *convolution(3), nn.Flatten(), nn.Linear(48, 5))


def tokens(count):
    return torch.randint(VOCABULARY, (count, 6))


def vectors(count):
    return {"x": torch.randn(count, 6).double(), "y": torch.randint(5, (count,))}


def images(count):
    return {"x": torch.randn(count, 2, 4, 4).double(), "y": torch.randint(5, (count,))}


@dataclass(frozen=True)
class Case:
    """A model and the maker of its batches."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]


MODELS = {
    "gpt": Case(DemoGPT, tokens),
    "gpt_tied": Case(lambda: DemoGPT(tie_weights=True), tokens),
    "mlp": Case(mlp, vectors),
    "cnn": Case(cnn, images),
    "llama": Case(lambda: llama(tied=False), tokens),
    "llama_tied": Case(lambda: llama(tied=True), tokens),
    "gpt2": Case(lambda: gpt2(tied=False), tokens),
    "gpt2_tied": Case(lambda: gpt2(tied=True), tokens),
}


def users_step(step):
    """Return ``step`` as a pipeline calls it, which says what for."""
    return lambda part, call: step(part)


def call_step(module, part):
    return module.step(part)


@dataclass
class Outcome:
    """What a step leaves behind."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor] = field(default_factory=dict)


def run_plain(module, batch, size):
    """Run a copy of ``module`` over the microbatches, one after the other."""
    module = copy.deepcopy(module)
    parts = split_batch(batch, size)
    losses = []
    for part in parts:
        loss = call_step(module, part)
        if loss.requires_grad:
            (loss * batch_size(part) / batch_size(batch)).backward()
        losses.append(loss.detach())
    gradients = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False)}
    return Outcome(losses, gradients, dict(module.named_buffers()))


def run_pipeline(module, schedule, batch, size, seed=0, **options):
    """Run one step in process."""
    pipeline = InProcessPipeline(module, schedule, call_step, **options)
    losses = pipeline.run(batch, size, seed)
    return Outcome(losses, pipeline.named_gradients(), pipeline.named_buffers())


def assert_same(found, plain, tolerance=TOLERANCE):
    """Compare losses, and gradients relative to the largest of the model."""
    torch.testing.assert_close(found.losses, plain.losses, rtol=tolerance, atol=tolerance)
    assert found.gradients.keys() == plain.gradients.keys()
    largest = max(float(g.abs().max()) for g in plain.gradients.values() if g is not None)
    for name, expected in plain.gradients.items():
        actual = found.gradients[name]
        assert (actual is None) == (expected is None), name
        if actual is not None and expected is not None:
            error = float((actual - expected).abs().max()) / largest
            assert error <= tolerance, f"{name}: {error}"


def assert_exact(module, batch, size=2, num_ranks=2):
    """Check that a zero-bubble pipeline does what the plain module does."""
    count = len(split_batch(batch, size))
    found = run_pipeline(module, build("zb_h1", num_ranks, count), batch, size)
    assert_same(found, run_plain(module, batch, size))


def compare_with_plain(module, schedule, num_ranks, batches, size=2, start=None, **options):
    """Train a pipeline and a copy of ``module``, a step for each batch; compare them after each.

    Args:
        start: Gets the module of each rank and the copy, and gives them what cannot be copied.

    Returns:
        The pipeline, and the copy.
    """
    plain, count = copy.deepcopy(module), len(split_batch(batches[0], size))
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, count), call_step, **options)
    for each in (*(rank.module for rank in pipeline.ranks), plain) if start else ():
        start(each)
    for seed, batch in enumerate(batches):
        parts, expected = split_batch(copy.deepcopy(batch), size), []
        losses = pipeline.run(batch, size, seed)
        for index, part in enumerate(parts):
            seed_all(mix_seed(mix_seed(seed, index), 0))
            expected.append(call_step(plain, part))
            (expected[-1] * batch_size(part) / batch_size(batch)).backward()
        found = Outcome(losses, pipeline.named_gradients())
        gradients = {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)}
        assert_same(found, Outcome([loss.detach() for loss in expected], gradients), 1e-9)
        for rank in pipeline.ranks:
            descend(rank.tensors.local_tensors().values())
        descend(plain.parameters())
    for name, value in plain.state_dict().items():
        saver = pipeline.ranks[pipeline.ranks[0].tensors.owner_of(name)].module
        held = saver.state_dict()[name]
        torch.testing.assert_close(held, value, rtol=1e-9, atol=1e-9, msg=name)
    return pipeline, plain


@torch.no_grad()
def descend(tensors):
    """Step by 0.1 against the gradients, and drop them."""
    for tensor in tensors:
        if tensor.grad is not None:
            tensor.sub_(tensor.grad, alpha=0.1)
            tensor.grad = None
