"""Fits whose weights are shared out by torch's fully_shard, saved in FSDPStrategy's layout.

FSDPStrategy itself refuses the CPU; what it writes is written here by its own lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint import save
from torch.distributed.fsdp import fully_shard

from tests.support import fits


class Sharded(fits.Net):
    """Each of its parts is shared out; the step calls them, not the module."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (self.embed, *self.blocks, self.norm, self.head):
            fully_shard(part, mesh=mesh)


class SavesAsFSDP(ModelParallelStrategy):
    """Writes what FSDPStrategy writes."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        state = {"model": checkpoint.pop("state_dict")}
        for place, optimizer in enumerate(checkpoint.pop("optimizer_states")):
            state[f"optimizer_{place}"] = optimizer
        save(state, checkpoint_id=path)
        if self.is_global_zero:
            torch.save(checkpoint, path / "meta.pt")


def fit(kind: str, path: str, resumes: bool, options: dict[str, Any]) -> list[float]:
    """Fit an epoch and save, sharded over two processes or not, or go on for a second one."""
    L.seed_everything(7, workers=True, verbose=False)
    record = fits.Record()
    size = 1 if kind == "plain" else 2
    strategy: Any = {
        "plain": lambda: "auto",
        "sharded": lambda: SavesAsFSDP(data_parallel_size=2, tensor_parallel_size=1),
        "pipeline": lambda: fits.strategy(2, **options),
    }[kind]()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=size,
        strategy=strategy,
        max_epochs=2 if resumes or kind == "plain" else 1,
        callbacks=[record],
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    module = (Sharded if kind == "sharded" else fits.Net)(dropout=0.0)
    trainer.fit(module, fits.loader(), ckpt_path=path if resumes else None)
    if kind == "sharded":
        trainer.save_checkpoint(path)
    return record.losses
