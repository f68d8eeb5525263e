"""Which optimizers may have a part of the parameters only, and what they keep."""

import inspect
from types import MethodType

import lightning as L
import pytest
import torch
from bitsandbytes.optim import AdamW8bit, Lion8bit
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from transformers.optimization import Adafactor

from lightning_pipeoffload.optimizers import estimate_state_bytes
from lightning_pipeoffload.optimizers.optimizer_table import TABLE, refuse_optimizer
from tests.support import fits
from tests.support.pairs import slow

OF_TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not Optimizer and name != "LBFGS"
}
WAYS = [
    *((kind, {}) for kind in OF_TORCH.values()),
    (torch.optim.Adam, {"amsgrad": True}),
    (AdamW, {"amsgrad": True, "fused": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (Adafactor, {}),
    (Adafactor, {"beta1": 0.9}),
    (AdamW8bit, {}),
    (AdamW8bit, {"min_8bit_size": 2**20}),
    (Lion8bit, {"lr": 0.1}),
]
SHAPES = [(96, 128), (64, 80)]
SINGLE_NUMBERS = 16  # counts of steps, rates; bytes


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def step(optimizer, members):
    for p in members:
        sparse = isinstance(optimizer, torch.optim.SparseAdam)
        p.grad = torch.ones_like(p).to_sparse(1) if sparse else torch.cos(p.detach())
    optimizer.step()


@pytest.mark.parametrize(("kind", "options"), WAYS)
def test_known_ones_step_alike_with_a_part_of_the_parameters_and_keep_what_is_said(kind, options):
    together, apart = parameters(), parameters()
    whole = kind(together, **options)
    parts = [kind([p], **options) for p in apart]
    refuse_optimizer(whole, num_ranks=2)
    for _ in range(3):
        step(whole, together)
        for part, p in zip(parts, apart, strict=True):
            step(part, [p])
    torch.testing.assert_close(together, apart, rtol=0, atol=0)
    said = estimate_state_bytes([whole])
    for p in together:
        state = whole.state[p].items()  # all parameters share bitsandbytes' qmaps
        tensors = [v for k, v in state if isinstance(v, torch.Tensor) and "qmap" not in k]
        kept = sum(tensor.nbytes for tensor in tensors)
        assert said[id(p)] <= kept <= said[id(p)] + SINGLE_NUMBERS


def test_every_row_is_of_an_optimizer_that_is_run_here():
    steps = [inspect.unwrap(kind.step) for kind, _ in WAYS]
    run = {f"{step.__module__}.{step.__qualname__.rpartition('.')[0]}" for step in steps}
    assert TABLE.keys() == run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_keep_nothing_and_states_have_their_parameters_type(dtype):
    trained, frozen = parameters([(8, 8), (8,)], dtype)
    found = estimate_state_bytes([AdamW([trained, frozen.requires_grad_(False)])])
    assert found == {id(trained): 2 * 64 * dtype.itemsize, id(frozen): 0}


def test_options_that_make_parameters_depend_on_each_other_are_refused(monkeypatch):
    optimizer = AdamW8bit(parameters(), lr=0.1)
    monkeypatch.setattr(optimizer.mng, "uses_config_override", True, raising=False)
    reason = "GlobalOptimManager overrides options"
    with pytest.raises(ValueError, match=rf"computes over all .*{reason}.* 2 ranks"):
        refuse_optimizer(optimizer, 2, is_declared=True)


class Own(SGD):
    def step(self, closure=None):
        return super().step(closure)


class SAM(Own):
    """Known to go by the norm of all gradients."""


class OtherGroups(SGD):
    def _init_group(self, *arguments):
        return super()._init_group(*arguments)


def with_another_step(optimizer):
    optimizer.step = MethodType(lambda optimizer, closure: closure(), optimizer)
    return optimizer


def with_hook(optimizer):
    optimizer.register_step_pre_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Own, "it is not among those that are known"),
        (OtherGroups, "its step is torch.optim.sgd.SGD's, and it has its own _init_group"),
        (lambda p, lr: with_another_step(SGD(p, lr)), "its step has been replaced"),
        (lambda p, lr: with_hook(SGD(p, lr)), "its step has a hook, with_hook.<locals>.<lambda>"),
    ],
)
def test_any_other_is_the_user_s_to_declare(make, reason):
    optimizer = make(parameters(), lr=0.1)
    with pytest.raises(ValueError, match="per_parameter_optimizer=True") as raised:
        refuse_optimizer(optimizer, num_ranks=3)
    message = str(raised.value)
    assert message.startswith(f"{type(optimizer).__name__} may compute over all its parameters")
    assert reason in message
    assert "each of the 3 ranks" in message
    refuse_optimizer(optimizer, num_ranks=3, is_declared=True)


def test_what_is_known_to_go_by_all_parameters_is_refused_whatever_is_declared():
    for kind in (SAM, torch.optim.LBFGS):
        with pytest.raises(ValueError, match="computes over all its parameters, .* 4 replicas .*"):
            refuse_optimizer(
                kind(parameters()[:1], lr=0.1), 1, num_optimizer_shards=4, is_declared=True
            )


class Evaluated(SGD):
    def eval(self):
        """Set weights for evaluation."""


def test_weights_for_evaluation_are_not_shared_out():
    with pytest.raises(ValueError, match=r"^Evaluated computes evaluation weights .*sharding="):
        refuse_optimizer(Evaluated(parameters(), lr=0.1), num_ranks=1, num_optimizer_shards=4)
    optimizer = Evaluated(parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    refuse_optimizer(optimizer, num_ranks=2)  # a subclass or a scheduler leaves the step known


class TrustRatio(SGD):
    """An optimizer of the user's own, which asks each of its parameters for a gradient."""

    def step(self, closure):
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.detach().norm() / p.grad.norm())
        super().step()


class OneOptimizer(fits.Net):
    """Gives every fit the same optimizer."""

    def __init__(self, momentum):
        super().__init__(dropout=0.0, depth=4)
        self.optimizer = TrustRatio(self.parameters(), lr=0.01, momentum=momentum)

    def configure_optimizers(self):
        return self.optimizer


def _fit_twice(num_devices, momentum, schedule):
    L.seed_everything(3, verbose=False)
    module, record = OneOptimizer(momentum), fits.Record()
    declared = {"per_parameter_optimizer": True} if num_devices else {}
    for of_fit in ("zb_h1", schedule):
        trainer = fits.trainer(
            num_devices, {"schedule": of_fit, **declared}, max_steps=3, callbacks=[record]
        )
        trainer.fit(module, fits.loader())
        (group,) = module.optimizer.param_groups
        assert len(group["params"]) == len([*module.parameters()])
    return record.losses


@pytest.mark.parametrize(("momentum", "schedule"), [(0.9, "zb_h1"), slow((0.0, "zb_v"))])
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
