"""Steps that call blocks several times: two views, a policy with a reference, a shared layer."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_pipeoffload.runtime.cut import StepTrace
from lightning_pipeoffload.schedule import Kind, build
from tests.support.comparison import assert_trains_exactly, train_plain
from tests.support.in_process import InProcessPipeline
from tests.support.pairs import some
from tests.support.small_modules import Outcome, assert_same, call_step, through


class Twice(nn.Module):
    """A step over an embedding, blocks, a projector, and a head that may be tied."""

    def __init__(self, function, blocks=None, dropout=0.0):
        super().__init__()
        self.function = function
        self.embed = nn.Linear(4, 4)
        make = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout)) for _ in range(6)]
        self.blocks = nn.ModuleList(make if blocks is None else blocks)
        self.projector = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(dropout))
        self.head = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def step(self, x):
        return self.function(self, x)

    def training_step(self, x, index):
        return self.step(x)

    def encode(self, x):
        return through(self.blocks, self.embed(x))


def two_views(m, x):
    a, b = m.projector(m.encode(x)), m.projector(m.encode(x.flip(-1)))
    similar = functional.normalize(a) @ functional.normalize(b).T * m.scale.exp()
    return functional.cross_entropy(similar, torch.arange(len(x))) + a.mean()


def residual_and_skip(m, x):
    def encode(x):
        first = m.embed(x)
        skip = m.blocks[1](m.blocks[0](first))
        x = through(m.blocks[2:4], skip) + first
        return through(m.blocks[4:], x + m.scale * skip) + skip

    return (encode(x) - encode(2 * x).detach()).pow(2).mean() + encode(x - 1).mean()


def tied(m, x):
    def logits(x):
        x = functional.linear(x, m.embed.weight)
        return functional.linear(through(m.blocks, x), m.embed.weight)

    chosen, rejected = logits(x), logits(-x)
    return -functional.logsigmoid(chosen.sum(-1) - rejected.sum(-1)).mean()


def preference(m, x):
    """DPO with the policy itself as the reference."""
    with torch.no_grad():
        reference = m.head(m.encode(x)) - m.head(m.encode(-x))
    policy = m.head(m.encode(x)) - m.head(m.encode(-x))
    return -functional.logsigmoid(policy - 0.5 * reference).mean()


def reference_after(m, x):
    policy = m.head(m.encode(x))
    with torch.no_grad():
        reference = m.head(m.encode(x + 1))
    return (policy - reference).pow(2).mean()


def block_by_block(m, x):
    a, b = m.embed(x), m.embed(-x)
    for block in m.blocks:
        a, b = block(a), block(b)
    return (a * b).mean()


def shared_layers(m, x):
    x = m.embed(x)
    for block in m.blocks:
        for _ in range(3):
            x = x + block(x)
    return m.head(x).pow(2).mean()


def one_view_is_shorter(m, x):
    a = m.encode(x)
    b = through(m.blocks[:2], m.embed(-x))
    c = through(m.blocks[:4:2], m.embed(2 * x))
    return (m.head(a) - b * c.tanh()).pow(2).mean()


STEPS = [
    two_views, residual_and_skip, tied, preference, reference_after, block_by_block,
    shared_layers, one_view_is_shorter,
]  # fmt: skip
PLANS = [
    ("zb_h1", 2),
    ("zb_v", 2),
    ("1f1b", 3),
    ("gpipe", 6),
    ("1f1b", 1),
    ("zb_v", 3),
    ("po_h", 3),
]
OPTIONS = itertools.cycle(itertools.product(["none", "full", "cheap"], [0.0, 0.3]))
ROWS = [(*row, *next(OPTIONS)) for row in itertools.product(STEPS, PLANS)]


class Remembering(nn.Linear):
    """Adds what the block before the last one has put into a list."""

    def forward(self, x, seen):
        x = super().forward(x).tanh()
        if len(seen) > 1:
            x = x + seen[-2]
        seen.append(x)
        return x


def filled_lists(m, x):
    def encode(x):
        seen = []
        for block in m.blocks:
            x = block(x, seen)
        return x

    with torch.no_grad():
        reference = encode(m.embed(x) + 0.1)
    return (encode(m.embed(x)) - reference).pow(2).mean()


@pytest.mark.parametrize("plan", [("zb_v", 2), ("1f1b", 4)])
def test_each_pass_over_the_blocks_fills_a_list_of_its_own(plan):
    module = Twice(filled_lists, [Remembering(4, 4) for _ in range(6)])
    assert_trains_exactly(module, torch.randn(8, 4).double(), *plan)


@pytest.mark.parametrize(("step", "plan", "recompute", "dropout"), some(ROWS, 20))
def test_a_step_that_calls_blocks_again_trains_as_on_one_device(step, plan, recompute, dropout):
    torch.manual_seed(1)
    module, batch = Twice(step, dropout=dropout), torch.randn(8, 4).double()
    pipeline = InProcessPipeline(module, build(*plan, 4), call_step, recompute=recompute)
    found = Outcome(pipeline.run(batch, 2), pipeline.named_gradients())
    if dropout:  # the masks are those of one rank
        alone = InProcessPipeline(module, build("1f1b", 1, 4), call_step)
        expected = Outcome(alone.run(batch, 2), alone.named_gradients())
    else:
        expected = train_plain(module, batch, 2)
    assert_same(found, expected)


def test_one_layer_that_all_calls_share_is_on_one_rank():
    module, batch = Twice(shared_layers, [nn.Linear(4, 4)]), torch.randn(8, 4).double()
    pipeline = InProcessPipeline(module, build("1f1b", 1, 4), call_step, blocks="blocks")
    found = Outcome(pipeline.run(batch, 2), pipeline.named_gradients())
    assert_same(found, train_plain(module, batch, 2))
    with pytest.raises(ValueError, match="blocks has 1 blocks for 2 stages; use fewer devices"):
        InProcessPipeline(module, build("1f1b", 2, 4), call_step, blocks="blocks")


def loss_network(m, x):
    """A frozen network, here the last blocks, compares a generator's output with its goal."""
    m.blocks[3:].requires_grad_(False)
    found, goal = (through(m.blocks[3:], each) for each in (through(m.blocks[:3], m.embed(x)), x))
    return (m.head(found) - m.projector(goal)).pow(2).mean()


def two_heads(m, x):
    """A decoder, here the last blocks, is run for two heads."""
    encoded = through(m.blocks[:2], m.embed(x))
    first, second = (through(m.blocks[2:], each) for each in (encoded, m.scale * encoded))
    return m.head(first).pow(2).mean() + m.projector(second).mean()


COMPILED = {"compile": {"backend": "aot_eager"}}
BY_INDUCTOR = {"compile": True}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [("zb_h1", 2), ("zb_v", 2), ("1f1b", 3)])
@pytest.mark.parametrize(
    ("step", "options"),
    [
        *[(loss_network, {}), (two_heads, {}), (two_views, COMPILED), (preference, COMPILED)],
        *[(two_views, BY_INDUCTOR), (preference, BY_INDUCTOR)],
    ],
)
def test_parts_of_a_chain_and_compiled_blocks_may_be_called_again(step, options, plan):
    torch.manual_seed(1)
    module, batch = Twice(step), torch.randn(8, 4).double()
    pipeline = InProcessPipeline(module, build(*plan, 4), call_step, blocks="blocks", **options)
    found = Outcome(pipeline.run(batch, 2), pipeline.named_gradients())
    assert_same(found, train_plain(module, batch, 2))
    for rank in pipeline.ranks:
        rank.detach()


def test_all_calls_are_in_one_message_and_their_weights_on_one_stage():
    module, batch = Twice(two_views), torch.randn(8, 4).double()
    pipeline = InProcessPipeline(module, build("zb_h1", 2, 4), call_step, blocks="blocks")
    transport, sent = pipeline.executors[0].transport, []
    send = transport.send

    def note(action, peer, tensors):
        sent.append((action.kind, sum(tensor.nbytes for tensor in tensors)))
        send(action, peer, tensors)

    transport.send = note
    pipeline.run(batch, 2)
    first, last = (rank.stages[index] for index, rank in enumerate(pipeline.ranks))
    (record,) = {id(m.record): m.record for m in pipeline.executors[0].microbatches}.values()
    assert record.calls.blocks == (*range(6), *range(6))
    assert [spec.shape for spec in record.message_specs_before(3)] == [(2, 4), (2, 4)]
    planned = pipeline.ranks[0].cut.segment_costs.sent[3]
    assert planned == 2 * 2 * 4 * batch.itemsize
    assert Counter(sent) == {(Kind.SEND_F, planned): 4, (Kind.SEND_B, planned): 4}
    owned = [{*rank.tensors.local_tensors()} for rank in pipeline.ranks]
    assert "embed.weight" in owned[0] - owned[1]
    assert {"projector.0.weight", "projector.1.running_mean", "scale"} <= owned[1] - owned[0]
    assert pipeline.ranks[0].cut.costs.forward[0] == pytest.approx(3.5, rel=0.2)


class Momentum(nn.Module):
    """BYOL: a copy without gradients, called before the original or after it."""

    def __init__(self, is_first, num_views):
        super().__init__()
        whole = Twice(two_views)
        self.online = nn.ModuleList([whole.embed, whole.blocks, whole.projector])
        self.target, self.predictor = copy.deepcopy(self.online), whole.head
        self.is_first, self.num_views = is_first, num_views

    def training_step(self, x, index):
        return self.step(x)

    def step(self, x):
        return sum(self.compare(x, x * scale) for scale in (2, -1)[: self.num_views])

    def compare(self, x, y):
        if self.is_first:
            return self.distance(goal=self.goal(y), found=self.found(x))
        return self.distance(self.found(x), self.goal(y))

    def distance(self, found, goal):
        return -functional.cosine_similarity(found, goal).mean()

    def found(self, x):
        return self.predictor(self.encode(self.online, x))

    @torch.no_grad()
    def goal(self, x):
        return self.encode(self.target, x)

    def encode(self, parts, x):
        embed, blocks, projector = parts
        return projector(through(blocks, embed(x)))


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("num_views", "plan", "split"),
    [(1, ("1f1b", 3), "auto"), (2, ("zb_v", 2), "even"), (1, ("1f1b", 3), [2, 6, 8])],
)
def test_a_momentum_encoder_has_the_stages_of_its_original(is_first, num_views, plan, split):
    torch.manual_seed(1)
    module, batch = Momentum(is_first, num_views), torch.randn(8, 4).double()
    pipeline = InProcessPipeline(module, build(*plan, 4), call_step, split=split)
    found = Outcome(pipeline.run(batch, 2), pipeline.named_gradients())
    assert_same(found, train_plain(module, batch, 2))
    for rank in pipeline.ranks:
        names = [name.partition(".") for name in rank.tensors.local_tensors()]
        online, target = ({rest for top, _, rest in names if top == part} for part in PARTS)
        assert online == target != set()


PARTS = "online", "target"


@pytest.mark.parametrize("is_first", [False, True])
def test_a_split_that_parts_a_block_from_its_copy_is_refused(is_first):
    options = {"split": [4, 7, 5]}
    pipeline = InProcessPipeline(Momentum(is_first, 1), build("1f1b", 3, 4), call_step, **options)
    message = r"split=\[4, 7, 5\] parts {} from {}, .* use split=\[4, 6, 6\]"
    names = [rf"{part}\.1\.4" for part in (PARTS if is_first else PARTS[::-1])]
    with pytest.raises(ValueError, match=message.format(*names)):
        pipeline.run(torch.randn(8, 4).double(), 2)


def test_blocks_that_have_other_names_too_may_be_called_again():
    torch.manual_seed(1)
    module, batch = Twice(two_views), torch.randn(8, 4).double()
    blocks = module.blocks
    del module.blocks
    for index, block in enumerate(blocks):
        module.add_module(f"layer{index}", block)
    module.blocks = blocks
    pipeline = InProcessPipeline(module, build("zb_h1", 2, 4), call_step, blocks="blocks")
    found = Outcome(pipeline.run(batch, 2), pipeline.named_gradients())
    assert len(found.gradients) == len([*module.parameters()])
    plain = train_plain(module, batch, 2)
    gradients = {name: plain.gradients[name] for name in found.gradients}
    assert_same(found, Outcome(plain.losses, gradients))


def own_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):  # which casts each weight once
        a, b = m.head(m.encode(x)), m.head(m.encode(-x))
    return (a.float() * b.float()).mean()


def test_a_step_with_an_autocast_of_its_own_may_call_blocks_again():
    torch.manual_seed(1)
    module, batch = Twice(own_autocast).float(), torch.randn(8, 4)
    found = []
    for plan in (("1f1b", 1), ("zb_h1", 2)):
        pipeline = InProcessPipeline(module, build(*plan, 4), call_step, blocks="blocks")
        found.append(Outcome(pipeline.run(batch, 2), pipeline.named_gradients()))
    assert_same(found[1], found[0], 0)
    assert_same(found[1], train_plain(module, batch, 2), 2**-8)  # both views' sum is in bfloat16


def test_a_further_shape_is_traced_once(monkeypatch):
    traced, trace = [], StepTrace.trace

    def note(self, run):
        traced.append(self.record.calls.blocks)
        return trace(self, run)

    monkeypatch.setattr(StepTrace, "trace", note)
    steps = two_views, lambda m, x: two_views(m, x) if len(x) > 2 else m.encode(x).mean()
    twice, once = (*range(6), *range(6)), (*range(6),)
    expected = [twice], [twice, once]  # the second step calls them once in a smaller microbatch
    for step, further in zip(steps, expected, strict=True):
        pipeline = InProcessPipeline(Twice(step), build("1f1b", 1, 2), call_step, blocks="blocks")
        pipeline.run(torch.randn(8, 4).double(), 4)
        traced.clear()
        pipeline.run(torch.randn(4, 4).double(), 2)
        assert traced == further


def fed_back(m, x):
    return m.head(m.encode(m.encode(x))).mean()


def another_order(m, x):
    return (m.encode(x) * through(m.blocks[::-1], m.embed(x))).mean()


def back_and_forth(m, x):
    x = m.blocks[1](m.blocks[0](m.embed(x)))
    y = m.blocks[1](x)
    return m.head(through([m.blocks[0], *m.blocks[2:]], x) + y).mean()


def decided_by_values(m, x):
    a = m.encode(x)
    return (m.encode(-x) if a.sum() > 0 else a).mean()


def written_in_place(m, x):
    skip = m.embed(x)
    skip += through(m.blocks, skip)
    return (skip * m.encode(-x)).mean()


REFUSED = {
    fed_back: r"calls blocks\.0 again \(.*with what blocks\.5 has computed \(.*; in a pipeline",
    another_order: r"calls blocks\.4 again \(.*with what blocks\.5 has computed",
    back_and_forth: r"calls blocks\.0 again \(.*with what blocks\.1 has computed",
    decided_by_values: r"blocks\.0 \(.*, and called no more blocks when it ran without values",
    written_in_place: r"writes in place \(.*skip \+= .* and calls blocks\.0 again",
}


@pytest.mark.parametrize("step", REFUSED)
def test_calls_that_need_what_comes_later_are_refused(step):
    pipeline = InProcessPipeline(Twice(step), build("zb_h1", 2, 4), call_step, blocks="blocks")
    with pytest.raises(ValueError, match=REFUSED[step]):
        pipeline.run(torch.randn(8, 4).double(), 2)
