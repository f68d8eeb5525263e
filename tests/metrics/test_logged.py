"""What is logged, in every way, equals what one device logs; so do the hooks that log it."""

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import CosineSimilarity, MeanMetric, MeanSquaredError, MetricCollection, R2Score
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
)
from torchmetrics.text import Perplexity

from tests.support import fits
from tests.support.pairs import first

NUM_CLASSES = 32
_LIMITS = {"limit_train_batches": 4, "limit_val_batches": 2, "limit_test_batches": 2}


class Seen(L.Callback):
    """Keeps what a callback may decide on, where Lightning decides."""

    def __init__(self):
        self.metrics = []
        self.dtypes = []  # 0.7 is less in float32 than in float64

    def see(self, trainer):
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.dtypes.append({k: v.dtype for k, v in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.see(trainer)

    def on_train_epoch_end(self, trainer, module):
        self.see(trainer)

    def on_train_end(self, trainer, module):
        self.see(trainer)


class Plain(fits.Net):
    """Four blocks without dropout; logs nothing yet."""

    def __init__(self):
        super().__init__(dropout=0.0, depth=4)

    def logits(self, batch):
        return self.predict_step(batch, 0)

    def step(self, batch):
        logits = self.logits(batch)
        return logits, nn.functional.cross_entropy(logits, batch["y"])

    def training_step(self, batch, batch_idx):
        return self.step(batch)[1]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.step(batch)[1]

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return self.validation_step(batch, batch_idx, dataloader_idx)


class MetricObjects(Plain):
    """Updates metrics, alone and in collections, and logs them as objects."""

    def __init__(self):
        super().__init__()
        kinds = {
            "acc": MulticlassAccuracy(NUM_CLASSES, average="micro"),
            "f1": MulticlassF1Score(NUM_CLASSES, average="macro"),
        }
        self.single = MulticlassF1Score(NUM_CLASSES, average="macro")
        self.several = MetricCollection(dict(kinds), prefix="train_")
        self.val = MetricCollection({**kinds, "auroc": MulticlassAUROC(NUM_CLASSES)}, prefix="val_")
        self.updated = MeanMetric()
        # They apply a sigmoid where some value of an update is outside of [0, 1].
        self.of_logits = MetricCollection([BinaryAccuracy(), BinaryAUROC()], prefix="of_logits_")
        self.val_r2 = R2Score()

    def training_step(self, batch, batch_idx):
        logits, loss = self.step(batch)
        self.single(logits, batch["y"])
        self.log("single", self.single, on_step=True, on_epoch=True)
        self.several(logits, batch["y"])
        self.log_dict(self.several, on_step=True, on_epoch=True)
        self.updated.update(loss.detach())
        self.log("updated", self.updated, on_epoch=True, on_step=False)
        self.log_dict(self.of_logits((logits[:, 0] + 0.9) / 1.8, batch["y"] % 2), on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits, _ = self.step(batch)
        # Alike samples are a tie for AUROC; the first batch runs whole, and rounds otherwise.
        self.val.update(logits.round(decimals=9), batch["y"])
        self.log_dict(self.val)
        self.log("val_r2", self.val_r2(logits[:, 0].float(), logits[:, 1].float()))


class Undetached(Plain):
    """Gives metrics its outputs as they are, trains on one, and logs what their calls return."""

    def __init__(self):
        super().__init__()
        self.perplexity = Perplexity()
        self.single = MulticlassF1Score(NUM_CLASSES, average=None)
        errors = {"mse": MeanSquaredError(), "r2": R2Score()}
        self.several = MetricCollection(errors, prefix="train_")
        self.cosine = CosineSimilarity(reduction="mean")
        for metric in (*self.several.values(), self.perplexity, self.cosine):
            metric.set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        logits, loss = self.step(batch)
        target = nn.functional.one_hot(batch["y"], NUM_CLASSES).double()
        self.log("perplexity", self.perplexity(logits[:, None], batch["y"][:, None]))
        self.log("object", self.perplexity, on_step=True, on_epoch=True)
        self.log_dict(self.several(logits.flatten(), target.flatten()), on_step=True, on_epoch=True)
        self.log("f1_of_3", self.single(logits, batch["y"])[3].detach(), reduce_fx="max")
        similarity = self.cosine(logits, target)
        self.log("cosine", self.cosine, on_epoch=True)
        return loss - similarity

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits, _ = self.step(batch)
        self.log("val_perplexity", self.perplexity(logits[:, None], batch["y"][:, None]))


class Reductions(Plain):
    """Logs values with every reduction and option."""

    def log_all(self, batch, prefix):
        logits, loss = self.step(batch)
        right = (logits.argmax(-1) == batch["y"]).double()
        self.log(f"{prefix}loss", loss, prog_bar=True, sync_dist=True)
        self.log(f"{prefix}both", loss, on_step=True, on_epoch=True)
        self.log(f"{prefix}sum", right.sum(), on_epoch=True, on_step=False, reduce_fx="sum")
        self.log(f"{prefix}max", logits.max(), on_epoch=True, on_step=True, reduce_fx="max")
        self.log(f"{prefix}min", logits.min(), on_epoch=True, on_step=True, reduce_fx=torch.min)
        self.log(f"{prefix}number", 3, on_epoch=True)
        self.log_dict({f"{prefix}a": loss * 2, f"{prefix}b": right.mean()}, on_epoch=True)
        self.log(f"{prefix}weighted", loss, batch_size=len(batch["x"]), on_epoch=True)
        self.log(f"{prefix}hidden", loss, logger=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return {"loss": self.log_all(batch, "train_"), "note": "kept"}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.log_all(batch, "val_")
        self.log(f"alone_{dataloader_idx}", loss, add_dataloader_idx=False)


class Collects(Plain):
    """Collects in its steps, and uses that at the ends of epochs."""

    def __init__(self):
        super().__init__()
        self.outputs = []
        self.losses = {"train": []}
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        _, loss = self.step(batch)
        self.losses["train"].append(loss.detach() * len(batch["x"]))
        return loss

    def on_train_epoch_end(self):
        self.log("train_collected", torch.stack(self.losses["train"]).sum() / 40)
        self.losses["train"].clear()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits, loss = self.step(batch)
        self.outputs.append(loss * len(batch["x"]))
        self.accuracy.update(logits, batch["y"])
        return loss

    def on_validation_epoch_end(self):
        self.log("collected", torch.stack(self.outputs).sum())
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()
        self.outputs = []

    on_test_epoch_end = on_validation_epoch_end


class LogsInHooks(Plain):
    """Logs in hooks of its own; see also :class:`LogsInCallback`."""

    def training_step(self, batch, batch_idx):
        _, loss = self.step(batch)
        self.last = loss.detach()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return {"value": self.step(batch)[1], "rows": batch["x"]}

    def on_train_batch_start(self, batch, batch_idx):
        self.log("started", float(batch_idx))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("of_outputs", outputs["loss"], on_step=True, on_epoch=True)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("val_of_outputs", outputs["value"], batch_size=len(outputs["rows"]))

    def on_validation_epoch_start(self):
        self.log("val_started", float(self.current_epoch))

    def on_validation_epoch_end(self):
        self.log("val_epoch", float(self.current_epoch))

    def on_train_epoch_end(self):
        self.log("epoch", float(self.current_epoch), on_epoch=True)


class LogsInCallback(L.Callback):
    """Logs in its hooks."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.log("callback_step", float(batch_idx), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer, module):
        module.log("callback_val", trainer.global_step + 0.5)

    def on_train_epoch_end(self, trainer, module):
        module.log("callback_epoch", trainer.global_step + 0.25)


class CollectsInCallback(L.Callback):
    """Collects the outputs of validation steps, and logs what it makes of them."""

    def __init__(self):
        self.values = []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.values.append(outputs["rows"].double().mean())

    def on_validation_epoch_end(self, trainer, module):
        module.log("callback_collected", torch.stack(self.values).mean())
        self.values.clear()


class LogsEverywhere(Plain):
    """Logs what is computed before the blocks, between them and after them."""

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["x"])
        self.log("of_batch", batch["x"].double().mean(), on_step=True, on_epoch=True)
        self.log("of_embedding", hidden.detach().mean(), on_step=True, on_epoch=True)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            self.log(f"of_block_{index}", hidden.detach().mean(), on_step=True, on_epoch=True)
        loss = nn.functional.cross_entropy(self.head(self.norm(hidden)), batch["y"])
        self.log("loss", loss)
        return loss


_FLAGS = {
    "inference_mode": False,
    "gradient_clip_val": 0.01,
    "gradient_clip_algorithm": "value",
    "deterministic": True,
    "detect_anomaly": True,
    "profiler": "simple",
    "use_distributed_sampler": False,
    "sync_batchnorm": True,
}

# name of a row: the module, how often to validate what, and the trainer's options
ROWS = {
    "metric objects": (MetricObjects, {"num_loaders": 2}),
    "reductions": (Reductions, {"num_loaders": 2}),
    "hooks": (LogsInHooks, {"callbacks": [LogsInCallback, CollectsInCallback]}),
    "undetached": (Undetached, {}),
    "collected": (Collects, {}),
    "everywhere": (LogsEverywhere, {}),
    "accumulated": (Reductions, {"trainer": {"accumulate_grad_batches": 2}}),
    "flags": (Reductions, {"trainer": _FLAGS}),
    "overfit": (Collects, {"trainer": {"overfit_batches": 2, "benchmark": True}}),
    "64-true": (Reductions, {"single": True, "trainer": {"precision": "64-true"}}),
    "bf16-mixed": (Reductions, {"single": True, "trainer": {"precision": "bf16-mixed"}}),
    "16-true": (Reductions, {"single": True, "trainer": {"precision": "16-true"}}),
}


def fit(num_devices, row, **options):
    """Fit, validate and test a row; 0 devices: on one, without the strategy."""
    kind, settings = ROWS[row]
    L.seed_everything(7, verbose=False)
    module = kind()
    if settings.get("single"):
        module.float()
    memory, seen = fits.Journal(of_all=True), Seen()
    trainer = fits.trainer(
        num_devices,
        options,
        logger=memory,
        callbacks=[*(made() for made in settings.get("callbacks", ())), seen],
        log_every_n_steps=1,
        max_epochs=2,
        **_LIMITS,
        **settings.get("trainer", {}),
    )
    loaders = [fits.loader() for _ in range(settings.get("num_loaders", 1))]
    trainer.fit(module, fits.loader(), loaders)
    progress = dict(trainer.progress_bar_metrics)
    validated = trainer.validate(module, loaders, verbose=False)
    tested = trainer.test(module, loaders, verbose=False)
    return {
        "seen": seen.metrics,
        "dtypes": seen.dtypes,
        "lines": memory.entries,
        "progress": [progress],
        "validated": validated,
        "tested": tested,
    }


# bfloat16 keeps 8 bits and float16 11; a sum over microbatches rounds otherwise than one over all.
TOLERANCE = {"16-true": 5e-3, "bf16-mixed": 2e-2}
TOLERANCE["metric objects"] = 1e-6  # torchmetrics counts in float32
TOLERANCE["undetached"] = 1e-6


NUMBERS = "seen", "lines", "progress", "validated", "tested"


def _fit_both(row):
    return [fit(2, row, schedule=schedule) for schedule in ("1f1b", "zb_v")]


@pytest.mark.parametrize("row", first(3, [*ROWS]))
def test_all_ranks_see_what_one_device_logs(ranks, row):
    expected = fit(0, row)
    for global_rank, results in enumerate(ranks(2).run(_fit_both, row)):
        for result in results:
            assert result["dtypes"] == expected["dtypes"]
            for kind in ("seen", "validated", "tested") if global_rank else NUMBERS:
                assert_close(result[kind], expected[kind], TOLERANCE.get(row, 1e-9))


def assert_close(found, expected, tolerance):
    """Compare lists of metrics; those that a logger got have their step too."""
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        if isinstance(other, tuple):
            assert mine[0] == other[0]
            mine, other = mine[1], other[1]
        assert mine == pytest.approx(other, rel=tolerance, abs=tolerance, nan_ok=True)
