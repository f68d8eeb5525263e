"""Compiled blocks train as plain ones do, with their weight gradients left for W."""

import operator

import pytest
import torch
from torch import fx, nn
from torch._dynamo import lookup_backend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.compiled import block_compiler
from lightning_pipeoffload.runtime.compiled.block_compiler import (
    refuse_cuda_graphs,
)
from lightning_pipeoffload.runtime.compiled.split_graph import writes_in_place
from lightning_pipeoffload.runtime.weight_grad import WeightGradQueue
from tests.support.comparison import assert_trains_exactly, train, train_plain
from tests.support.families import Task
from tests.support.pairs import slow
from tests.support.small_modules import Outcome, assert_same

WIDTH = 4
COMPILE = {"backend": "aot_eager"}


class Block(nn.Module):
    """Linear layers that share an input, a product, a norm and a scale."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = self.norm(x)
        return x + self.scale * ((self.gate(y).sigmoid() * self.up(y)) @ self.down)


class Net(nn.Module):
    def __init__(self, block=Block, depth=4):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def task(block=Block, step=loss):
    return Task(Net(block), step).double()


def tokens(length=5, count=8):
    return torch.randint(8, (count, length))


@pytest.fixture(autouse=True)
def compile_anew():
    torch.compiler.reset()


def lines(caplog):
    """Return what the package has logged."""
    return {record.message for record in caplog.records if record.name == block_compiler.__name__}


@pytest.fixture
def left_for_w(monkeypatch):
    """Count the operations of the weight gradients that are left for W."""
    found = []
    defer = WeightGradQueue.defer

    def count(self, call, x, fetch, grad):
        found.append(call.flops(x, grad))
        defer(self, call, x, fetch, grad)

    monkeypatch.setattr(WeightGradQueue, "defer", count)
    return found


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb_v", 2), ("1f1b", 1), slow(("zb_h1", 3))])
def test_as_much_is_left_for_w_as_without(schedule, num_ranks, left_for_w):
    module, batch = task(), tokens()
    assert_trains_exactly(module, batch, schedule, num_ranks)
    uncompiled, left_for_w[:] = sum(left_for_w), []
    assert_trains_exactly(module, batch, schedule, num_ranks, compile=COMPILE)
    assert sum(left_for_w) == uncompiled


@pytest.mark.parametrize("wrap", [False, True])
def test_blocks_that_the_user_has_compiled_are_split(wrap, left_for_w):
    def step(model, batch):  # here, for a copy of a module is compiled no more
        for block in model.blocks:
            if not wrap and block._compiled_call_impl is None:
                block.compile(backend="aot_eager")
        return loss(model, batch)

    module = task(step=step)
    if wrap:
        blocks = [torch.compile(block, backend="aot_eager") for block in module.model.blocks]
        module.model.blocks = nn.ModuleList(blocks)
    assert_trains_exactly(module, tokens(), num_ranks=2)
    assert len(left_for_w) == 4 * (4 * 3 + 1)


class Adapted(Block):
    """Frozen weights, and two that train."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.inner = nn.Linear(WIDTH, 2, bias=False)
        self.outer = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x) + self.outer(self.inner(x))


class Dropping(Adapted):
    def forward(self, x):
        return super().forward(functional.dropout(x, 0.3))


class Shared(Block):
    """Weights that are used more than once, and otherwise than in products."""

    def forward(self, x):
        y = self.gate(super().forward(x)) @ self.up.weight.t()
        return super().forward(y) + functional.linear(x, self.gate.weight.t()).tanh().square().sum()


class Convolved(Block):
    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return super().forward(self.back(self.depthwise(x.mT).tanh()).mT)


class Broken(Block):
    """Two regions, with code between them that is run as it is written."""

    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return self.gate(x) + self.up(x)


class WritesInPlace(Block):
    def forward(self, x):
        y = self.up(self.norm(x))
        y.add_(1)
        return functional.relu(y) @ self.down


class Autocast(Block):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).double()


BLOCKS = {
    "adapted": (Adapted, 2 * 4),
    "shared": (Shared, 9 * 4),
    "convolved": (Convolved, 5 * 4),
    "regions": (Broken, 5 * 4),
    "in place": (WritesInPlace, 2 * 4),
}


@pytest.mark.parametrize(("block", "count"), BLOCKS.values(), ids=BLOCKS)
def test_forms_of_blocks(block, count, left_for_w):
    assert_trains_exactly(task(block), tokens(), num_ranks=2, compile=COMPILE)
    assert len(left_for_w) == 4 * (count + 1)


@pytest.mark.parametrize(
    ("block", "recompute"),
    [
        (Dropping, "full"),
        (Autocast, "none"),
        *map(slow, [(Dropping, "none"), (Dropping, "cheap"), (Autocast, "full")]),
    ],
)
def test_what_is_kept_or_not_makes_no_difference(block, recompute, left_for_w):
    module, batch = task(block), tokens()
    _, plain = train(module, "zb_h1", 2, batch, recompute=recompute)
    uncompiled, left_for_w[:] = sum(left_for_w), []
    _, found = train(module, "zb_v", 2, batch, recompute=recompute, compile=COMPILE)
    assert_same(found, plain, 1e-12 if block is Dropping else 1e-6)
    assert sum(left_for_w) == uncompiled


def test_lengths_may_change(left_for_w):
    module = task()
    pipeline, _ = train(module, "zb_h1", 2, tokens(), compile=COMPILE)
    for length in (7, 3):
        batch = tokens(length)
        for rank in pipeline.ranks:
            rank.module.zero_grad()
        left_for_w.clear()
        found = Outcome(pipeline.run(batch, 2), pipeline.named_gradients())
        assert_same(found, train_plain(module, batch))
        assert len(left_for_w) == 4 * (4 * 3 + 1)


def test_a_block_that_checkpoints_by_itself_says_what_that_costs(caplog):
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    block_compiler.warn_once.cache_clear()
    assert_trains_exactly(task(Checkpointed), tokens(), num_ranks=2, compile=COMPILE)
    (line,) = lines(caplog)
    assert line.startswith("what a compiled block checkpoints by itself gets its weight gradients")


@pytest.mark.parametrize(
    ("fails", "line", "count"),
    [
        (lambda inputs: len(inputs) > 10, "a compiled block gets its weight gradients in B", 1),
        (lambda inputs: True, "a block runs as it is written, for it does not compile", 13),
    ],
)
def test_what_a_backend_cannot_do(fails, line, count, left_for_w, caplog):
    def backend(module, inputs):
        if fails(inputs):
            raise RuntimeError("no such kernel")
        return aot_eager(module, inputs)

    aot_eager = lookup_backend("aot_eager")
    block_compiler.warn_once.cache_clear()
    assert_trains_exactly(task(), tokens(), num_ranks=2, compile={"backend": backend})
    assert len(left_for_w) == 4 * count
    (found,) = lines(caplog)
    assert found.startswith(line)
    assert "no such kernel" in found


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_what_is_written_after_a_region_that_has_returned_it_is_refused(backend):
    class Late(Block):
        def forward(self, x):
            y = self.norm(x).sin()
            g = self.gate(y.view(-1, WIDTH)).view(x.shape)
            torch._dynamo.graph_break()
            y.mul_(2.0)
            return x + g * y

    with pytest.raises(RuntimeError, match="written in place"):
        train(task(Late), "zb_h1", 2, tokens(), compile={"backend": backend})


@pytest.mark.parametrize(
    ("call", "writes"),
    [(operator.or_, False), (operator.ior, True), (torch.relu_, True), (torch.relu, False)],
)
def test_which_calls_write_their_arguments(call, writes):
    graph = fx.Graph()
    graph.call_function(call, (graph.placeholder("x"), graph.placeholder("y")))
    assert writes_in_place(graph) == writes


@pytest.mark.slow
def test_inductor():
    module, batch = task(), tokens()
    _, found = train(module, "zb_h1", 2, batch, compile=True)
    assert_same(found, train_plain(module, batch), 1e-6)


# What is refused


ACCEPTED = [False, True, {}, {"backend": "aot_eager", "dynamic": True}]
REFUSED = [
    ("inductor", "compile must be True, False or the arguments of torch.compile"),
    (None, "compile must be True, False or"),
    ({"speed": "high"}, "is refused by torch.compile: .*speed"),
    ({"mode": "reduce-overhead"}, "CUDA graphs, which own their outputs"),
    ({"mode": "max-autotune"}, 'use mode="max-autotune-no-cudagraphs"'),
    slow(({"options": {"triton.cudagraphs": True}}, "CUDA graphs")),
    ({"backend": "cudagraphs"}, "CUDA graphs"),
]


@pytest.mark.parametrize(("compile", "message"), REFUSED)
def test_arguments_that_cannot_be_are_refused(compile, message):
    with pytest.raises(ValueError, match=message):
        PipelineSettings(compile=compile)
    for accepted in ACCEPTED:
        assert PipelineSettings(compile=accepted).compile == accepted


@pytest.mark.parametrize("wrap", [False, True])
def test_parts_that_their_owner_has_compiled_with_cuda_graphs_are_refused(wrap):
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    if wrap:
        module[1] = torch.compile(module[1], mode="reduce-overhead")
    else:
        module[1].compile(mode="reduce-overhead")
    with pytest.raises(ValueError, match="^1 is compiled with CUDA graphs"):
        refuse_cuda_graphs(module)
