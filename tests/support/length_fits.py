"""Fits over texts of many lengths, for the processes of ranks."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeoffload.runtime.cut import StepRecords
from tests.support import fits

LENGTHS = (5, 17, 8, 11, 14, 9, 12, 7, 20, 13, 16, 10)
RESUMED = 9  # batches before the checkpoint


class Reader(L.LightningModule):
    """Encoder layers over padded texts; it tells by the mask whether any is padded."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(8, 16)
        self.double()

    def loss(self, texts):
        padded = texts == 0
        x = self.embed(texts)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padded if padded.any() else None)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), texts.flatten())

    def training_step(self, texts, batch_idx):
        loss = self.loss(texts)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, texts, batch_idx):
        self.log("val_loss", self.loss(texts))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(L.Callback):
    """Notes what is logged."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, *_):
        self.found.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_end(self, trainer, *_):
        self.found.append(float(trainer.callback_metrics["val_loss"]))


def texts_of(lengths):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(1, 16, (4, length), generator=generator) for length in lengths]
    for index, texts in enumerate(made):
        if index % 3:  # the others fill their batch
            texts[:, 4:] = 0
    return DataLoader(made, batch_size=None)


def fit(num_devices, folder, path, options):
    """Fit an epoch and validate in its midst, or go on from a checkpoint.

    Returns:
        The losses, and the lengths whose records were derived, by the kind of their step.
    """
    L.seed_everything(7, workers=True, verbose=False)
    losses, derived, plain = Losses(), [], StepRecords._derive_from_family

    def derive(records, shapes, *step):
        record = plain(records, shapes, *step)
        if record is not None:
            derived.append((shapes[0], shapes[-1]))
        return record

    checkpoint = ModelCheckpoint(folder, every_n_train_steps=RESUMED, save_top_k=-1)
    trainer = fits.trainer(
        num_devices,
        {"num_microbatches": 2, **options},
        max_epochs=1,
        callbacks=[losses, checkpoint],
        enable_checkpointing=True,
        val_check_interval=6,
        num_sanity_val_steps=0,
    )
    StepRecords._derive_from_family = derive
    try:
        trainer.fit(Reader(), texts_of(LENGTHS), texts_of(LENGTHS), ckpt_path=path)
    finally:
        StepRecords._derive_from_family = plain
    return losses.found, derived
