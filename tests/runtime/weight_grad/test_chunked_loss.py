"""The loss over chunks of the tokens: as the whole one, alone and in a pipeline."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from lightning_pipeoffload import chunked_loss
from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.measure import LiveBytes, measure_saved_memory
from lightning_pipeoffload.runtime.run import Pipeline, split_into_microbatches
from lightning_pipeoffload.schedule import build
from tests.support.comparison import evaluate, evaluate_plain, train, train_plain
from tests.support.families import call_step
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import assert_same, users_step

CPU = torch.device("cpu")
CLASSES = 11
CHUNKS = [1, 4, 16, 50]


def head(bias=True):
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, CLASSES, bias=bias)).double()


def hidden_and_labels():
    hidden = torch.randn(3, 7, 6, dtype=torch.double, requires_grad=True)
    labels = torch.randint(CLASSES, (3, 7))
    labels[0, 2], labels[1] = -100, -100
    return hidden, labels


WEIGHT = torch.linspace(0.5, 2, CLASSES).double()
LOSSES = {
    "mean": cross_entropy,
    "weighted": partial(cross_entropy, weight=WEIGHT, label_smoothing=0.1),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "module": nn.CrossEntropyLoss(weight=WEIGHT),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_it_is_the_whole_loss(loss):
    module = head()
    hidden, labels = hidden_and_labels()
    whole = loss(module(hidden).flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(whole, [hidden, *module.parameters()])
    for num_chunks in CHUNKS:
        found = chunked_loss(module, hidden, labels, loss, num_chunks)
        torch.testing.assert_close(found, whole)
        gradients = torch.autograd.grad(found, [hidden, *module.parameters()])
        torch.testing.assert_close(gradients, expected)
        with torch.no_grad():
            torch.testing.assert_close(
                chunked_loss(module, hidden, labels, loss, num_chunks), whole
            )


def test_labels_are_shifted_by_either_form():
    module = head()
    hidden, labels = hidden_and_labels()
    cut = chunked_loss(module, hidden[:, :-1], labels[:, 1:], cross_entropy, 4)
    padded = pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(chunked_loss(module, hidden, padded, cross_entropy, 4), cut)


def test_labels_may_be_probabilities():
    module, (hidden, _) = head(), hidden_and_labels()
    labels = torch.rand(3, 7, CLASSES).double().softmax(-1)
    whole = cross_entropy(module(hidden).flatten(0, 1), labels.flatten(0, 1))
    torch.testing.assert_close(chunked_loss(module, hidden, labels, cross_entropy, 4), whole)


def test_a_frozen_head_and_a_frozen_input_train_the_other():
    module, (hidden, labels) = head(), hidden_and_labels()
    chunked_loss(module, hidden.detach(), labels, cross_entropy, 4).backward()
    assert hidden.grad is None
    assert all(parameter.grad is not None for parameter in module.parameters())
    module.requires_grad_(False).zero_grad()
    chunked_loss(module, hidden, labels, cross_entropy, 4).backward()
    assert hidden.grad is not None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_hook_on_a_weight_gets_the_whole_gradient():
    module, (hidden, labels) = head(), hidden_and_labels()
    seen = []
    module[1].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    chunked_loss(module, hidden, labels, cross_entropy, 4).backward()
    (found,) = seen
    torch.testing.assert_close(found, module[1].weight.grad)


def test_a_head_that_drops_draws_the_same_again():
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, CLASSES)).double()
    hidden, labels = hidden_and_labels()
    torch.manual_seed(1)
    loss = chunked_loss(module, hidden, labels, partial(cross_entropy, reduction="sum"), 1)
    torch.rand(3)
    loss.backward()
    torch.manual_seed(1)
    found = cross_entropy(module(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    (expected,) = torch.autograd.grad(found, hidden)
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("uses_cache", [True, False])
def test_it_casts_as_the_whole_does(uses_cache):
    module = nn.Linear(6, CLASSES)
    hidden, labels = hidden_and_labels()
    hidden = hidden.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=uses_cache):
        found = chunked_loss(module, hidden, labels, cross_entropy, 4)
        whole = cross_entropy(module(hidden).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(found, whole)
    gradients = torch.autograd.grad(found, [hidden, *module.parameters()])
    expected = torch.autograd.grad(whole, [hidden, *module.parameters()])
    torch.testing.assert_close(gradients, expected, rtol=2e-2, atol=1e-3)
    assert [each.dtype for each in gradients] == [torch.float32] * 3


def own_loss(logits, labels):
    return (logits.sum(-1) - labels).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": own_loss}, "own_loss has no reduction"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, "CrossEntropyLoss has reduction='none'"),
        ({"loss": mse_loss}, "of how many numbers mse_loss is the mean"),
        ({"head": lambda x: x}, "needs the head as a module"),
        ({"num_chunks": 0}, r"num_chunks \(0\)"),
        ({"labels": torch.zeros(3, 6, dtype=torch.long)}, r"\[3, 7\] of \[3, 7, 6\].*\[3, 6\]"),
    ],
)
def test_refused_by_name(options, message):
    hidden, labels = hidden_and_labels()
    given = {"head": head(), "hidden": hidden, "labels": labels, "loss": cross_entropy}
    with pytest.raises(ValueError, match=message):
        chunked_loss(**{**given, "num_chunks": 4, **options})


def test_a_loss_of_ones_own_adds_up_by_its_argument():
    def squared(logits, labels, reduction="sum"):
        return (logits.sum(-1) - labels).square().sum()

    module, (hidden, labels) = head(), hidden_and_labels()
    found = chunked_loss(module, hidden, labels, squared, 4)
    torch.testing.assert_close(found, squared(module(hidden), labels))


class Model(nn.Module):
    """Blocks, and a head whose loss is chunked."""

    def __init__(self, num_chunks, tied=False, bias=False, classes=CLASSES):
        super().__init__()
        self.num_chunks = num_chunks
        self.embed = nn.Embedding(classes, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, classes, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def training_step(self, tokens, batch_idx=0):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        labels = pad(tokens[:, 1:], (0, 1), value=-100)
        hidden = self.norm(hidden)
        if self.num_chunks:
            return chunked_loss(self.head, hidden, labels, cross_entropy, self.num_chunks)
        return cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    validation_step = training_step


def tokens(count=8, classes=CLASSES):
    return torch.randint(classes, (count, 6))


def whole(module):
    found = copy.deepcopy(module)
    found.num_chunks = 0
    return found


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("zb_h1", {"bias": True}),
        ("zb_h1", {"tied": True}),
        ("interleaved_1f1b", {"tied": True}),
        ("zb_v", {}),
    ],
)
def test_a_pipeline_trains_as_the_whole_loss_does(schedule, options):
    module, batch = Model(4, **options), tokens()
    _, found = train(module, schedule, 2, batch)
    assert_same(found, train_plain(whole(module), batch))


def test_a_pipeline_evaluates_it():
    module, batch = Model(4), tokens()
    torch.testing.assert_close(evaluate(module, batch), evaluate_plain(whole(module), batch))


def test_a_hook_on_a_weight_gets_the_gradient_of_each_microbatch_in_a_pipeline():
    module, batch, seen = Model(4), tokens(), []
    pipeline = InProcessPipeline(module, build("zb_h1", 2, 4), call_step)
    last = pipeline.ranks[-1].module.head.weight
    last.register_hook(lambda gradient: seen.append(gradient.clone()))
    pipeline.run(batch, 2)
    torch.testing.assert_close(sum(seen), last.grad)
    assert len(seen) == 4


def measure(num_chunks, classes=4096):
    """Return the bytes of both stages of a microbatch, and the record."""
    module, batch = Model(num_chunks, classes=classes), tokens(16, classes)
    rank = Pipeline(module, 0, CutSettings((0, 1)), CPU)
    (part,) = split_into_microbatches(rank, batch, 16, users_step(module.training_step), "train", 0)
    found = measure_saved_memory(rank, part)
    assert module.head.weight.grad is None
    rank.detach()
    return found, part.record


def test_nothing_of_it_waits_for_w_and_its_memory_falls_with_the_chunks():
    (_, plain), record = measure(0)
    logits = 16 * 6 * 4096 * 8
    assert plain.residue_bytes >= logits
    for num_chunks in (1, 4, 16):
        (_, last), chunked = measure(num_chunks)
        assert last.activation_bytes < logits / 16
        assert last.residue_bytes < logits / 16
        assert last.workspace_bytes == pytest.approx(3 * logits / num_chunks, rel=0.05)
        # B has the head's forward again, and what W would do.
        head_flops = 2 * 96 * 6 * 4096
        assert chunked.work.weight_flops[-1] == 0
        assert chunked.work.input_flops[-1] == record.work.input_flops[-1] + 2 * head_flops
        assert chunked.work.training_flops == record.work.training_flops


@pytest.mark.parametrize("num_chunks", [1, 4, 16])
def test_what_is_counted_is_what_it_takes(num_chunks):
    (_, last), _ = measure(num_chunks)
    module = Model(num_chunks, classes=4096)
    loss = module.training_step(tokens(16, 4096))
    module.head.weight.grad = torch.zeros_like(module.head.weight)
    with LiveBytes() as live:
        loss.backward()
    alone = module.head.weight.nbytes  # a gradient that autograd adds at the end
    assert live.peak - alone == pytest.approx(last.workspace_bytes, rel=0.1, abs=alone)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_last_stage_may_have_the_head_alone(recompute):
    module, batch = Model(4, tied=True), tokens()
    options = {"split": [2, 2, 0], "recompute": recompute}
    pipeline, found = train(module, "zb_h1", 3, batch, **options)
    assert_same(found, train_plain(module, batch))
    assert pipeline.ranks[-1].cut.block_names(2) == []
    assert found.gradients["head.weight"] is not None
    evaluated = evaluate(module, batch, 3, split=[2, 2, 0])
    torch.testing.assert_close(evaluated, evaluate_plain(module, batch))
