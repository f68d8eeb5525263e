"""The blocks that a step calls are found; the blocks= that a refusal names train."""

import ast
from contextvars import ContextVar
from functools import partial

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.cut import StepTrace
from lightning_pipeoffload.runtime.run import split_into_microbatches
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import (
    Outcome,
    assert_same,
    call_step,
    linear_blocks,
    loss_of,
    run_pipeline,
    run_plain,
    through,
)


class Parts(nn.Module):
    """A step over layers, or containers of layers, with these names, and a head."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)
        self.head = nn.Linear(4, 1)

    def step(self, x):
        return self.function(self, x)


def dict_backwards(m, x):
    return loss_of(m, through([m.layers["b"], m.layers["c"], m.layers["a"]], x))


def below_a_frozen_tower(m, x):
    with torch.no_grad():
        x = through(m.tower, x)
    return loss_of(m, through(m.trained, x))


def decoder_first(m, x):
    return loss_of(m, through([*m.decoder, *m.encoder], x))


def two_towers(m, x):
    return loss_of(m, through(m.encoder, x) * through(m.decoder, 2 * x))


def with_a_copy(m, x):
    with torch.no_grad():
        goal = through(m.decoder, -x)
    return loss_of(m, through(m.encoder, x) * goal)


def stages(m, x):
    for number in range(1, 4):
        x = getattr(m, f"layer{number}")(x)
    return loss_of(m, x)


def norms_between(m, x):
    for norm, layer in zip(m.norms, m.layers, strict=False):
        x = layer(norm(x))
    return loss_of(m, through(m.layers[:1], x))


def attributes(m, x):
    return loss_of(m, m.second(m.first(x).relu()))


def one_twice_and_losses(m, x):
    loss = loss_of(m, through([*m.layers, m.layers[0]], x))
    m.losses[7] = 1.0  # of a list that is too long to be compared
    return loss


def with_losses():
    module = Parts(one_twice_and_losses, layers=listed(4))
    module.losses = [0.0] * 2000
    return module


def listed(count=3):
    return nn.ModuleList(linear_blocks(count))


def two_chains(step):
    return lambda: Parts(step, encoder=listed(), decoder=listed())


def of_a_dict():
    return Parts(dict_backwards, layers=nn.ModuleDict(zip("abc", linear_blocks(3), strict=True)))


def of_attributes():
    return Parts(attributes, first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def of_stages():
    layers = {f"layer{n}": nn.Sequential(*linear_blocks(2)) for n in range(1, 4)}
    return Parts(stages, **layers)


def of_a_tower():
    tower = listed(6).requires_grad_(False)
    return Parts(below_a_frozen_tower, tower=tower, trained=listed())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class Level(nn.Module):
    """A stage of Swin or ConvNeXt, whose blocks are inside."""

    def __init__(self, depth):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x):
        return self.blocks(self.norm(x))


def of_levels():
    return Parts(lambda m, x: loss_of(m, m.levels(x)), levels=nn.Sequential(*map(Level, (2, 6, 2))))


def of_pairs():
    """x-transformers' list of lists, with an entry None."""
    entries = [[nn.ModuleList([nn.LayerNorm(4), None]), Block(), nn.Identity()] for _ in range(3)]

    def step(m, x):
        for (norm, _), block, residual in m.pairs:
            x = residual(block(norm(x)) + x)
        return loss_of(m, x)

    return Parts(step, pairs=nn.ModuleList(map(nn.ModuleList, entries)))


def with_a_small_head():
    head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return Parts(
        lambda m, x: loss_of(m, m.small(through(m.layers, x))),
        layers=nn.ModuleList(Block() for _ in range(4)),
        small=head,
    )


def names(container, count):
    return [f"{container}.{index}" for index in range(count)]


FOUND = [
    (of_a_dict, ["layers.b", "layers.c", "layers.a"]),
    (two_chains(decoder_first), names("decoder", 3) + names("encoder", 3)),
    (two_chains(two_towers), names("encoder", 3) + names("decoder", 3)),
    (of_stages, names("layer1", 2) + names("layer2", 2) + names("layer3", 2)),
    (of_levels, [f"levels.{i}.blocks.{j}" for i, n in enumerate((2, 6, 2)) for j in range(n)]),
    (of_a_tower, names("tower", 6) + names("trained", 3)),
    (of_pairs, [f"pairs.{i}.{part}" for i in range(3) for part in ("0.0", "1", "2")]),
    (with_a_small_head, names("layers", 4)),
    (
        two_chains(with_a_copy),
        [f"{part}.{i}" for i in range(3) for part in ("decoder", "encoder")],
    ),
]


@pytest.mark.parametrize(("make", "blocks"), FOUND, ids=range(len(FOUND)))
def test_the_blocks_that_a_step_calls_are_found(make, blocks):
    module, batch = make().double(), torch.randn(4, 4).double()
    pipeline = InProcessPipeline(module, build("1f1b", 3, 4), call_step)
    outcome = Outcome(pipeline.run(batch, 1), pipeline.named_gradients())
    assert pipeline.ranks[0].chain.names == blocks
    assert_same(outcome, run_plain(module, batch, 1))


def with_dropout():
    module = of_stages()
    for number in range(1, 4):
        getattr(module, f"layer{number}")[1] = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    return module


def test_masks_depend_on_the_module_and_its_training_step_alone():
    module, batch, found = with_dropout().double(), torch.randn(4, 4).double(), []
    for count in (1, 2, 3, 6):
        pipeline = InProcessPipeline(module, build("1f1b", count, 4), call_step)
        if count == 3:  # a validation calls other blocks before
            for rank in pipeline.ranks:
                rank.module.function = lambda m, x: loss_of(m, m.layer2(m.layer1(x)))
                with torch.no_grad():
                    split_into_microbatches(
                        rank, batch, 1, partial(called, rank.module), "validation_step", 0
                    )
                rank.module.function = stages
        found.append([float(loss) for loss in pipeline.run(batch, 1, seed=3)])
    assert found == [found[0]] * 4


class TwiceInEvaluations(Level):
    def forward(self, x):
        x = super().forward(x)
        return x if torch.is_grad_enabled() else super().forward(x)


def test_blocks_that_were_compiled_for_a_validation_may_be_cut_in_training():
    levels = nn.Sequential(*map(TwiceInEvaluations, (2, 6, 2)))
    module, batch = Parts(lambda m, x: loss_of(m, m.levels(x)), levels=levels), torch.randn(4, 4)
    pipeline = InProcessPipeline(module, build("1f1b", 3, 4), call_step, compile=True)
    for rank in pipeline.ranks:
        cut = partial(split_into_microbatches, rank, batch, 1, partial(called, rank.module))
        with torch.no_grad():
            cut("validation_step", 0)
        assert rank.chain.names == names("levels", 3)
        cut("training_step", 0)
        assert rank.chain.names == FOUND[4][1]
        rank.detach()


def called(module, batch, call):
    return module.step(batch)


def test_a_resumed_fit_has_the_blocks_it_was_saved_with():
    pipeline = InProcessPipeline(of_stages(), build("1f1b", 3, 4), call_step)
    saved = [f"layer{number}" for number in range(1, 4)]
    for rank in pipeline.ranks:
        rank.use_saved_blocks(["a.module.that.is.gone"])
        rank.use_saved_blocks(saved)
    pipeline.run(torch.randn(4, 4), 1)
    for rank in pipeline.ranks:
        rank.use_saved_blocks(names("layer1", 2))  # once the module is split, it is cut no more
    assert [rank.called_blocks for rank in pipeline.ranks] == [saved] * 3


def one_twice_and_a_branch(m, x):
    x = m.others[0](through([*m.layers, m.layers[0]], x).repeat(100, 1))
    return loss_of(m, m.others[1](x if x.sum() > 0 else -x))


def test_each_chain_is_tried_once_before_others_are_proposed(monkeypatch):
    tried, trace = [], StepTrace.trace

    def note(self, run):
        tried.append(self.chain.names)
        return trace(self, run)

    monkeypatch.setattr(StepTrace, "trace", note)
    module = Parts(one_twice_and_a_branch, layers=listed(4), others=listed(2))
    proposal = r'before others\.1: .*; it could be cut with blocks=\["layers\.1", "layers\.2", '
    with pytest.raises(ValueError, match=proposal):
        run_pipeline(module, build("1f1b", 2, 4), torch.randn(4, 4), 1)
    # Where a block is called again, once more after a run for the order of the calls.
    others, layers = names("others", 2), names("layers", 4)
    joined = [*layers, *others]
    before = [[], others, joined, [], joined, layers, [], layers]
    assert tried[: len(before)] == before
    assert tried[-1] == layers[1:]


KEPT: ContextVar[list | None] = ContextVar("kept", default=None)


def keep(block, args, output):
    if (kept := KEPT.get()) is not None:
        kept.append(output)


def with_one_kept(m, x):
    token = KEPT.set([])
    x = through(m.layers, x)
    chosen = KEPT.get()[2]
    KEPT.reset(token)
    return loss_of(m, x + chosen)


@pytest.mark.parametrize("count", [2, 6])
def test_a_list_that_hooks_fill_has_an_entry_of_each_block(count):
    module, batch = Parts(with_one_kept, layers=listed(6)).double(), torch.randn(4, 4).double()
    for layer in module.layers:
        layer.register_forward_hook(keep)
    outcome = run_pipeline(module, build("1f1b", count, 4), batch, 1)
    assert_same(outcome, run_plain(module, batch, 1))


# What each message names, until what it names trains.
NAMED = [
    (of_attributes, [["first", "second", "head"]]),
    (with_losses, [names("layers", 4)[1:]]),
    (lambda: Parts(norms_between, norms=listed(), layers=listed(4)), ["norms"]),
]


@pytest.mark.parametrize(("make", "named"), NAMED)
def test_the_named_blocks_train(make, named):
    module, batch = make().double(), torch.randn(4, 4).double()
    schedule = build("1f1b", 2, 4)
    blocks = None
    for following in named:
        with pytest.raises(ValueError, match="blocks=") as refused:
            run_pipeline(module, schedule, batch, 1, blocks=blocks)
        blocks = ast.literal_eval(str(refused.value).rpartition("blocks=")[2])
        assert blocks == following
    assert_same(
        run_pipeline(module, schedule, batch, 1, blocks=blocks), run_plain(module, batch, 1)
    )
