"""Evaluation steps that cannot be cut run on every rank as on one device."""

import os

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pipeoffload.runtime.shapes import ShapeOnly
from tests.support import fits
from tests.support.pairs import first


class Block(fits.Block):
    """Keeps a number that training writes, on its own rank, and evaluations read."""

    scale = 1.0

    def forward(self, x):
        x = super().forward(x)
        if self.training:
            self.scale = 0.5
            return x
        return x * self.scale


class Generating(fits.Net):
    """Calls its blocks once for every token that it makes up, branches on values, and counts."""

    def __init__(self, way):
        super().__init__(dropout=0.0, depth=4)
        self.blocks = torch.nn.ModuleList(Block(0.0) for _ in range(4)).double()
        self.way = way
        self.found = []
        self.register_buffer("tokens_made", torch.zeros(()))

    def logits(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def generate(self, x):
        for _ in range(3):
            logits = self.logits(x)
            if self.way == "samples":
                x = torch.distributions.Categorical(logits=logits).sample()
            else:
                x = torch.where(logits.sum(-1) > 0, self.logits(x).argmax(-1), x + 1) % 32
            self.tokens_made += 1
            if int(x.sum()) == 0:
                break
        return x

    def validation_step(self, batch, batch_idx):
        x = batch["x"] if self.way == "calls no block" else self.generate(batch["x"])
        value = self.embed(x).mean() + self.head.weight.norm()
        self.log("val_loss", value)
        return value

    def predict_step(self, batch, batch_idx):
        return self.generate(batch["x"])


def _fit(num_devices, way, **options):
    L.seed_everything(7, verbose=False)
    module = Generating(way)
    trainer = fits.trainer(num_devices, options, num_sanity_val_steps=0, max_epochs=2)
    values = DataLoader(fits.samples(16), 8, collate_fn=fits.collate)
    trainer.fit(module, fits.loader(), values)
    logged = float(trainer.callback_metrics["val_loss"])
    predicted = trainer.predict(module, values)
    if not trainer.is_global_zero:
        return logged
    return logged, [x.tolist() for x in predicted], float(module.tokens_made), module.head.weight


@pytest.mark.parametrize(
    ("way", "schedule", "alone"),
    first(
        2,
        [
            *(("generates", "zb_v", 0), ("calls no block", "zb_h1", 0), ("samples", "zb_h1", 1)),
            ("generates", "zb_h1", 0),
        ],
    ),
)
def test_an_evaluation_that_cannot_be_cut_is_that_of_one_device(ranks, way, schedule, alone):
    (plain,) = ranks(1).run(_fit_with, alone, way, "zb_h1")
    found, elsewhere = ranks(2).run(_fit_with, 2, way, schedule)
    assert found[:3] == (pytest.approx(plain[0]), *plain[1:3])
    assert elsewhere == pytest.approx(plain[0])
    torch.testing.assert_close(found[3], plain[3])


def _fit_with(num_devices, way, schedule):
    return _fit(num_devices, way, **({"schedule": schedule} if num_devices else {}))


class Recurrent(torch.nn.Module):
    """A block with what torch's RNNs derive from their weights, and keep by weak references."""

    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(16, 16)

    def forward(self, x):
        return x + self.gru(x)[0]


class Failing(fits.Net):
    """Has an operation without a rule for shapes in an evaluation, or fills a list of its class."""

    seen: list = []

    def __init__(self, way):
        super().__init__(dropout=0.0, depth=4)
        if way == "recurrent":
            self.blocks = torch.nn.ModuleList(Recurrent() for _ in range(4)).double()
        self.way = way

    def validation_step(self, batch, batch_idx):
        if self.way == "fills":
            self.seen.append(batch_idx)
        elif isinstance(self.norm.weight, ShapeOnly):
            raise NotImplementedError("no rule")
        self.log("val_loss", self.loss(batch))


def _validate(num_devices):
    found = []
    for way in ("no rule", "recurrent", "fills"):
        L.seed_everything(7, verbose=False)
        trainer = fits.trainer(num_devices, {}, max_epochs=1)
        try:
            trainer.validate(Failing(way), fits.loader(), verbose=False)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append(float(trainer.callback_metrics["val_loss"]))
    return found


def test_what_has_no_rule_for_shapes_runs_whole_and_what_fills_its_class_is_refused(ranks):
    (plain,) = ranks(1).run(_validate, 0)
    for *values, message in ranks(2).run(_validate, 2):
        assert values == pytest.approx(plain[:2])
        assert message.startswith("the step writes Failing.seen (a list), which a Python module")


class KeepingBlock(fits.Block):
    def forward(self, x):
        self.latest = super().forward(x)
        return self.latest


class Keeping(fits.Net):
    """Reads after the blocks what these keep, and branches on a value."""

    def __init__(self):
        super().__init__(dropout=0.0, depth=4)
        self.blocks = torch.nn.ModuleList(KeepingBlock(0.0) for _ in range(4)).double()

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch) + sum(block.latest.mean() for block in self.blocks)
        if loss > 1e9:
            loss = loss / 2
        self.log("val_loss", loss)


def _validate_keeping(num_devices):
    L.seed_everything(7, verbose=False)
    trainer = fits.trainer(num_devices, {}, max_epochs=1)
    trainer.validate(Keeping(), fits.loader(), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def test_what_blocks_keep_is_there_after_the_blocks_of_a_step_that_may_run_whole(ranks):
    (plain,) = ranks(1).run(_validate_keeping, 0)
    assert ranks(2).run(_validate_keeping, 2) == [pytest.approx(plain)] * 2


class FailsOnce(fits.Net):
    """Its first trace of a validation step fails on one rank, as where a file was late there."""

    def __init__(self):
        super().__init__(dropout=0.0, depth=4)

    def validation_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and os.environ.pop("FAILS_ONCE", ""):
            raise OSError("not there yet")
        return super().validation_step(batch, batch_idx)


def _validate_late(fails):
    L.seed_everything(7, verbose=False)
    os.environ["FAILS_ONCE"] = "1" * fails
    trainer = fits.trainer(2)
    trainer.validate(FailsOnce(), fits.loader(), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def test_all_ranks_run_a_step_as_a_whole_that_one_cannot_trace(ranks):
    (expected, _), found = ranks(2).run(_validate_late, False), ranks(2).run(_validate_late, True)
    assert found == pytest.approx([expected] * 2)


class Alternating(fits.Net):
    """Keeps a number of each batch; of small ones how often blocks run depends on values."""

    def __init__(self):
        super().__init__(dropout=0.0, depth=4)
        self.seen = []
        self.last_size = 0

    def validation_step(self, batch, batch_idx):
        hidden = self.embed(batch["x"])
        times = 1 + int(batch["x"].sum()) % 2 if len(batch["x"]) < 8 else 1
        for _ in range(times):
            for block in self.blocks:
                hidden = block(hidden)
        self.seen.append(hidden.mean())
        self.last_size = len(batch["x"])


def _validate_alternating(num_devices):
    L.seed_everything(7, verbose=False)
    module, data = Alternating(), fits.samples(36)
    batches = [fits.collate([data[i] for i in part]) for part in torch.arange(36).split([8, 4] * 3)]
    trainer = fits.trainer(num_devices, {"num_microbatches": 1} if num_devices else {})
    trainer.validate(module, DataLoader(batches, None), verbose=False)
    return [float(value) for value in module.seen], module.last_size


def test_what_batches_leave_behind_in_turns_cut_and_whole_is_there_once(ranks):
    (plain,) = ranks(1).run(_validate_alternating, 0)
    assert len(plain[0]) == 6
    for seen, last_size in ranks(2).run(_validate_alternating, 2):
        assert seen == pytest.approx(plain[0])
        assert last_size == plain[1]
