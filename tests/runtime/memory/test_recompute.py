"""Recomputed values are those of the forward: gradients are equal bit for bit."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.demos import Block
from lightning_pipeoffload.runtime.memory import ActivationStore, CheapRecompute, recompute
from lightning_pipeoffload.runtime.memory.cheap_calls import CheapCall
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.offloaded import memory_of_all
from tests.support.pairs import slow
from tests.support.small_modules import (
    MODELS,
    Case,
    Classifier,
    Regression,
    Step,
    call_step,
    loss_of,
    run_pipeline,
    vectors,
)


@pytest.fixture(autouse=True)
def keep_no_tensor_for_its_size(monkeypatch):
    monkeypatch.setattr(recompute, "SMALLEST_NUMEL", 1)


def with_dropout(module):
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.2
    return module


def norms():
    """Blocks with running statistics, and a ReLU that writes in place inside of each."""
    layers = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 6))
        for _ in range(6)
    ]
    return Classifier(*layers, nn.Linear(6, 5))


CASES = {**MODELS, "norms": Case(norms, vectors)}


def run(name, schedule, how):
    torch.manual_seed(0)
    module, batch = with_dropout(CASES[name].make()), CASES[name].batch(8)
    if isinstance(batch, dict):
        batch["x"] = batch["x"].float()
    return run_pipeline(module, build(schedule, 2, 4), batch, 2, recompute=how)


def assert_equal(found, plain):
    for part in ("losses", "gradients", "buffers"):
        torch.testing.assert_close(getattr(found, part), getattr(plain, part), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("how", "name", "schedule"),
    [
        *[("cheap", "gpt", "1f1b"), ("full", "norms", "zb_v")],
        *map(slow, [("full", "llama", "zb_h1"), ("cheap", "gpt2", "interleaved_1f1b")]),
    ],
)
def test_nothing_changes(how, name, schedule):
    assert_equal(run(name, schedule, how), run(name, schedule, "none"))


@pytest.mark.parametrize(("name", "schedule"), [("mlp", "zb_v"), ("cnn", "interleaved_1f1b")])
def test_blocks_that_write_in_place(name, schedule):
    assert_equal(run(name, schedule, "cheap"), run(name, schedule, "none"))
    expected = 'recompute="full" cannot run .* again in the backward, since it writes its input in'
    with pytest.raises(ValueError, match=expected):
        run(name, schedule, "full")


class Energy(nn.Module):
    """A block that follows the gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        energy = torch.tanh(self.linear(x)).sum()
        return x - torch.autograd.grad(energy, x, create_graph=True)[0]


class Noisy(nn.Module):
    """A block that draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noise = torch.Generator()

    def forward(self, x):
        return torch.tanh(self.linear(x)) * torch.rand(x.shape, generator=self.noise)


def run_blocks(make, how):
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4), *(make() for _ in range(3))]
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    module = Step(Regression.step, blocks)
    return run_pipeline(module, build("zb_h1", 2, 4), batch, 2, recompute=how)


def test_a_block_that_draws_from_a_generator_of_its_own_draws_the_same_again():
    assert_equal(run_blocks(Noisy, "full"), run_blocks(Noisy, "none"))


def test_a_block_that_differentiates_is_not_computed_again():
    assert_equal(run_blocks(Energy, "cheap"), run_blocks(Energy, "none"))
    with pytest.raises(
        ValueError, match=r"since it starts a backward of its own \(.*test_recompute"
    ):
        run_blocks(Energy, "full")


class Counting(nn.Module):
    """A block that tells of its forwards, and may checkpoint itself as Hugging Face's do."""

    def __init__(self, note, gradient_checkpointing):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.note = note
        self.gradient_checkpointing = gradient_checkpointing

    def __deepcopy__(self, memo):
        return Counting(self.note, self.gradient_checkpointing)

    def forward(self, x):
        if self.gradient_checkpointing:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x):
        self.note(1)
        return x + torch.tanh(self.linear(x))


def checkpoints(m, x):
    for block in m.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return loss_of(m, x)


@pytest.mark.parametrize(
    ("step", "by_itself"), [(Regression.step, False), (Regression.step, True), (checkpoints, False)]
)
def test_a_block_runs_once_more_and_no_oftener(step, by_itself):
    forwards = []
    module = Step(step, [Counting(forwards.append, by_itself) for _ in range(4)])
    pipeline = InProcessPipeline(module, build("zb_h1", 2, 2), call_step, recompute="full")
    batch = torch.randn(4, 4)
    pipeline.run(batch, 2)
    forwards.clear()
    pipeline.run(batch, 2)
    assert len(forwards) == 4 * 2 * 2  # blocks, microbatches, F and B


def saved_by(function, *inputs):
    """Return the bytes that stay for the backward but for parameters, and the output."""
    saved = {}
    weights = function.parameters() if isinstance(function, nn.Module) else inputs[1:]
    given = [weight.untyped_storage().data_ptr() for weight in weights]

    def pack(tensor):
        address = tensor.untyped_storage().data_ptr()
        if address not in given:
            saved[address] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), CheapRecompute().saving():
        output = function(*inputs)
    return sum(storage.nbytes() for storage in saved.values()), output


WIDTH, ROWS = 32, 16


def hidden():
    return torch.randn(2, ROWS // 2, WIDTH, dtype=torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_transformer_layer_keeps_20_bytes_a_feature(dropout):
    block, x = Block(WIDTH, 2, dropout).bfloat16(), hidden()
    block.attention.dropout = 0.0  # the CPU's attention keeps its scores for that
    sums_of_softmax = 2 * 4 * ROWS  # in float32, for each of two heads
    means_and_deviations = 2 * 2 * 2 * ROWS  # of two norms
    saved, _ = saved_by(block, x)
    assert saved == 20 * x.numel() + sums_of_softmax + means_and_deviations


def rms_norm(x, weight):
    scaled = x.float()
    scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * scaled.to(x.dtype)


@pytest.mark.parametrize(
    ("function", "factor", "extra"),
    [
        (lambda x, w: rms_norm(x, w[0]) @ w, 2, 4),  # x, and the root of each row
        (lambda x, w: functional.gelu(x) @ w, 2, 0),
        (lambda x, w: functional.gelu(x, approximate="tanh") @ w, 2, 0),
        (lambda x, w: functional.silu(x) @ w, 2, 0),
        (lambda x, w: (functional.silu(x) * x) @ w, 2, 0),
        (lambda x, w: functional.relu(x * 2) @ w, 2, 0),  # either x or the output
        (lambda x, w: functional.dropout(x * 2, 0.5) @ w, 2, 0),
        (lambda x, w: torch.native_dropout(x.cos(), 0.5, True)[0] + w[0], 2, 0),  # as on CUDA
        (lambda x, w: functional.glu(x) @ w[:16], 2, 0),
    ],
)
def test_bytes_and_gradients_of_an_operation(function, factor, extra):
    x, w = hidden(), nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
    torch.manual_seed(1)
    expected = torch.autograd.grad(function(x, w).sum(), (x, w))
    torch.manual_seed(1)
    saved, output = saved_by(function, x, w)
    torch.manual_seed(2)
    assert all(map(torch.equal, torch.autograd.grad(output.sum(), (x, w)), expected))
    assert saved <= factor * x.numel() + extra * ROWS


class Drawn(TorchDispatchMode):
    """The layout of what dropout reads."""

    def __init__(self):
        super().__init__()
        self.layouts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_dropout.default:
            self.layouts.append((args[0].shape, args[0].stride(), args[0].storage_offset()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("begin", [0, 1, 16])
def test_a_mask_is_drawn_for_a_tensor_that_lies_as_the_forwards_did(begin):
    def function(x):
        return torch.native_dropout(x.cos().flatten()[begin:], 0.5, True)[0]

    with Drawn() as drawn:
        _, output = saved_by(function, hidden())
        output.sum().backward()
    (size, stride, offset), again = drawn.layouts
    assert again == (size, stride, offset % 16)


def test_what_was_written_after_its_use_is_an_error():
    x = hidden()
    copy = x * 1
    _, output = saved_by(lambda: copy.float().pow(2))
    with torch.no_grad():
        copy.add_(1)
    with pytest.raises(RuntimeError, match="written in place after its use"):
        output.sum().backward()


def count_calls(monkeypatch):
    """Return how many cheap calls B and W will have computed."""
    computed, compute = {"B": 0, "W": 0}, CheapCall._compute

    def count(self, store, for_w):
        computed["W" if for_w else "B"] += 1
        return compute(self, store, for_w)

    monkeypatch.setattr(CheapCall, "_compute", count)
    return computed


class GatedBlock(nn.Module):
    """The feed-forward part of a Llama block: B needs what W's input is computed from."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class FeedForwardBlock(nn.Module):
    """That of a GPT: only W reads the outputs of its norm and of its GeLU."""

    def __init__(self):
        super().__init__()
        self.norm, self.gelu = nn.LayerNorm(WIDTH), nn.GELU()
        self.expand, self.project = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.project(self.gelu(self.expand(self.norm(x))))


@pytest.mark.parametrize(
    ("block", "by_b", "by_w"),  # operations of each block and microbatch
    [(FeedForwardBlock, 0, 2), (GatedBlock, 2, 0)],
)
def test_each_value_is_computed_once_and_at_w_if_only_w_reads_it(monkeypatch, block, by_b, by_w):
    computed = count_calls(monkeypatch)
    module = Regression([block() for _ in range(4)], WIDTH)
    run_pipeline(module, build("zb_h1", 2, 2), torch.randn(4, WIDTH), 2, recompute="cheap")
    assert computed == {"B": by_b * 4 * 2, "W": by_w * 4 * 2}


def test_a_cast_weight_is_not_taken_for_an_activation():
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    store = ActivationStore("", (), memory_of_all(torch.device("cpu")).settings)
    with torch.autocast("cpu", torch.bfloat16):
        with CheapRecompute().saving():
            linear(x)  # casts the weight, for whoever is next in this context
        with store.recording(), CheapRecompute().saving():
            output = linear(x)
    assert store.held.device <= 2 * x.numel()
    output.float().sum().backward()


def test_autocast_and_a_checkpoint_inside():
    block = Block(WIDTH, 2, 0.0)
    x = torch.randn(2, 8, WIDTH, requires_grad=True)

    def twice(x):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(block, block(x), use_reentrant=False)

    expected = torch.autograd.grad(twice(x).sum(), x)
    assert torch.equal(torch.autograd.grad(saved_by(twice, x)[1].sum(), x)[0], expected[0])
