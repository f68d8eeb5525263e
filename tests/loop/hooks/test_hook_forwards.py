"""A module that a hook calls computes on every rank what it does on one device."""

from datetime import timedelta

import lightning as L
import pytest
import torch

from lightning_pipeoffload.processes import processes
from tests.support import fits
from tests.support.fits import Net
from tests.support.forked_runs import run_forked
from tests.support.pairs import first


class Sampling(Net):
    """Calls its blocks as often as it likes, in a method that Lightning does not know."""

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def generate(self, x):
        for _ in range(2):
            x = self(x).argmax(-1)
        return self.embed(x)

    def on_train_epoch_end(self):
        self.generated = self.generate(torch.arange(4))


class Calls(L.Callback):
    """Calls the module and parts of it at the end of epochs and of batches."""

    def __init__(self, call):
        self.call = call
        self.found = []

    def on_train_epoch_end(self, trainer, module):
        self.found.append(self.call(module).detach().clone())

    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.found.append(self.call(module).detach().clone())

    def on_train_batch_end(self, trainer, module, *args):
        self.found.append(self.call(module).detach().clone())


def whole(module):
    return module(torch.arange(8))


def parts(module):
    inner = module.blocks[5](module.embed(torch.arange(3)))
    return module.head(module.blocks[0].linear(inner))


def fit(num_devices, call, schedule="zb_h1"):
    L.seed_everything(7, verbose=False)
    calls = Calls(call)
    module = Sampling(dropout=0.0)
    trainer = fits.trainer(num_devices, {"schedule": schedule}, callbacks=[calls], max_epochs=1)
    if num_devices:
        fits.outlive_failures(trainer)
    trainer.fit(module, fits.loader(), fits.loader())
    return [*calls.found, module.generated.detach()]


@pytest.mark.parametrize(
    ("call", "num_ranks", "schedule"),
    first(2, [(whole, 2, "zb_h1"), (parts, 2, "zb_v"), (whole, 3, "zb_v")]),
)
def test_every_rank_has_the_result_of_one_device(ranks, call, num_ranks, schedule):
    (plain,) = ranks(1).run(fit, 0, call)
    for found in ranks(num_ranks).run(fit, num_ranks, call, schedule):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-9)


# Refusals


def on_one_rank(module):
    return whole(module) if module.trainer.is_global_zero else torch.zeros(())


def run_on_one_rank():
    processes._PATIENCE = timedelta(seconds=3)
    trainer = fits.trainer(2, max_epochs=1, callbacks=[Calls(on_one_rank)])
    trainer.fit(Sampling(), fits.loader())


@pytest.mark.slow
def test_a_rank_that_comes_alone_says_what_to_do():
    run = run_forked(run_on_one_rank)
    assert run.status != 0
    (said,) = run.lines
    assert said == (
        "[pipeoffload] global rank 1 stops because of global rank 0: RuntimeError: Sampling is "
        f"called outside of a step ({__file__}:{whole.__code__.co_firstlineno + 1}: return "
        "module(torch.arange(8))), and global ranks [1] have not come to it for 3 s; each rank has "
        "a part of the weights, so call the same on all ranks and on the same input, outside of "
        "`if trainer.is_global_zero` and rank_zero_only, and use what it returns on one"
    )


def others_parts(module):
    return whole(module) if module.trainer.is_global_zero else module.head(torch.zeros(16).double())


def backward(module):
    whole(module).sum().backward()


def refusal(call):
    try:
        fit(2, call)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("call", "message"),
    [(others_parts, "calls head"), (backward, "a forward in a hook has no backward")],
)
def test_what_cannot_be_right_is_refused(ranks, call, message):
    assert message in ranks(2).run(refusal, call)[0]
