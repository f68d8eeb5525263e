"""Fits of a Hugging Face model whose weights come from a folder; each rank reads its part."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_pipeoffload import load_weights
from lightning_pipeoffload.runtime.stored_tensor import StoredTensor
from tests.support import fits


class Loaded(L.LightningModule):
    """Makes its layers where its weights are loaded."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            config = AutoConfig.from_pretrained(self.folder)
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            load_weights(self.model, self.folder)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adapted(Loaded):
    """Trains adapters of the model, in float64."""

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model

        if self.model is None:
            super().configure_model()
            config = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], modules_to_save=["norm"])
            self.model = get_peft_model(self.model, config).double()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def data() -> torch.Tensor:
    return torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(0))


def fit(
    size: int, folder: str, options: dict[str, Any], kind: type[Loaded] = Loaded, num_steps: int = 2
) -> dict[str, Any]:
    """Fit; return the losses, sizes of what was read, and the stages."""
    losses = []
    read = []
    value = StoredTensor.value

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    def value_counted(stored: StoredTensor) -> torch.Tensor:
        read.append(stored.numel())
        return value(stored)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTensor, "value", value_counted)
        trainer = L.Trainer(
            **fits.SILENT,
            devices=size or 1,
            strategy=fits.strategy(size, **options),
            max_steps=num_steps,
            callbacks=[Losses()],
            enable_checkpointing=False,
        )
        L.seed_everything(7, workers=True, verbose=False)
        trainer.fit(kind(folder), DataLoader(data(), 8))
    stages = trainer.strategy.report()["stages"] if size else []
    return {"losses": losses, "read": sum(read), "stages": stages}
