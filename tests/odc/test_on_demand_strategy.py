"""A fit with on-demand communication is that of one process; what cannot be is refused."""

import gc
import os
import re
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload import Minibatch
from lightning_pipeoffload.odc import OnDemandRun
from tests.support import on_demand_fits as fits
from tests.support.on_demand_fits import Texts, assert_same, fit_rank, made, plain_fit, whole

FLOAT = partial(made, dtype=torch.float32)


def as_float16():
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
# Of the fit, of the plain loop, and how far they may be apart; microbatches of each rank.
WAYS = {
    "two ranks": ({}, {}, 1e-12),
    "four ranks": ({}, {}, 1e-12, (3, 1, 2, 0)),
    "ranks without a microbatch": ({}, {}, 1e-12, (0, 0, 1, 4)),
    "groups of ranks repeat the parameters": (
        {"options": {"group_size": 2}},
        {},
        1e-12,
        (2, 1, 0, 1),
    ),
    "one rank": ({}, {}, 1e-12, (3,)),
    "float32": ({"make": FLOAT}, {"make": FLOAT}, 1e-5),
    "deterministic": ({"options": {"deterministic": True}}, {}, 1e-12),
    "accumulated": ({"accumulate_grad_batches": 2}, {"accumulate": 2}, 1e-12),
    "one group, unclipped": (
        {"options": {"blocks": []}, "gradient_clip_val": None},
        {"clip": None},
        1e-12,
    ),
    "bf16-mixed": (
        {"make": FLOAT, "precision": "bf16-mixed"},
        {"make": FLOAT, "autocast": torch.bfloat16},
        2e-2,
    ),
    "16-mixed": (
        {"make": FLOAT, "call": as_float16},
        {"make": FLOAT, "autocast": torch.float16},
        2e-2,
    ),
    "gathered in bfloat16": (
        {"make": FLOAT, "options": {"mp_policy": BF16}},
        {"make": FLOAT},
        5e-2,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_weights_are_those_of_one_process(ranks, way):
    ours, plain, relative, *counts = WAYS[way]
    (counts,) = counts or [(3, 1)]
    expected = plain_fit(counts, **plain)
    for rank in ranks(len(counts)).run(partial(fit_rank, counts, **ours)):
        assert_same(rank, expected, relative)
        if relative < 1e-6 and not ours:
            assert rank["logged"] == pytest.approx(expected["logged"])


def fit_deterministic():
    return fit_rank((2, 2), options={"deterministic": True})


def test_the_deterministic_mode_is_fsdp2_to_the_bit(ranks):
    pairs = zip(ranks(2).run(fit_deterministic), ranks(2).run(fits.fsdp2_fit), strict=True)
    for ours, theirs in pairs:
        assert_same(ours, theirs, relative=0.0)


class Uneven(Texts):
    """Uses one parameter in some microbatches only, one never, and trains one not at all."""

    def __init__(self):
        super().__init__()
        self.never = nn.Parameter(torch.ones(3, 3).double())
        self.rare = nn.Parameter(torch.ones(5).double())
        self.blocks[1].linear.bias.requires_grad_(False)

    def loss(self, tokens):
        loss = super().loss(tokens)
        return loss + (self.rare**2).sum() if len(tokens) > 5 else loss


class Thawing(Texts):
    """Freezes and unfreezes parameters between minibatches."""

    def __init__(self):
        super().__init__(tie=False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.embed.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
        elif batch_idx == 3:
            self.blocks[0].requires_grad_(True)


class Shared(Texts):
    """Two blocks are one, which the root has to gather."""

    def __init__(self):
        super().__init__()
        self.blocks[2].linear.weight = self.blocks[0].linear.weight


class Sharded(Texts):
    """Shards itself, as for Lightning's own strategy."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])
        register_fsdp_forward_method(self, "training_step")


class Checkpointed(Texts):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Skipping(Texts):
    """Leaves some microbatches out."""

    def training_step(self, batch, batch_idx):
        return None if len(batch) > 6 else super().training_step(batch, batch_idx)

    def loss(self, tokens):
        return super().loss(tokens) * (len(tokens) <= 6)


class Signs(torch.optim.Optimizer):
    """A user's own, which knows nothing of shards."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad.sign(), alpha=-0.01)
        return loss


class Own(Texts):
    def configure_optimizers(self):
        return Signs(self.parameters())


class Optimized(Texts):
    """Trains its matrices by an optimizer of torch's, which looks at them as a whole."""

    def __init__(self, name, **options):
        super().__init__()
        self.kind, self.options = getattr(torch.optim, name), options
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.ndim == 2)

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        return self.kind(matrices, lr=1e-2, **self.options)


def optimized(name, **options):
    return partial(made, Optimized, name=name, **options)


class Penalized(Texts):
    def loss(self, tokens):
        return super().loss(tokens) + (self.blocks[0].linear.weight ** 2).sum()


MODULES = (Uneven, Thawing, Shared, Sharded, Checkpointed, Skipping, Own)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((partial(made, kind), {}) for kind in MODULES),
        (partial(made, Penalized), {"blocks": []}),  # where all is gathered at once
        (optimized("Muon"), {}),  # which looks at whole matrices
        pytest.param(
            *(optimized("Adafactor", foreach=True), {}),
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12", reason="torch shards no _foreach_lerp_ before 2.12"
            ),
        ),
    ],
)
def test_modules_and_optimizers(ranks, make, options):
    expected = plain_fit((3, 1), make)
    for rank in ranks(2).run(partial(fit_rank, (3, 1), make=make, options=options)):
        assert_same(rank, expected)


class Closures(Texts):
    """Lets the optimizer decide by losses, which it asks for again and again."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


def plain_closures():
    module = made(Closures)
    optimizer = module.configure_optimizers()
    for minibatch in fits.minibatches((3, 1), 2):

        def closure(minibatch=minibatch):
            optimizer.zero_grad()
            pairs = [(t, w) for part in minibatch for t, w in zip(part, part.weights, strict=True)]
            loss = sum(module.loss(text) * weight for text, weight in pairs)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    return {name: whole(p) for name, p in module.named_parameters()}


def test_an_optimizer_sees_losses_as_they_are_however_often_it_asks(ranks):
    expected = {"weights": plain_closures(), "gradients": []}
    options = {"max_steps": 2, "gradient_clip_val": None}
    for rank in ranks(2).run(partial(fit_rank, (3, 1), make=partial(made, Closures), **options)):
        assert_same({**rank, "gradients": []}, expected, 1e-10)


class Counting(Texts):
    """Changes buffers in its steps, one of them by another tensor in its place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", None)
        self.last = torch.zeros(1)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.last = batch.double()
        return super().training_step(batch, batch_idx)


def count(counts):
    module = made(Counting)
    fit_rank(counts, make=lambda: module)
    return float(module.steps), module.last.tolist()


@pytest.mark.parametrize(("counts", "first"), [((3, 1), 0), ((0, 2), 1)])
def test_buffers_are_those_of_the_first_rank_that_changes_them(ranks, counts, first):
    last = fits.minibatches(counts)[-1][first][-1]
    assert ranks(2).run(count, counts) == [(counts[first] * 4.0, last.double().tolist())] * 2


def fit_twice():
    module = made()
    fit_rank((3, 1), make=lambda: module)
    module.gradients.clear()
    return fit_rank((3, 1), make=lambda: module)


def test_a_second_trainer_goes_on(ranks):
    module = made()
    plain_fit((3, 1), lambda: module)
    expected = plain_fit((3, 1), lambda: module)
    for rank in ranks(2).run(fit_twice):
        assert_same(rank, expected)


def runs_left_by_a_fit():
    module = made()
    fit_rank((3, 1), make=lambda: module)
    gc.collect()
    return module.trainer.global_step, sum(isinstance(o, OnDemandRun) for o in gc.get_objects())


def test_nothing_of_a_run_is_left_in_the_trainer(ranks):
    (steps, left), _ = ranks(2).run(runs_left_by_a_fit)
    assert steps
    assert not left


def fit_unlike():
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    module = Texts()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    return before, fit_rank((1, 1), make=lambda: module, max_steps=0)["weights"]


def test_all_ranks_begin_with_the_weights_of_the_first(ranks):
    (first, begun), (_, other) = ranks(2).run(fit_unlike)
    for name, value in first.items():
        assert torch.equal(begun[name], value)
        assert torch.equal(other[name], value)


class Overflowing(Texts):
    """Has an infinite gradient once, in what one rank owns."""

    has_overflowed = False

    def on_after_backward(self):
        if fits.rank_of() == 1 and not self.has_overflowed:
            self.blocks[0].linear.weight.grad.to_local().fill_(float("inf"))
        self.has_overflowed = True


def overflow():
    module = made(Overflowing, dtype=torch.float32)
    options = as_float16()
    fit_rank((3, 1), make=lambda: module, gradient_clip_val=None, **options)
    optimizer = module.trainer.optimizers[0]
    steps = {int(optimizer.state[p]["step"]) for p in module.parameters()}
    return options["plugins"][0].scaler.get_scale(), steps


def test_all_ranks_skip_the_step_in_which_one_has_overflowed(ranks):
    assert ranks(2).run(overflow) == [(8.0, {3})] * 2


def fit_nothing():
    module = made()
    before = module.blocks[0].scale.detach().clone()
    fits.trainer(2, {}).fit(module, fits.Loader([Minibatch(), Minibatch()]))
    return bool((whole(module.blocks[0].scale) == before).all())


def test_a_minibatch_without_any_microbatch_changes_nothing(ranks):
    assert ranks(2).run(fit_nothing) == [True, True]


def test_it_has_a_name():
    assert "odc" in StrategyRegistry.available_strategies()


# Refusals


class Stepping(Texts):
    """Has a step of its own."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def training_step(self, batch, batch_idx):
        return self.step(self, batch)


class PartSharded(Texts):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class LateHook(Texts):
    def on_fit_start(self):
        self.blocks[0].scale.register_hook(lambda gradient: gradient * 2)


class Iterating(Texts):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


def log_a_shard(module, batch):
    module.log("norm", module.blocks[0].linear.weight.norm())
    return module.loss(batch)


def write(module, batch):
    with torch.no_grad():
        module.blocks[1].scale.mul_(0.9)
    return module.loss(batch)


def of(kind, **options):
    """Fit a module of this kind."""
    return lambda: fit_rank((1, 1), make=partial(made, kind, **options), gradient_clip_val=None)


def with_step(step):
    return of(Stepping, step=step)


def changed(change, **options):
    """Fit a module that was changed."""

    def make():
        module = made(**options)
        change(module)
        return module

    return lambda: fit_rank((1, 1), make=make, gradient_clip_val=None)


def given(**options):
    return lambda: fit_rank((1, 1), **options)


def batches(*made_batches):
    return lambda: fits.trainer(2, {}).fit(made(), fits.Loader(made_batches))


class Stream(fits.Loader):
    """Yields minibatches, and does not say how many."""

    __len__ = None


def unlike(loader, *counts):
    """Fit with another number of minibatches on each rank."""

    def run():
        own = [minibatch[fits.rank_of()] for minibatch in fits.minibatches((1, 1))]
        fits.trainer(2, {}).fit(made(), loader(own[: counts[fits.rank_of()]]))

    return run


HOOKED = "blocks.0.scale has a hook on its gradient"
REFUSED = {
    "penalty": (of(Penalized), "uses a parameter of a block outside"),
    "norm": (with_step(log_a_shard), r"self.log\('norm', ...\) in training_step was given"),
    "writing": (with_step(write), "training_step has changed blocks.1.scale"),
    "iterator": (of(Iterating), "dataloader_iter.*does not go with strategy='odc'"),
    "dict": (
        with_step(lambda module, batch: {"other": module.loss(batch)}),
        "returned a dict with 'other'; it needs 'loss'",
    ),
    "collective": (
        with_step(lambda module, batch: module.all_gather(module.loss(batch)).mean()),
        r"all_gather\(\) inside a step would wait",
    ),
    "part": (of(PartSharded), "embed.weight is not sharded"),
    "hook of a hook": (of(LateHook), HOOKED),
    "hook": (changed(lambda m: m.blocks[0].scale.register_hook(lambda g: g * 2)), HOOKED),
    "late hook": (
        changed(lambda m: m.blocks[0].scale.register_post_accumulate_grad_hook(lambda p: None)),
        HOOKED,
    ),
    "optimizer": (of(Optimized, name="Rprop"), "Rprop does not go with strategy='odc'"),
    "manual": (
        changed(lambda m: setattr(m, "automatic_optimization", False)),
        "manual optimization does not go with strategy='odc'",
    ),
    "layer": (
        changed(lambda m: setattr(m, "norm", nn.SyncBatchNorm(3))),
        "norm is a SyncBatchNorm",
    ),
    "sparse": (
        changed(lambda m: setattr(m.embed, "sparse", True), tie=False),
        "embed makes sparse gradients",
    ),
    "dtypes": (
        changed(lambda m: m.blocks[0].linear.float()),
        "blocks.0 has parameters of float32 and float64",
    ),
    "argument": (given(options={"blocks": "block"}), "did you mean 'blocks'"),
    "group": (given(options={"group_size": 1}), "group_size=1 ranks"),
    "stochastic average": (
        lambda: fit_rank((1, 1), callbacks=[StochasticWeightAveraging(1e-2)]),
        "StochasticWeightAveraging averages a copy of the module",
    ),
    "moving average": (
        lambda: fit_rank((1, 1), callbacks=[EMAWeightAveraging()]),
        "EMAWeightAveraging averages a copy of the module",
    ),
    "several loaders": (
        batches({"one": Minibatch(), "other": Minibatch()}),
        "a batch of several loaders contains a minibatch",
    ),
    "no mean": (batches(Minibatch([torch.arange(4)], [1.0])), "add up to 2 over the ranks"),
    "uneven": (unlike(fits.Loader, 4, 3), "global ranks 0 to 1 have 4, 3 minibatches in an epoch"),
    "uneven streams": (
        unlike(Stream, 3, 2),
        "global ranks 1 of 2 have no more minibatches, but the others have",
    ),
}


def message_of(what):
    try:
        REFUSED[what][0]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(ranks, what):
    for told in ranks(2).run(message_of, what):
        assert re.search(REFUSED[what][1], told), told
