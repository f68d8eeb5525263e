"""Hooks that read all gradients and write weights, as on one device."""

import copy
import pickle
import sys
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from tests.support import fits
from tests.support.pairs import slow
from tests.support.small_modules import through


class Net(fits.Net):
    """Keeps numbers that its hooks have found, and its weights at the end."""

    def __init__(self, tie=False):
        super().__init__(tie=tie, dropout=0.0, depth=4)
        self.found = []

    def keep(self, *numbers):
        self.found.append([float(number) for number in numbers])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Clipping(Net):
    """One of its parameters has no elements."""

    def __init__(self, **options):
        super().__init__(**options)
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.empty.sum()

    def on_before_optimizer_step(self, optimizer):
        self.keep(clip_grad_norm_(self.parameters(), 0.1))


class ClippingOfGroups(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        for group in optimizer.param_groups:
            norm = get_total_norm([p.grad for p in group["params"] if p.grad is not None])
            nn.utils.clip_grads_with_norm_(group["params"], 0.2, norm)
            self.keep(norm)


class ClippingTwice(Net):
    """By hand, then by Lightning; hooks after the step have the loss and the number of gradients.

    Lightning gives them the loss divided among batches that accumulate.
    """

    def on_before_optimizer_step(self, optimizer):
        self.keep(clip_grad_norm_(self.parameters(), 0.5))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.keep(*(p.grad.abs().max() for p in self.parameters() if p.grad is not None))
        self.clip_gradients(optimizer, 0.3, "norm")

    def on_train_batch_end(self, outputs, *args):
        self.keep(outputs["loss"], sum(p.grad is not None for p in self.parameters()))


class Skipping(Net):
    """Leaves out steps by the norm, in an override that runs the closure itself."""

    def on_after_backward(self):
        norms = [p.grad.detach().flatten().norm(2) for p in self.parameters()]
        self.total = torch.stack(norms).norm()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        finite = all(p.grad.isfinite().all() for p in self.parameters())
        self.keep(self.total, finite, any(torch.isnan(p.grad).any() for p in self.parameters()))
        if self.total < 0.6:
            optimizer.step()


class Stepping(Net):
    """Reads after a step what the hooks before it read; so do hooks of the optimizer."""

    def on_train_start(self):
        (optimizer,) = self.trainer.optimizers
        count = lambda *_: self.keep(len(optimizer.param_groups[0]["params"]))  # noqa: E731
        optimizer.register_step_pre_hook(count)
        optimizer.register_step_post_hook(count)

    def on_before_optimizer_step(self, optimizer):
        pass

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.keep(clip_grad_norm_(self.parameters(), 1.0), len(optimizer.param_groups[0]["params"]))


def total_norm(module):
    norms = torch._foreach_norm([p.grad for p in module.parameters()])
    return torch.stack(norms).norm()


def hook_of(measure):
    def measured(self, *args):
        self.keep(measure(self))

    return measured


class Meter(nn.Module):
    def norm_of(self, module):
        return total_norm(module)


class Inherited(Net):
    on_after_backward = hook_of(total_norm)


class Indirect(Inherited):
    """Has norms from what it inherits, a module of functions, a closure and a submodule."""

    def __init__(self, **options):
        super().__init__(**options)
        self.meter = Meter()

    def on_after_backward(self):
        super().on_after_backward()

    on_before_optimizer_step = hook_of(lambda module: sys.modules[__name__].total_norm(module))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.keep(self.meter.norm_of(self))


class Scaling(L.Callback):
    """Halves gradients; all ranks have the norm before and after it."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.keep(*map(Meter().norm_of, [pl_module]))
        torch._foreach_mul_([p.grad for p in pl_module.parameters()], 0.5)


class Noise(Net):
    def on_after_backward(self):
        torch.manual_seed(self.global_step)
        for p in self.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            p.grad.data.mul_(0.5)

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for index, p in enumerate(self.parameters()):
            noise = torch.empty_like(p).normal_()
            p.add_(noise, alpha=1e-3 * index).clamp_(-2, 2)
            p.data.add_(torch.rand(p.shape, dtype=p.dtype) * 1e-3)
        self.keep(torch.rand(()))


class Clamping(Net):
    """Changes gradients in a way that parts of them would not add up."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)
        self.keep(self.global_step)

    def on_before_backward(self, loss):
        self.on_after_backward()


class Layerwise(Net):
    """Rates and decay by a parameter's index; foreach operations over everything."""

    def on_train_start(self):
        self.keep(sum(p.numel() for p in self.parameters()), len(self.state_dict()))

    def on_train_batch_start(self, batch, batch_idx):
        optimizer = self.trainer.optimizers[0]
        if batch_idx == 1 and self.current_epoch == 0:
            members = optimizer.param_groups[0]["params"]
            rest = [members.pop() for _ in range(3)]
            optimizer.add_param_group({"params": rest, "lr": 0.01, "momentum": 0.5})

    def on_before_optimizer_step(self, optimizer):
        parameters = list(self.parameters())
        torch._foreach_mul_([p.grad for p in parameters], [0.1 * i for i in range(len(parameters))])

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        torch._foreach_mul_(list(self.parameters()), 0.99)
        twin = copy.deepcopy(self)
        assert len(pickle.dumps(twin)) > 1000
        self.keep(sum(p.numel() for p in twin.parameters()))


class Following(Net):
    """A copy of the blocks, whose weights follow theirs."""

    def __init__(self, tie=False):
        super().__init__(tie=tie)
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)

    def loss(self, batch):
        hidden = self.embed(batch["x"])
        away = through(self.blocks, hidden) - through(self.target, hidden.detach().flip(-1))
        return super().loss(batch) + away.pow(2).mean()

    def on_train_batch_end(self, *args):
        pairs = zip(self.target.parameters(), self.blocks.parameters(), strict=True)
        for follower, weight in pairs:
            follower.data.mul_(0.9).add_(weight.data, alpha=0.1)
        self.keep(self.global_step)


class ReadingLate(Net):
    def on_train_batch_end(self, *args):
        self.keep(total_norm(self))


class ReadingWhatIsClipped(Inherited):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, 0.3, "norm")
        self.keep(total_norm(self))


MODULES = [
    ClippingTwice, Skipping, Stepping, Layerwise, Clipping, ClippingOfGroups, Noise,
]  # fmt: skip


class Watch(L.Callback):
    """Logs norms by Lightning's own function, of all parameters and on global rank 0 alone."""

    def __init__(self):
        self.norms = []

    @rank_zero_only
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for order in (2, "inf", float("inf")):
            self.norms.append({n: float(v) for n, v in grad_norm(pl_module, order).items()})


def fit(num_devices, kind, folder, tie=False, trainer=None, callbacks=(), **options):
    L.seed_everything(7, verbose=False)
    module = kind(tie=tie)
    trainer = fits.trainer(
        num_devices,
        options,
        callbacks=[*callbacks],
        **{"max_epochs": 1, "limit_val_batches": 1} | (trainer or {}),
    )
    trainer.fit(module, fits.loader(), fits.loader())
    trainer.save_checkpoint(f"{folder}/{num_devices}.ckpt")
    return module.found


def fit_watched(num_devices, folder, **options):
    watch = Watch()
    fit(num_devices, Net, folder, callbacks=[watch], **options)
    return watch.norms


def run(ranks, function, folder, num_ranks, **options):
    """Return what one device finds, and every rank; compare the weights."""
    schedule = options.pop("schedule", "zb_h1")
    expected = function(0, folder=str(folder), **options)
    fitting = partial(function, num_ranks, folder=str(folder), schedule=schedule, **options)
    found = ranks(num_ranks).run(fitting)
    plain, split = (torch.load(folder / f"{n}.ckpt", weights_only=False) for n in (0, num_ranks))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(split[key], plain[key], rtol=1e-9, atol=1e-12)
    return expected, found


@pytest.mark.parametrize(
    ("kind", "num_ranks", "options"),
    [
        *((kind, 2, {}) for kind in MODULES[:4]),
        *(slow((kind, 2, {})) for kind in MODULES[4:]),
        slow((Clipping, 3, {"tie": True})),
        (Clipping, 2, {"tie": True, "schedule": "zb_v"}),
        slow((Skipping, 2, {"tie": True, "schedule": "zb_v"})),
        (Noise, 3, {"trainer": {"accumulate_grad_batches": 2}}),
        (Clamping, 2, {"tie": True, "trainer": {"accumulate_grad_batches": 3}}),
        (ClippingTwice, 2, {"tie": True, "trainer": {"accumulate_grad_batches": 2}}),
        (Layerwise, 1, {"tie": True}),
        slow((Following, 2, {})),
        slow((Following, 3, {"schedule": "1f1b"})),
    ],
)
def test_hooks_find_what_they_find_on_one_device(ranks, tmp_path, kind, num_ranks, options):
    expected, found = run(ranks, partial(fit, kind=kind), tmp_path, num_ranks, **options)
    assert len(expected) > 1
    for numbers in found:
        assert numbers == found[0]  # to the bit
        for mine, plain in zip(numbers, expected, strict=True):
            assert mine == pytest.approx(plain, rel=1e-9)


def test_lightnings_grad_norm_is_of_all_on_global_rank_0(ranks, tmp_path):
    expected, (found, *others) = run(ranks, fit_watched, tmp_path, 2)
    assert others == [[]]
    assert [norms.keys() for norms in found] == [norms.keys() for norms in expected]
    for mine, plain in zip(found, expected, strict=True):
        assert mine == pytest.approx(plain, rel=1e-9)


def test_norms_that_a_hook_reaches_in_any_way(ranks, tmp_path):
    fitting = partial(fit, kind=Indirect, callbacks=[Scaling(), Scaling()])
    expected, found = run(ranks, fitting, tmp_path, 2)
    assert len(expected) == 5 * 5
    assert expected[2] == pytest.approx([0.5 * expected[1][0]])
    for numbers in found:
        assert numbers == found[0]
        assert numbers == [pytest.approx(plain, rel=1e-9) for plain in expected]


@pytest.mark.parametrize("kind", [ReadingLate, ReadingWhatIsClipped])
def test_other_hooks_learn_which_ones_have_norms(ranks, kind):
    pool = ranks(2)
    said = pool.run(refusal, kind)
    pool.is_broken = True  # its ranks have stopped in the middle
    for words in said:
        assert "the gradient of " in words
        assert "on_after_backward, on_before_optimizer_step and configure_gradient_clip" in words


def refusal(kind):
    trainer = fits.trainer(2, max_steps=1, limit_val_batches=0)
    fits.outlive_failures(trainer)
    with pytest.raises(RuntimeError) as refused:
        trainer.fit(kind(), fits.loader())
    return str(refused.value)


class Shrinking(Net):
    def on_before_zero_grad(self, optimizer):
        for parameter in self.parameters():
            self.shrink(parameter)

    def shrink(self, parameter):
        parameter.data.mul_(0.9)


class ShrinkingAnew(Shrinking):
    def shrink(self, parameter):
        parameter.data = parameter.data * 0.9


@pytest.mark.parametrize("kind", [Shrinking, ShrinkingAnew])
def test_a_weight_that_is_written_among_a_batchs_forwards_is_refused(kind):
    one, all_first = (
        fits.trainer(1, {"schedule": schedule}, max_steps=1) for schedule in ("1f1b", "gpipe")
    )
    one.fit(kind(), fits.loader())  # after the first microbatch's forward, as on one device
    with pytest.raises(ValueError, match=r"zero_grad or .* writes .*: write it in on_train_batch"):
        all_first.fit(kind(), fits.loader())
