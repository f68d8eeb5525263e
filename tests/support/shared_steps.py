"""Fits of replicas that share out the optimizer's step, and the same on one device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.leaves import tensors_in
from tests.support import fits, replica_fits

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-1}),
}


class Net(replica_fits.Net):
    """With an optimizer by its name, of two groups."""

    def __init__(self, optimizer: str = "adamw", infinite_at: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.kind = optimizer
        self.infinite_at = infinite_at

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == self.infinite_at else loss

    def configure_optimizers(self) -> dict[str, Any]:
        members = list(self.named_parameters())
        kind, options = OPTIMIZERS[self.kind]
        groups = [
            {"params": [p for n, p in members if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in members if not n.endswith("weight")], "weight_decay": 0.0},
        ]
        optimizer = kind(groups, **options)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        config = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def train(
    num_replicas: int,
    num_ranks: int,
    module: dict[str, Any],
    fits_in_turn: list[dict[str, Any]],
) -> dict[str, Any]:
    """Run fits, each of which may go on with what the one before has saved.

    Args:
        num_replicas: Replicas of the pipeline.
        num_ranks: Ranks of each.
        module: Arguments of the module.
        fits_in_turn: The strategy's options of each fit; but ``steps``, the step to which it
            trains, ``scaled`` for 16-mixed, ``save``, a path to save to, ``resume``, one to go on
            with, and ``callbacks``, classes instead of one that notes the batches.
    """
    batches = replica_fits.Batches()
    numbers = []
    for options in fits_in_turn:
        L.seed_everything(7, workers=True, verbose=False)
        given = dict(options)
        steps, save, resume = given.pop("steps", 5), given.pop("save"), given.pop("resume", None)
        trainer_options = {"gradient_clip_val": 0.5, **given.pop("trainer", {})}
        callbacks = [make() for make in given.pop("callbacks", [lambda: batches])]
        if given.pop("scaled", False):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            trainer_options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        strategy = PipeOffloadStrategy(
            **{
                "num_microbatches": 4,
                "schedule": "zb_h1",
                "data_parallel_size": num_replicas,
                **given,
            }
        )
        trainer = L.Trainer(
            **fits.SILENT,
            devices=num_replicas * num_ranks,
            strategy=strategy,
            callbacks=callbacks,
            max_steps=steps,
            enable_checkpointing=False,
            **trainer_options,
        )
        loader = DataLoader(replica_fits.samples(), 8, collate_fn=fits.collate)
        plain = Executor._with_weights
        with patch.object(Executor, "_with_weights", autospec=True, side_effect=plain) as waits:
            trainer.fit(Net(**module), loader, ckpt_path=resume)
        trainer.save_checkpoint(save)
        numbers.append(
            {
                "kept": sum(t.nbytes for t in tensors_in([*trainer.optimizers[0].state.values()])),
                "estimated": sum(strategy.report()["memory"]["optimizer"]),
                "late": waits.call_count,
            }
        )
    return {"replica": strategy.group.replica, "tokens": batches.tokens, "numbers": numbers}


def train_plain(batches: list[list[int]], accumulate: int = 1, **options: Any) -> dict[str, Any]:
    """Train on one device, in plain torch; return weights and the optimizer's state."""
    L.seed_everything(7, workers=True, verbose=False)
    module = Net(**options)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for index, batch in enumerate(batches):
        tokens = torch.tensor(batch)
        loss = module.loss({"x": tokens, "y": replica_fits.labels(tokens)})
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return {
        "state_dict": {name: value.detach() for name, value in module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
