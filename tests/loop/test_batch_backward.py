"""What a hook behind a batch's backward sees of weights that several ranks share."""

import lightning as L
import pytest
import torch

from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from tests.support import fits
from tests.support.pairs import slow


class Clamped(fits.Net):
    """Changes gradients in a way that parts of them would not add up."""

    def __init__(self):
        super().__init__(tie=True, dropout=0.0, depth=4)

    def on_before_backward(self, loss):
        self.clamp()

    def on_after_backward(self):
        self.clamp()

    def clamp(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)


def train(num_devices, accumulated, schedule):
    L.seed_everything(7, verbose=False)
    module = Clamped()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, schedule=schedule) if num_devices else "auto",
        accumulate_grad_batches=accumulated,
        max_steps=3,
        enable_checkpointing=False,
    )
    trainer.fit(module, fits.loader())
    named = module.named_parameters(remove_duplicate=False)
    return {n: p.detach() for n, p in named if not isinstance(p, ShapeOnly)}


@pytest.mark.parametrize(("accumulated", "schedule"), [slow((1, "1f1b")), (3, "zb_h1")])
def test_on_after_backward_sees_the_sum(ranks, accumulated, schedule):
    expected = train(0, accumulated, schedule)
    for found in ranks(2).run(train, 2, accumulated, schedule):
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12)
