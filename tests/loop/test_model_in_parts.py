"""A module that makes its layers in ``configure_model`` trains as on one device, and is resumed."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric

from lightning_pipeoffload.runtime.shapes import ShapeOnly
from tests.support import fits
from tests.support.pairs import first


class Net(fits.Net):
    """The fits' module, of which ``__init__`` makes only the head."""

    def __init__(self, tie="", guarded=True):
        L.LightningModule.__init__(self)
        self.tie, self.guarded = tie, guarded
        self.head = nn.Linear(16, 32, bias=False).double()
        self.accuracy = MeanMetric()
        self.blocks = None

    def configure_model(self):
        if self.blocks is not None and self.guarded:
            return
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(fits.Block(0.0) for _ in range(8))
        self.norm = nn.LayerNorm(16)
        if self.tie == "by name":
            self.head.weight = self.embed.weight
        self.double()

    def loss(self, batch):
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        weight = self.embed.weight if self.tie == "by use" else self.head.weight
        logits = functional.linear(self.norm(hidden), weight)
        self.accuracy((logits.argmax(-1) == batch["y"]).double())
        return functional.cross_entropy(logits, batch["y"])


def make_trainer(num_devices, max_epochs, record, **options):
    return fits.trainer(
        num_devices, options, max_epochs=max_epochs, callbacks=[record], gradient_clip_val=0.5
    )


def look(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def train(num_devices, path, schedule, tie):
    """Return what a validation, a fit, another and one that resumes have found."""
    L.seed_everything(7, verbose=False)
    module, record = Net(tie), fits.Record()
    trainer = make_trainer(num_devices, 1, record, schedule=schedule)
    trainer.validate(module, fits.loader(), verbose=False)
    found = [look(trainer)]
    trainer.save_checkpoint(f"{path}.before")
    trainer.fit(module, fits.loader(), fits.loader())
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, fits.loader(), fits.loader())
    found.append(look(trainer))
    resumed = Net(tie)
    trainer = make_trainer(num_devices, 2, record, schedule=schedule)
    trainer.fit(resumed, fits.loader(), fits.loader(), ckpt_path=path)
    return [*found, look(trainer)], record.losses


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "tie"),
    first(1, [(2, "zb_h1", "by use"), (3, "zb_v", "by name"), (3, "zb_h1", "")]),
)
def test_it_trains_as_on_one_device(ranks, tmp_path, num_ranks, schedule, tie):
    path, plain_path = str(tmp_path / "parts.ckpt"), str(tmp_path / "plain.ckpt")
    expected, losses = train(0, plain_path, None, tie)
    for found, own_losses in ranks(num_ranks).run(train, num_ranks, path, schedule, tie):
        assert own_losses == pytest.approx(losses, rel=1e-9)
        assert found == [pytest.approx(values, rel=1e-9) for values in expected]
    for written in (path, f"{path}.before"):
        plain = torch.load(written.replace(path, plain_path), weights_only=False)["state_dict"]
        state = torch.load(written, weights_only=False)["state_dict"]
        assert list(state) == list(plain)
        torch.testing.assert_close(state, plain, rtol=1e-9, atol=1e-12)
        Net.load_from_checkpoint(written, tie=tie)


def names_with_values(module):
    return {n for n, p in module.named_parameters() if not isinstance(p, ShapeOnly)}


class Look(L.Callback):
    """Notes which parameters have values when a fit starts, before the first batch."""

    def on_fit_start(self, trainer, module):
        self.early = names_with_values(module)
        self.is_real = [not isinstance(b, ShapeOnly) for b in module.buffers()]


class HeadFirst(Net):
    """Registers its head before the blocks, where it is the first rank's until a step has run."""

    def configure_model(self):
        self.head = nn.Linear(16, 32, bias=False)
        super().configure_model()


def fit_twice(num_devices):
    """Fit with a module that makes its layers anew for each fit."""
    L.seed_everything(6, verbose=False)
    module, look_at = HeadFirst(guarded=False), Look()
    found = []
    for seed, num_loaders in ((7, 2), (8, 1)):  # the first step is of an evaluation, or of training
        L.seed_everything(seed, verbose=False)
        record = fits.Record()
        trainer = make_trainer(num_devices, 1, record)
        trainer.callbacks.append(look_at)
        trainer.fit(module, *(fits.loader() for _ in range(num_loaders)))
        found.append(record.losses)
        if num_devices:  # AdamW has two values for a weight, also for the head's, which has moved
            memory = trainer.strategy.report()["memory"]
            assert memory["optimizer"] == [2 * size for size in memory["parameters"]]
    return found, look_at.early


def test_no_rank_has_the_whole_before_the_first_batch_and_layers_may_be_made_anew(ranks):
    expected, whole = fit_twice(0)
    (_, first), (_, second) = found = ranks(2).run(fit_twice, 2)
    for losses, _ in found:
        assert losses == [pytest.approx(values, rel=1e-9) for values in expected]
    assert first | second == whole
    assert not first & second
    assert {len({n for n in own if "linear.weight" in n}) for own in (first, second)} <= {3, 4, 5}


class Failing(Net):
    def configure_model(self):
        super().configure_model()
        self.from_pretrained()

    def from_pretrained(self):
        self.more = nn.Linear(2, 2)


class Empty(Net):
    def __init__(self, state=None):
        super().__init__()
        self.state = state

    def configure_model(self):
        with self.trainer.init_module(empty_init=True):
            super().configure_model()

    def on_fit_start(self):
        if self.state is not None:
            self.load_state_dict(self.state)


def fit_failing(kind, error):
    trainer = make_trainer(2, 1, fits.Record())
    fits.outlive_failures(trainer)
    with pytest.raises(error) as refusal:
        trainer.fit(kind(), fits.loader())
    return str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Failing, ValueError, "call lightning_pipeoffload.load_weights(self, path)"),
        (Empty, RuntimeError, "since configure_model made it: it has whatever was in memory"),
    ],
)
def test_making_layers_so_is_refused(ranks, kind, error, text):
    for refusal in ranks(2).run(fit_failing, kind, error):
        assert text in refusal


def fit_filled(num_devices, state, path):
    """Fit a module that a hook fills, and one that a checkpoint does."""
    found = []
    for module, options in ((Empty(state), {}), (Empty(), {"ckpt_path": path})):
        record = fits.Record()
        trainer = make_trainer(num_devices, 2, record)
        trainer.fit(module, fits.loader(), fits.loader(), **options)
        found.append(record.losses)
    return found


def test_what_is_empty_may_be_filled_later(ranks, tmp_path):
    L.seed_everything(3, verbose=False)
    module, path = Net(), str(tmp_path / "last.ckpt")
    trainer = make_trainer(0, 1, fits.Record())
    trainer.fit(module, fits.loader(), fits.loader())
    trainer.save_checkpoint(path)
    state = module.state_dict()
    expected = fit_filled(0, state, path)
    for found in ranks(2).run(fit_filled, 2, state, path):
        assert found == [pytest.approx(losses, rel=1e-9) for losses in expected]
