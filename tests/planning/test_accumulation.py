"""Batches whose gradients add up have the same bits, each by a plan of its own."""

import lightning as L
import torch
from torch.nn.utils import get_total_norm

from lightning_pipeoffload.planning import report
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from tests.support import fits


class Watching(L.Callback):
    """Looks at gradients after each batch."""

    def on_after_backward(self, trainer, module):
        get_total_norm([p.grad for p in module.parameters() if p.grad is not None])


def train(callbacks):
    """Return the gradients of three batches."""
    L.seed_everything(7, verbose=False)
    module, pipeline = fits.Net(dropout=0.3, depth=4), {"recompute": "full"}
    options = {"accumulate_grad_batches": 3, "limit_train_batches": 3, "max_epochs": 1}
    fits.trainer(2, pipeline, callbacks=callbacks, **options).fit(module, fits.loader())
    own = {n: p for n, p in module.named_parameters() if not isinstance(p, ShapeOnly)}
    return {name: parameter.grad for name, parameter in own.items()}


def test_batches_have_the_bits_that_they_have_where_a_hook_looks_in_between(ranks):
    alone, watched = (ranks(2).run(train, callbacks) for callbacks in ([], [Watching()]))
    for one, other in zip(alone, watched, strict=True):
        assert all(torch.equal(other[name], gradient) for name, gradient in one.items())


def test_a_larger_batch_is_recommended(monkeypatch):
    said = []
    monkeypatch.setattr(report, "_print", said.append)
    report.print_accumulation_advice(3, 4)
    assert "a batch of 3 times the samples and num_microbatches=12." in said[0]
