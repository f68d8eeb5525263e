"""Every entry point of the Trainer with models as people write them, compared with one device."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.support import fits
from tests.support.pairs import slow

WIDTH, WORDS, LENGTH = 8, 16, 6
EVALUATIONS = ("validate", "test", "predict")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory=None):
        if memory is not None:
            x = x + (x @ memory.transpose(1, 2)).softmax(-1) @ memory
        mixed = self.norm(x).cumsum(-2) / LENGTH
        return x + self.down(functional.gelu(self.up(mixed)))


class TiedHead(L.LightningModule):
    """A module with all of Lightning's steps around ``forward``."""

    options = {}

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.words.weight.T

    def loss(self, batch):
        return functional.cross_entropy(self(batch["x"]).flatten(0, -2), batch["x"].flatten())

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


class EncoderDecoder(TiedHead):
    options = {"blocks": ["encoder.*", "decoder.*"]}

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = self.blocks[:2], self.blocks[2:]
        del self.blocks
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


def module_of(kind):
    L.seed_everything(7, verbose=False)
    return kind().double()


def trainer_of(num_devices, *callbacks, inference_mode=True, **options):
    """Make a trainer over so many devices; 0: on one, without the strategy."""
    return L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, **options),
        max_epochs=2,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        inference_mode=inference_mode,
    )


def batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    x = [torch.randint(WORDS, (size, LENGTH), generator=generator) for size in sizes]
    return DataLoader([{"x": batch} for batch in x], batch_size=None)


def numbers(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def run_all(kind, inference_mode, num_devices, folder):
    """Evaluate before a fit, after it, and with the weights that it has saved."""

    def trainer():
        checkpoints = ModelCheckpoint(folder, monitor="val_loss")
        mode = {"inference_mode": inference_mode}
        return trainer_of(num_devices, checkpoints, **mode, **kind.options)

    def evaluate(method, trainer, module):
        if method == "predict":
            return trainer.predict(module, batches(8, 4))
        results = getattr(trainer, method)(module, batches(8, 4), verbose=False)
        return results, numbers(trainer)

    found = {f"{each} alone": evaluate(each, trainer(), module_of(kind)) for each in EVALUATIONS}
    fitting, module = trainer(), module_of(kind)
    fitting.fit(module, batches(8, 4), batches(8, 4))
    best = fitting.checkpoint_callback.best_model_path
    found |= {"fit": numbers(fitting), "weights": torch.load(best)["state_dict"]}
    loaded = kind.load_from_checkpoint(best).double()
    for name, each in [("after fit", module), ("after load", loaded)]:  # the same trainer
        found |= {f"{how} {name}": evaluate(how, fitting, each) for how in EVALUATIONS}
    return found


@pytest.mark.parametrize(("kind", "inference_mode"), [(EncoderDecoder, True), slow((TiedHead, 0))])
def test_every_entry_point_is_that_of_one_device(ranks, tmp_path, kind, inference_mode):
    expected = run_all(kind, inference_mode, 0, str(tmp_path / "one"))
    root, other = ranks(2).run(run_all, kind, inference_mode, 2, str(tmp_path / "two"))
    for name, value in expected.items():
        torch.testing.assert_close(root[name], value, rtol=1e-9, atol=1e-9, msg=name)
        if "predict" not in name:  # outputs are on global rank 0
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9, msg=name)


def predict(num_devices):
    trainer = trainer_of(num_devices, num_microbatches=4)
    return trainer.predict(module_of(Summing), batches(8, 6, 0))


def test_predictions_without_a_row_for_each_sample_are_of_the_whole_batch(ranks):
    found, _ = ranks(2).run(predict, 2)
    torch.testing.assert_close(found, predict(0), rtol=1e-9, atol=1e-9, equal_nan=True)


def fit_normalized(num_devices, *sizes):
    trainer = trainer_of(num_devices, num_microbatches="auto")
    trainer.fit(module_of(Normalized), batches(*sizes))
    return numbers(trainer)


def test_statistics_over_samples_have_two_of_them(ranks):
    (found,) = ranks(1).run(fit_normalized, 1, 2, 2)
    assert found == pytest.approx(fit_normalized(0, 2, 2), rel=1e-9)
    assert ranks(1).run(fit_normalized, 1, 4, 3)  # microbatches of two and two, and of three
