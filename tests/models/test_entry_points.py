"""Every entry point of the Trainer with models as people write them, beside one device."""

from dataclasses import dataclass

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.support import fits
from tests.support.pairs import first, pairs

WIDTH, WORDS, LENGTH, CLASSES = 8, 16, 6, 3
EVALUATIONS = ("validate", "test", "predict")


class Entered(L.LightningModule):
    """A module with all of Lightning's steps around ``forward``."""

    def loss(self, batch):
        return functional.cross_entropy(self(batch["x"]).flatten(0, -2), batch["y"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        mixed = self.norm(x).cumsum(-2) / LENGTH
        return x + self.down(functional.gelu(self.up(mixed)))


def chain(block=Block, depth=4):
    return nn.ModuleList(block() for _ in range(depth))


class TiedHead(Entered):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), chain()

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.words.weight.T


class BatchNormStem(Entered):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.blocks, self.head = chain(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Decoding(Block):
    def forward(self, x, memory):
        return super().forward(x + (x @ memory.transpose(1, 2)).softmax(-1) @ memory)


class EncoderDecoder(Entered):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = chain(depth=2), chain(Decoding, depth=2)
        self.start, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        memory = self.words(x)
        for block in self.encoder:
            memory = block(memory)
        x = self.words(x).roll(1, 1) + self.start[None]
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class Summing(TiedHead):
    """Predicts what has no row for each sample, or one for as many as there are of something."""

    def predict_step(self, batch, batch_idx):
        logits = self(batch["x"])
        return {"words": logits, "count": len(logits), "mean": logits.mean(), "sum": logits.sum(0)}


class Normalized(TiedHead):
    """Has statistics over samples, of which a microbatch needs two."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        mean = self.norm(self.words(x).mean(1))
        return super().forward(x) + (mean @ self.words.weight.T)[:, None]


MODELS = {
    EncoderDecoder: {"blocks": ["encoder.*", "decoder.*"]},
    TiedHead: {},
    BatchNormStem: {"num_microbatches": 1, "schedule": "1f1b"},  # else its statistics are others
}


@dataclass
class Runs:
    """Runs of one model on so many devices; 0: on one, without the strategy."""

    kind: type[Entered]
    inference_mode: bool
    num_devices: int
    folder: str

    def all(self):
        """Evaluate before a fit, after it, and with the weights that it has saved."""
        return dict(self._run_all())

    def _run_all(self):
        for method in EVALUATIONS:
            yield f"{method} alone", self._evaluate(self._trainer(), self._module(), method)
        trainer, module = self._trainer(), self._module()
        trainer.fit(module, self._data(), self._data())
        yield "fit", _numbers(trainer)
        yield from self._evaluate_all("after fit", trainer, module)
        best = trainer.checkpoint_callback.best_model_path
        yield "weights", torch.load(best, weights_only=False)["state_dict"]
        loaded = self.kind.load_from_checkpoint(best).double()
        yield from self._evaluate_all("after load", trainer, loaded)  # the same trainer

    def _evaluate_all(self, name, trainer, module):
        for method in EVALUATIONS:
            yield f"{method} {name}", self._evaluate(trainer, module, method)

    def _evaluate(self, trainer, module, method):
        if method == "predict":
            return trainer.predict(module, self._data())
        results = getattr(trainer, method)(module, self._data(), verbose=False)
        return results, _numbers(trainer)

    def _trainer(self):
        return L.Trainer(
            **fits.SILENT,
            devices=self.num_devices or 1,
            strategy=fits.strategy(self.num_devices, **MODELS[self.kind]),
            max_epochs=2,
            callbacks=[ModelCheckpoint(self.folder, monitor="val_loss")],
            inference_mode=self.inference_mode,
        )

    def _module(self):
        L.seed_everything(7, verbose=False)
        return self.kind().double()

    def _data(self):
        generator = torch.Generator().manual_seed(0)
        if self.kind is BatchNormStem:
            x = torch.randn(12, 3, 16, 16, generator=generator, dtype=torch.float64)
            y = torch.randint(CLASSES, (12,), generator=generator)
        else:
            x = y = torch.randint(WORDS, (12, LENGTH), generator=generator)
        return DataLoader([{"x": a, "y": b} for a, b in zip(x, y, strict=True)], 8)


def _numbers(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def evaluate(*runs):
    return Runs(*runs).all()


def predict(num_devices):
    L.seed_everything(7, verbose=False)
    strategy = fits.strategy(num_devices, num_microbatches=4)
    trainer = L.Trainer(**fits.SILENT, devices=num_devices or 1, strategy=strategy)
    return trainer.predict(Summing().double(), batches(8, 6, 0))


def fit_normalized(num_devices, *sizes):
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, num_microbatches="auto"),
        enable_checkpointing=False,
        max_epochs=1,
    )
    trainer.fit(Normalized().double(), batches(*sizes))
    return _numbers(trainer)


def batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    x = [torch.randint(WORDS, (size, LENGTH), generator=generator) for size in sizes]
    return DataLoader([{"x": batch, "y": batch} for batch in x], batch_size=None)


def test_predictions_without_a_row_for_each_sample_are_of_the_whole_batch(ranks):
    found, _ = ranks(2).run(predict, 2)
    torch.testing.assert_close(found, predict(0), rtol=1e-9, atol=1e-9, equal_nan=True)


def test_statistics_over_samples_have_two_of_them(ranks):
    (found,) = ranks(1).run(fit_normalized, 1, 2, 2)
    assert found == pytest.approx(fit_normalized(0, 2, 2), rel=1e-9)
    assert ranks(1).run(fit_normalized, 1, 4, 3)  # microbatches of two and two, and of three


@pytest.mark.parametrize(("kind", "inference_mode"), first(1, pairs([*MODELS], [True, False])))
def test_every_entry_point_is_that_of_one_device(ranks, tmp_path, kind, inference_mode):
    runs = kind, inference_mode
    expected = evaluate(*runs, 0, str(tmp_path / "one"))
    root, other = ranks(2).run(evaluate, *runs, 2, str(tmp_path / "two"))
    for name, value in expected.items():
        torch.testing.assert_close(root[name], value, rtol=1e-9, atol=1e-9, msg=name)
        if "predict" not in name:  # outputs are on global rank 0
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9, msg=name)
