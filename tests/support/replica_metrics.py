"""A step that gathers, reduces and logs in every way, under two strategies."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import fits, replica_fits


class Gathering(replica_fits.Net):
    """Gathers before and behind the blocks, and in hooks; has a BatchNorm on the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(16).double()
        self.mean, self.synced_mean = MeanMetric(), MeanMetric(dist_sync_on_step=True)
        self.losses: list[torch.Tensor] = []
        self.gathered: list[Any] = []

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        sums = self.all_gather(batch["x"].double().sum())  # in a trace too, where it has a value
        hidden = self.statistics(self.embed(batch["x"])) * (1 + 1e-3 * sums.mean())
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        everyones = self.all_gather(logits.logsumexp(-1), sync_grads=True)
        loss = nn.functional.cross_entropy(logits, batch["y"])
        return loss + 0.1 * (everyones**2 * everyones.mean(1, keepdim=True)).mean()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        logged = {"on_step": True, "on_epoch": True}
        self.log("train_loss", loss, **logged)
        self.log("synced", loss, sync_dist=True, **logged)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", **logged)
        self.log("total", loss, sync_dist=True, reduce_fx="sum", **logged)
        self.log("alone", loss, rank_zero_only=True)
        self.mean(loss.detach())
        self.log("mean", self.mean, **logged)
        self.log("synced_mean", self.synced_mean(loss.detach()))
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("val_own", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Any], batch_idx: int) -> None:
        self.gathered.append(self.all_gather(batch["x"]).tolist())

    def on_train_epoch_end(self) -> None:
        losses = self.all_gather(torch.stack(self.losses))
        self.log("epoch", losses.mean())
        self.gathered.append(losses.tolist())


def fit(strategy: str, num_ranks: int, **options: Any) -> dict[str, Any]:
    """Train two replicas for an epoch on shuffled samples, by this strategy or by Lightning's."""
    L.seed_everything(7, workers=True, verbose=False)
    module = Gathering()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=2 * num_ranks,
        strategy=strategy
        or PipeOffloadStrategy(num_microbatches=1, data_parallel_size=2, **options),
        max_epochs=1,
        enable_checkpointing=False,
        gradient_clip_val=0.5,
    )
    loaders = [
        DataLoader(replica_fits.samples(), 8, shuffle=shuffle, collate_fn=fits.collate)
        for shuffle in (True, False)
    ]
    trainer.fit(module, *loaders)
    state = trainer.strategy.lightning_module_state_dict()
    values = {name: value for name, value in state.items() if type(value) is torch.Tensor}
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "gathered": module.gathered,
        "state": {name: value.clone() for name, value in values.items()},
    }
