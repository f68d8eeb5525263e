"""Values of what other ranks have: gather() brings them to all; any other use is refused."""

import lightning as L
import pytest
import torch

from tests.loop.hooks.test_gradient_hooks import Net
from tests.support import fits


class Gathering(Net):
    """Sums up all its weights, and the square of a gradient."""

    def on_train_batch_end(self, *args):
        parameters = [*self.parameters()]
        weights, gradient = parameters, self.embed.weight.grad
        if self.trainer.world_size > 1:
            weights = [self.trainer.strategy.gather(p) for p in parameters]
            gradient = self.trainer.strategy.gather(gradient)
        self.keep(*(w.detach().square().sum() for w in weights), gradient.square().sum())


def of_weights(self, *args):
    self.keep(self.embed.weight.norm(), self.head.weight.norm())


def gather_apart(self, *args):
    mine = self.embed if self.trainer.is_global_zero else self.head
    self.trainer.strategy.gather(mine.weight)


def gather_in_a_step(self, batch, batch_idx):
    self.trainer.strategy.gather(self.embed.weight)


class Teacher(Net):
    """Averages its weights into tensors of its own."""

    def on_fit_start(self):
        self.teacher = [p.detach().clone() for p in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for mean, p in zip(self.teacher, self.parameters(), strict=True):
            mean.lerp_(p, 0.1)


def fit(num_devices, kind):
    """Return what the module found, or what was said when it was refused."""
    L.seed_everything(7, verbose=False)
    module = kind()
    trainer = fits.trainer(num_devices, max_steps=3, limit_val_batches=0)
    if num_devices:
        fits.outlive_failures(trainer)
    try:
        trainer.fit(module, fits.loader())
    except (RuntimeError, ValueError) as refusal:
        return str(refusal)
    return module.found


def test_gather_brings_every_value_to_all_ranks(ranks):
    expected = fit(0, Gathering)
    first, second = ranks(2).run(fit, 2, Gathering)
    assert first == second
    for mine, plain in zip(first, expected, strict=True):
        assert mine == pytest.approx(plain, rel=1e-9)


REFUSED = {
    "a value of another rank": (
        {"on_train_batch_end": of_weights},
        ("(of stage 0, on global rank 1)", "test_tensor_gather.py", "gather(parameter)"),
    ),
    "a product": (
        {"on_train_batch_end": lambda self, *_: self.trainer.strategy.gather(self.head.weight * 2)},
        ("no parameter, buffer or gradient of the module",),
    ),
    "gathers that differ": (
        {"on_train_batch_end": gather_apart},
        ("embed.weight", "head.weight", "in the same order on all of them"),
    ),
    "a gather in a step": ({"training_step": gather_in_a_step}, ("inside a step",)),
}


def fit_refused(case):
    return fit(2, Teacher if case == "teacher" else type("Changed", (Net,), REFUSED[case][0]))


@pytest.mark.parametrize("case", [*REFUSED, "teacher"])
def test_what_cannot_be_is_refused(ranks, case):
    pool = ranks(2)
    said = pool.run(fit_refused, case)[0]
    pool.is_broken = True  # its ranks have stopped in the middle
    teacher = "Teacher.on_train_batch_end averages", "teacher", "EMAWeightAveraging()"
    words = teacher if case == "teacher" else REFUSED[case][1]
    assert all(word in said for word in words), said
