"""Batches whose gradients add up: exact, each by a plan of its own."""

import lightning as L
import pytest
import torch
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from lightning_pipeoffload.planning import report
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from tests.support import fits
from tests.support.pairs import slow


def batches_of(lengths):
    places = [range(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    dataset = fits.samples(sum(lengths))
    return DataLoader(dataset, batch_sampler=places, collate_fn=fits.collate)


class Watching(L.Callback):
    """Looks at gradients after each batch."""

    def __init__(self):
        self.seen = []

    def on_after_backward(self, trainer, module):
        total = get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        self.seen.append(float(total))


def train(num_devices, lengths, watch=False, precision="64-true", **options):
    """Accumulate three batches at a time.

    Returns: gradients, microbatches of the plan, and what a callback has seen.
    """
    L.seed_everything(7, verbose=False)
    module = fits.Net(dropout=options.pop("dropout", 0.0), depth=4)
    watching = Watching()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, **options),
        accumulate_grad_batches=3,
        max_epochs=1,
        precision=precision,
        enable_checkpointing=False,
        callbacks=[watching] if watch else [],
    )
    trainer.fit(module if precision == "64-true" else module.float(), batches_of(lengths))
    own = {n: p for n, p in module.named_parameters() if not isinstance(p, ShapeOnly)}
    gradients = {name: parameter.grad for name, parameter in own.items()}
    return gradients, num_devices and trainer.strategy.plan.num_microbatches, watching.seen


def train_with(options):
    return train(2, (8, 8, 8), dropout=0.3, **options)


@pytest.mark.parametrize("lengths", [[8, 8, 8, 8, 3], slow([8, 4, 8]), slow([8])], ids=str)
def test_gradients_of_shorter_batches_and_windows_are_exact(ranks, lengths):
    expected, _, _ = train(0, lengths)
    for found, size, _ in ranks(2).run(train, 2, lengths):
        assert size == 4
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14)


def test_batches_have_the_bits_that_they_have_where_a_hook_looks_in_between(ranks):
    alone = ranks(2).run(train_with, {"recompute": "full"})
    watched = ranks(2).run(train_with, {"recompute": "full", "watch": True})
    for (one, _, _), (other, _, _) in zip(alone, watched, strict=True):
        assert all(torch.equal(other[name], gradient) for name, gradient in one.items())


def test_a_larger_batch_is_recommended(monkeypatch):
    said = []
    monkeypatch.setattr(report, "_tell", said.append)
    report.print_accumulation(3, 4)
    assert "a batch of 3 times the samples and num_microbatches=12." in said[0]


def test_who_looks_in_between_sees_all_gradients(ranks):
    _, _, expected = train(0, (8, 8, 8), True)
    outcomes = ranks(2).run(train, 2, (8, 8, 8), True)
    for _, _, seen in outcomes:
        assert seen == pytest.approx(expected, rel=1e-10)
