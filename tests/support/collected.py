"""Fits whose hooks decide by what their steps have collected."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn
from torchmetrics import MeanMetric, SumMetric

from tests.support import fits

SETS = {
    "lr": lambda module, value: _set(module, "lr", 0.1 * value),
    "weight_decay": lambda module, value: _set(module, "weight_decay", value),
    "weight": lambda module, value: [p.data.mul_(1 - 0.01 * value) for p in module.parameters()],
    "attribute": lambda module, value: setattr(module, "scale", value),
}
BETWEEN = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_validation_start",
)  # fmt: skip
USES = {
    "stack": lambda module: float(torch.stack(module.outs).sum()),
    "len": lambda module: len(module.outs),
    "for": lambda module: [float(loss) for loss in module.outs],
    "nested": lambda module: module.nested["val"][1],
    "number": lambda module: module.late + 1,
    "compute": lambda module: float(module.mean.compute()),
    "parts": lambda module: len(module.parts),
    "made": lambda module: module.made(),
}


def _set(module: Any, key: str, value: float) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group[key] = value


class Meter:
    """Keeps a sum."""

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, value: torch.Tensor) -> None:
        self.total = self.total + float(value)


class Block(fits.Block):
    """Leaves the size of its weight behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = self.linear.weight.norm().detach()
        return super().forward(x)


class Net(fits.Net):
    """Collects losses in all ways, and does with them what it is told."""

    def __init__(self, what: str = "", scheduler: str = "") -> None:
        L.seed_everything(7, verbose=False)
        super().__init__(dropout=0.0, depth=4)
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(4)).double()
        self.what, self.scheduler = what, scheduler
        self.keeps_first, self.first = True, 0.0
        self.keeps_parts, self.parts = False, []
        self.scale = 1.0
        self.outs: list[torch.Tensor] = []
        self.nested: dict[str, Any] = {"val": [[], []]}
        self.sums = [SumMetric()]
        self.mean = MeanMetric()
        self.late = 0.0

    def on_train_epoch_start(self) -> None:
        self.outs = []
        self.meter = Meter()

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        if self.keeps_first:
            self.first = self.embed.weight.norm().detach()
        return super().loss(batch)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = self.loss(batch) * self.scale
        self.outs.append(loss * len(batch["x"]))
        self.meter.add(loss.detach() * len(batch["x"]))
        self.sums[0].update(loss.detach() * len(batch["x"]))
        self.mean.update(loss.detach(), weight=len(batch["x"]))
        if self.keeps_parts:
            self.parts += [self.embed.weight.mean().detach(), loss.detach()]
            self.made = lambda: 1
        if batch_idx == 3:
            self.late = float(batch_idx)
        self.log("train_loss", loss)
        return {"loss": loss, "logits": torch.zeros(2, 3)}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.nested["val"][1].append((batch_idx, loss * len(batch["x"])))
        return {"loss": loss, "rows": batch["x"]}

    def collected(self, hook: str) -> float:
        losses = [loss for _, loss in self.nested["val"][1]] if "validation" in hook else self.outs
        return float(torch.stack(losses).sum()) / 80

    def decide(self, hook: str, *args: Any) -> None:
        if not self.trainer.sanity_checking:
            SETS[self.what](self, self.collected(hook))

    def on_validation_epoch_start(self) -> None:
        self.nested["val"][1].clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.scheduler:
            return optimizer
        by = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: self.collected("train") if epoch else 1.0
        )
        return [optimizer], [{"scheduler": by, "interval": self.scheduler}]


class Decides(L.Callback):
    """Does so in a callback."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, module, *args: module.decide(hook))


class Records(L.Callback):
    """Keeps what each rank has after an epoch, and metrics of its own."""

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        self.sum, self.rows = SumMetric(), []
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sum.update(outputs["loss"])

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any
    ) -> None:
        self.rows.append(outputs["rows"])

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.seen.append([
            *(float(metric.compute()) for metric in (self.sum, module.sums[0], module.mean)),
            module.late, float(torch.stack(module.outs).sum()), float(module.first),
            module.meter.total,
            *(float(block.size) for block in module.blocks),
            float(torch.cat(self.rows).double().mean()),
        ])  # fmt: skip
        for metric in (self.sum, module.sums[0], module.mean):
            metric.reset()


class Uses(L.Callback):
    """Uses what steps collect between batches; keeps what that gave, or raised, on each rank."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def use(self, module: Any, hook: str, names: Any = ("stack",)) -> None:
        for name in names:
            # In the first epoch, but what only a later batch writes, and not in the first batch.
            epoch = 1 if name == "number" else 0
            if module.trainer.current_epoch == epoch and module.trainer.fit_loop.batch_idx > 0:
                try:
                    self.found[f"{hook} {name}"] = USES[name](module)
                except RuntimeError as error:
                    self.found[f"{hook} {name}"] = str(error)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, i: int) -> None:
        if i == 4:
            self.use(module, "on_train_batch_start", ("stack", "len", "for", "number", "compute"))

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.use(module, "on_train_epoch_end", ("parts", "made"))

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self.use(module, "on_validation_batch_end", ("nested",))

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        try:
            self.found["outputs"] = outputs["logits"].shape[-1]
        except RuntimeError as error:
            self.found["outputs"] = str(error)


def fit_with_uses(num_devices: int) -> dict[str, Any]:
    """Fit with hooks that use what steps collect where only one rank has it."""
    uses, module = Uses(), Net(scheduler="step")
    module.collected = lambda hook: 1.0
    module.keeps_parts = True

    def use(hook: str, *args: Any, **kwargs: Any) -> Any:
        uses.use(module, hook)
        return getattr(type(module), hook)(module, *args, **kwargs)

    for hook in BETWEEN:
        setattr(module, hook, partial(use, hook))
    _fit(num_devices, module, [uses], max_epochs=2)
    return uses.found


def fit(
    num_devices: int, what: str = "", hook: str = "", by: str = "module", schedule: str = "zb_h1"
) -> list[Any]:
    """Fit for three epochs; return what each rank has then."""
    module = Net(what, hook if by == "scheduler" else "")
    module.keeps_first = schedule != "zb_v"  # whose rank has the first stage and the last
    callbacks: list[Any] = []
    if by == "callback":
        callbacks.append(Decides(hook))
    elif by == "module":
        setattr(module, hook, partial(module.decide, hook))
    records = Records()
    trainer = _fit(num_devices, module, [*callbacks, records], max_epochs=3, schedule=schedule)
    group = trainer.optimizers[0].param_groups[0]
    return [
        *records.seen,
        [group["lr"], group["weight_decay"], float(module.scale)],
        [float(trainer.callback_metrics["train_loss"])],
    ]


def fit_replicas() -> list[list[float]]:
    """Fit with two replicas; return what each rank has after each epoch."""
    records = Records()
    _fit(4, Net(), [records], max_epochs=2, data_parallel_size=2)
    return records.seen


def _fit(
    num_devices: int, module: Any, callbacks: list[Any], max_epochs: int, **options: Any
) -> L.Trainer:
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, **options),
        max_epochs=max_epochs,
        callbacks=callbacks,
        enable_checkpointing=False,
    )
    trainer.fit(module, fits.loader(), fits.loader())
    return trainer
