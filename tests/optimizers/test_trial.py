"""Which optimizers may have a part of the parameters only, as small steps show."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from functools import partial
from types import MethodType

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipeoffload.optimizers import trial as optimizer_trial
from lightning_pipeoffload.optimizers.trial import (
    NotTriedError,
    OptimizerTrial,
    refuse_optimizer,
    try_optimizer,
)
from tests.support import fits

CPU = torch.device("cpu")
BY_ELEMENT = OptimizerTrial(needs_all_parameters=False, needs_whole_tensors=False)
BY_TENSOR = OptimizerTrial(needs_all_parameters=False, needs_whole_tensors=True)


def parameters(dtype=torch.float32):
    return [nn.Parameter(torch.ones(4, 3, dtype=dtype)), nn.Parameter(torch.ones(2, 4).to(dtype))]


def all_members(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


OF_TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not Optimizer
}
DECIDED = dict.fromkeys(OF_TORCH, BY_ELEMENT) | {"Adafactor": BY_TENSOR, "Muon": BY_TENSOR}
WAYS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True})
MORE_WAYS = [
    ("Adam", {"amsgrad": True, "decoupled_weight_decay": True}),
    ("AdamW", {"amsgrad": True, "fused": True}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": torch.tensor(0.1)}),
]


@pytest.mark.parametrize("name", sorted(OF_TORCH.keys() - {"LBFGS"}))
def test_torch_optimizers_are_decided(name):
    kind = OF_TORCH[name]
    for way in WAYS:
        if way.keys() <= kind(parameters()).defaults.keys():
            assert try_optimizer(kind(parameters(), **way), CPU) == DECIDED[name], way


@pytest.mark.parametrize(("name", "way"), MORE_WAYS)
def test_their_other_options_are_decided(name, way):
    assert try_optimizer(OF_TORCH[name](parameters(), **way), CPU) == DECIDED[name]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.half, torch.cfloat])
def test_any_type_is_decided(dtype):
    assert try_optimizer(AdamW(parameters(dtype)), CPU) == BY_ELEMENT
    assert try_optimizer(ClipsAll(parameters(dtype), lr=1e-5), CPU).needs_all_parameters


class ClipsAll(SGD):
    def step(self, closure):
        loss = closure()
        nn.utils.clip_grad_norm_(all_members(self), 1.0)
        super().step()
        return loss


class SkipsBySize(AdamW):
    """Hands its options on, and keeps one that is no group's."""

    def __init__(self, params, largest, **options):
        super().__init__(params, **options)
        self.largest = largest

    def step(self, closure):
        closure()
        if nn.utils.get_total_norm([p.grad for p in all_members(self)]) < self.largest:
            super().step()


class Hidden(SkipsBySize):
    """Does not tell what is left of its arguments by their names."""

    def __init__(self, params, limit=None):
        super().__init__(params, limit or 1e9)


class SharpnessAware(SGD):
    def __init__(self, params, lr=0.1, rho=0.05):
        super().__init__(params, lr)
        self.rho = rho

    def step(self, closure):
        closure()
        members = all_members(self)
        norm = nn.utils.get_total_norm([p.grad for p in members])
        for p in members:
            p.data.add_(p.grad, alpha=self.rho / float(norm))
        loss = closure()
        super().step()
        return loss


class GrowsItsRate(Optimizer):
    """As those that estimate their rate: what they know is in the group."""

    def __init__(self, params, d=1e-6):
        super().__init__(params, {"d": d, "seen": 0.0})

    def step(self, closure):
        closure()
        for group in self.param_groups:
            group["seen"] += sum(float(p.grad.double().square().sum()) for p in group["params"])
            group["d"] = max(group["d"], group["seen"] * 1e-30)
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-group["d"])


class EveryFifth(ClipsAll):
    count = 0

    def step(self, closure):
        self.count += 1
        if self.count % 5:
            SGD.step(self, closure)
        else:
            super().step(closure)


class NoisyGradients(SGD):
    def step(self, closure):
        closure()
        for p in all_members(self):
            p.grad.add_(torch.randn_like(p))
        super().step()


class NoisyAfterwards(SGD):
    """Draws when its groups have all parameters again, those of other ranks as shapes."""

    def step(self, closure):
        super().step(closure)
        for p in all_members(self):
            p.data.add_(torch.randn_like(p))


class GoesByLoss(SGD):
    def step(self, closure):
        self.param_groups[0]["lr"] = float(closure())
        super().step()


class FirstOfAll(SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.first = self.param_groups[0]["params"][0]

    def step(self, closure):
        super().step(closure)
        for p in all_members(self):
            p.data.mul_(1 + float(self.first.sum()))


class LookAhead(Optimizer):
    """Around another optimizer, whose groups and states it has."""

    def __init__(self, optimizer, every=5):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.every = every
        self.param_groups = optimizer.param_groups
        self.slow = {p: p.detach().clone() for p in all_members(self)}
        self.count = 0

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        for p in all_members(self) if self.count % self.every == 0 else ():
            p.data.copy_(self.slow[p].lerp_(p.data, 0.5))
        return loss


class Around:
    """No optimizer itself."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    def step(self, closure):
        return self.optimizer.step(closure)


def warmed_up(optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    return optimizer


def in_groups(kind, **options):
    first, second = parameters()
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}]
    return kind(groups, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.LBFGS(parameters()),
        lambda: torch.optim.LBFGS(parameters(), max_iter=2, line_search_fn="strong_wolfe"),
        lambda: ClipsAll(parameters(), lr=0.1),
        lambda: warmed_up(ClipsAll(parameters(), lr=0.1)),
        lambda: ClipsAll(parameters(), lr=0.0),
        lambda: in_groups(ClipsAll, lr=0.1),
        lambda: SkipsBySize(parameters(), 1e-4, amsgrad=True),
        lambda: SkipsBySize(parameters(), 1e5),
        lambda: Hidden(parameters(), limit=10.0),
        lambda: SharpnessAware(parameters()),
        lambda: GrowsItsRate(parameters()),
        lambda: EveryFifth(parameters(), lr=0.1),
        lambda: NoisyGradients(parameters(), lr=0.1),
        lambda: GoesByLoss(parameters(), lr=0.1),
        lambda: FirstOfAll(parameters()),
        lambda: LookAhead(ClipsAll(parameters(), lr=0.1)),
        lambda: LookAhead(SharpnessAware(parameters())),
    ],
)
def test_what_computes_over_all_parameters_is_found(make):
    assert try_optimizer(make(), CPU).needs_all_parameters


def test_noise_that_all_ranks_draw_alike_is_right():
    assert not try_optimizer(NoisyAfterwards(parameters()), CPU).needs_all_parameters


class TrustRatio(SGD):
    def step(self, closure):
        closure()
        for p in all_members(self):
            p.grad.mul_(p.detach().norm() / p.grad.norm())
        super().step()


class Square(SGD):
    def step(self, closure):
        closure()
        for p in all_members(self):
            p.grad = torch.linalg.inv(p.grad + torch.eye(64))
        super().step()


@pytest.mark.parametrize(
    "make",
    [lambda: TrustRatio(parameters(), lr=0.1), lambda: Square(parameters(), lr=0.1)],
)
def test_what_needs_whole_tensors_is_found(make):
    assert try_optimizer(make(), CPU) == BY_TENSOR


class NormedRows(SGD):
    """Its halves take the tensor's steps where they are rows, and not where they are laid out."""

    def step(self, closure):
        closure()
        for p in all_members(self):
            p.grad.div_(p.grad.norm(dim=-1, keepdim=True))
        super().step()


class Blockwise(SGD):
    """Keeps a number for each 256 elements, as optimizers of eight bits do."""

    def step(self, closure):
        super().step(closure)
        for p in all_members(self):
            self.state[p]["largest"] = p.detach().reshape(-1, 256).abs().amax(1)


@pytest.mark.parametrize("kind", [NormedRows, Blockwise])
def test_what_works_on_halves_only_if_they_are_rows_or_blocks_needs_whole_tensors(kind):
    assert try_optimizer(kind(parameters(), lr=0.1), CPU) == BY_TENSOR


class Trained(SGD):
    """As a schedule-free one: it has weights to train, and others to evaluate."""

    is_training = False

    def train(self):
        self.is_training = True

    def step(self, closure):
        assert self.is_training
        super().step(closure)


class TwoKinds(Optimizer):
    """Takes groups only, of exactly these options."""

    def __init__(self, groups):
        assert all(group.keys() == {"params", "lr", "by_sign"} for group in groups)
        super().__init__(groups, {})

    def step(self, closure):
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * (p.grad.sign() if group["by_sign"] else p.grad))


@pytest.mark.parametrize(
    "make",
    [
        partial(AdamW, nn.Linear(2, 2).named_parameters()),
        lambda: in_groups(AdamW),
        lambda: warmed_up(in_groups(AdamW, lr=1e-3)),
        lambda: Trained(parameters()),
        lambda: LookAhead(AdamW(parameters())),
        lambda: warmed_up(
            TwoKinds([{"params": parameters(), "lr": 0.1, "by_sign": s} for s in (True, False)])
        ),
    ],
)
def test_what_treats_each_element_by_itself_is_found(make):
    assert try_optimizer(make(), CPU) == BY_ELEMENT


class AroundClass(Optimizer):
    def __init__(self, params, base_optimizer, **options):
        super().__init__(params, options)
        self.base_optimizer = base_optimizer(self.param_groups, **options)


class HasModel(SGD):
    def __init__(self, model, lr=0.1):
        super().__init__(model.parameters(), lr)
        self.model = model


class ClipsModel(SGD):
    def __init__(self, params, norm_of_all, lr=0.1):
        super().__init__(params, lr)
        self.norm_of_all = norm_of_all


class Forgetful(SGD):
    def __init__(self, params, limit):
        super().__init__(params, limit)


class Talks(SGD):
    def step(self, closure):
        torch.distributed.all_reduce(all_members(self)[0])


def with_another_step(optimizer):
    optimizer.step = MethodType(lambda optimizer, closure: closure(), optimizer)
    return warmed_up(optimizer)


def with_hook(optimizer):
    optimizer.register_step_pre_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: AroundClass(parameters(), SGD, lr=0.1), "TypeError: 'SGD' object is not callable"),
        (lambda: HasModel(nn.Linear(2, 2)), "'list' object has no attribute 'parameters'"),
        (lambda: ClipsModel(parameters(), nn.Linear(2, 2).parameters), "takes norm_of_all, which"),
        (lambda: Around(SGD(parameters())), "has no attribute '_optimizer_step_pre_hooks'"),
        (lambda: Forgetful(parameters(), 1.0), "its constructor takes limit, which it does not"),
        (lambda: with_another_step(SGD(parameters())), "its step has been replaced"),
        (lambda: with_hook(SGD(parameters())), "its step has a hook, with_hook.<locals>.<lambda>"),
        (lambda: AdamW(parameters(), capturable=True), "must be on supported devices"),
    ],
)
def test_what_cannot_be_tried_says_why(make, reason):
    with pytest.raises(NotTriedError) as raised:
        try_optimizer(make(), CPU)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_optimizer_that_communicates_is_not_tried(ranks):
    for message in ranks(1).run(_try_talking):
        assert "communicates with other processes by allreduce_" in message


def _try_talking():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    with pytest.raises(NotTriedError) as raised:
        try_optimizer(Talks(parameters()), CPU)
    return str(raised.value)


class Leaves(SGD):
    def __init__(self, params):
        sys.stdout.write("made")
        warnings.warn("made", stacklevel=1)
        super().__init__(params)
        torch.rand(1), random.random()


def test_a_trial_leaves_no_trace(capsys):
    optimizer = Leaves(parameters())
    optimizer.state[all_members(optimizer)[0]]["count"] = 3
    capsys.readouterr()
    before = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state(), random.getstate()
    with warnings.catch_warnings(record=True) as caught:
        try_optimizer(optimizer, CPU)
    assert (caught, capsys.readouterr().out) == ([], "")
    assert optimizer.state_dict() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert all(p.grad is None and (p == 1).all() for p in all_members(optimizer))


class Counted(optimizer_trial.OptimizerCandidate):
    count = 0

    def __init__(self, *args, **which):
        Counted.count += 1
        super().__init__(*args, **which)


def test_a_class_is_tried_once_for_its_options(monkeypatch):
    monkeypatch.setattr(optimizer_trial, "OptimizerCandidate", Counted)
    for lr in (0.1, 0.1, 0.2):
        try_optimizer(SGD(parameters(), lr, momentum=0.123), CPU)
    assert Counted.count == 4
    with pytest.raises(NotTriedError):
        try_optimizer(with_hook(SGD(parameters(), momentum=0.123)), CPU)
    try_optimizer(SGD(parameters(), momentum=0.125), CPU)
    assert Counted.count == 8


def test_a_refusal_is_one_line_that_names_class_cause_and_remedy():
    with pytest.raises(ValueError, match="^ClipsAll computes over all its parameters, .* 3 ranks "):
        refuse_optimizer(ClipsAll(parameters(), lr=0.1), CPU, num_ranks=3)
    with pytest.raises(ValueError, match="^Forgetful cannot be tried on small tensors .*AdamW, or"):
        refuse_optimizer(Forgetful(parameters(), 0.1), CPU, num_ranks=2)
    refuse_optimizer(AdamW(parameters()), CPU, num_ranks=2)


class Evaluated(Trained):
    def eval(self):
        self.is_training = False


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ClipsAll, "^ClipsAll computes over all .* the 4 replicas has a part .*sharding=.none.$"),
        (Evaluated, "^Evaluated makes weights for evaluation of .* the 4 replicas .*sharding="),
    ],
)
def test_what_replicas_cannot_share_out_is_refused(kind, message):
    with pytest.raises(ValueError, match=message):
        refuse_optimizer(kind(parameters(), lr=0.1), CPU, num_ranks=1, num_sharing=4)
    if kind is Evaluated:
        refuse_optimizer(kind(parameters(), lr=0.1), CPU, num_ranks=2)


class OneOptimizer(fits.Net):
    """Gives every fit the same optimizer, which asks each of its parameters for a gradient."""

    def __init__(self, momentum):
        super().__init__(dropout=0.0, depth=4)
        self.optimizer = TrustRatio(self.parameters(), lr=0.01, momentum=momentum)

    def configure_optimizers(self):
        return self.optimizer


def _fit_twice(num_devices, momentum, schedule):
    L.seed_everything(3, verbose=False)
    module, record = OneOptimizer(momentum), fits.Record()
    for of_fit in ("zb_h1", schedule):
        trainer = L.Trainer(
            **fits.SILENT,
            max_steps=3,
            enable_checkpointing=False,
            devices=num_devices or 1,
            strategy=fits.strategy(num_devices, schedule=of_fit),
            callbacks=[record],
        )
        trainer.fit(module, fits.loader())
        assert len(all_members(module.optimizer)) == len([*module.parameters()])
    return record.losses


@pytest.mark.parametrize(("momentum", "schedule"), [(0.9, "zb_h1"), (0.0, "zb_v")])
def test_an_optimizer_of_the_users_own_steps_with_its_rank_s_part_in_every_fit(
    ranks, momentum, schedule
):
    expected = _fit_twice(0, momentum, schedule)
    for losses in ranks(2).run(_fit_twice, 2, momentum, schedule):
        assert losses == pytest.approx(expected, abs=1e-12)


def _cut_otherwise():
    with pytest.raises(RuntimeError, match=r"trained on another rank before, .* a new optimizer"):
        _fit_twice(2, 0.9, "zb_v")
    return True


def test_what_an_optimizer_knew_on_another_rank_is_missed(ranks):
    assert ranks(2).run(_cut_otherwise) == [True, True]
