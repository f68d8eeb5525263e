"""What the rank processes of the tests run: small fits that return what is to be compared."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_pipeoffload import PipeOffloadStrategy

SILENT = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 1,
}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(nn.functional.gelu(self.linear(x)))


class Net(L.LightningModule):
    """Eight small blocks with dropout, an embedding and a head; in float64."""

    def __init__(self, tie=False, dropout=0.1, depth=8):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.accuracy = MeanMetric()
        self.double()

    def loss(self, batch):
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        self.accuracy((logits.argmax(-1) == batch["y"]).double())
        return nn.functional.cross_entropy(logits, batch["y"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        self.log("val_accuracy", self.accuracy)

    def predict_step(self, batch, batch_idx):
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def configure_optimizers(self):
        decayed = [p for n, p in self.named_parameters() if n.endswith("weight")]
        plain = [p for n, p in self.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def collate(samples):
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return {"x": x, "y": y, "names": [f"sample {int(i)}" for i in x]}


def samples(count=40):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randint(32, (count,), generator=generator),
        torch.randint(32, (count,), generator=generator),
    )


class Stream(IterableDataset):
    """Samples from a stream, drawn by the global generator."""

    def __iter__(self):
        for _ in range(40):
            yield torch.randint(32, ()), torch.randint(32, ())


def loader(kind="map", batch_size=8):
    if kind == "stream":
        return DataLoader(Stream(), batch_size, collate_fn=collate)
    return DataLoader(
        samples(),
        batch_size,
        shuffle=kind == "shuffled",
        num_workers=int(kind == "in workers"),
        collate_fn=collate,
    )


class Journal(Logger):
    """Keeps what is logged, as (step, numbers), on each rank or on global rank 0 alone."""

    name, version = "journal", 0

    def __init__(self, of_all=False):
        super().__init__()
        self.of_all, self.entries = of_all, []

    def log_metrics(self, metrics, step=None):
        if self.of_all or not rank_zero_only.rank:
            self.entries.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *args, **kwargs):
        """Do nothing."""


class Record(L.Callback):
    """Keeps what was trained on and logged."""

    def __init__(self):
        self.losses = []
        self.batches = []
        self.rates = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.batches.append(batch["x"].tolist())
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def strategy(num_devices, **options):
    """A strategy of a named schedule: what is chosen by measurement differs from run to run."""
    options = {"num_microbatches": 4, "schedule": "zb_h1", **options}
    return PipeOffloadStrategy(**options) if num_devices else "auto"


def trainer(num_devices, pipeline=None, **options):
    """A silent trainer without checkpoints, over so many ranks; 0: on one device.

    Args:
        num_devices: The number of ranks.
        pipeline: Arguments of the strategy.
        **options: Arguments of the trainer.
    """
    return L.Trainer(
        **{**SILENT, "enable_checkpointing": False, **options},
        devices=num_devices or 1,
        strategy=strategy(num_devices, **(pipeline or {})),
    )


def fit(num_devices, folder, **options):
    """Fit for two epochs; 0 devices: on one, without the strategy."""
    module_options = options.pop("module", {})
    data = options.pop("data", {})
    ckpt_path = options.pop("ckpt_path", None)
    trainer_options = {"max_epochs": 2, "gradient_clip_val": 0.5, **options.pop("trainer", {})}
    L.seed_everything(7, workers=True, verbose=False)
    record = Record()
    checkpoint = ModelCheckpoint(folder, "last", monitor="val_loss", enable_version_counter=False)
    module = Net(**module_options)
    trainer = L.Trainer(
        **SILENT,
        devices=num_devices or 1,
        strategy=strategy(num_devices, **options),
        callbacks=[record, checkpoint],
        **trainer_options,
    )
    trainer.fit(module, loader(**data), loader(), ckpt_path=ckpt_path)
    return {
        "losses": record.losses,
        "batches": record.batches,
        "rates": record.rates,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": checkpoint.best_model_path,
        "parameters": [name for name, _ in module.named_parameters()],
        "report": trainer.strategy.report() if num_devices else None,
    }


def outlive_failures(trainer):
    """Let no rank end with the run: the pool needs its processes for more."""

    def leave(exception):
        trainer.strategy.restore_user_objects()
        board = trainer.strategy.processes.board
        if board is not None:
            board.stop()

    trainer.strategy.launcher._fail = leave
