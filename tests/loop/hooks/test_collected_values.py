"""Hooks decide alike on all ranks by what steps have collected on some, or are refused."""

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm
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


def _set(module, key, value):
    for group in module.trainer.optimizers[0].param_groups:
        group[key] = value


class Meter:
    """Keeps a sum."""

    def __init__(self):
        self.total = 0.0

    def add(self, value):
        self.total = self.total + float(value)


class Block(fits.Block):
    """Leaves the size of its weight behind."""

    def forward(self, x):
        self.size = self.linear.weight.norm().detach()
        return super().forward(x)


class Net(fits.Net):
    """Collects losses in all ways, and does with them what it is told."""

    def __init__(self, what="", scheduler=""):
        L.seed_everything(7, verbose=False)
        super().__init__(dropout=0.0, depth=4)
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(4)).double()
        self.what, self.scheduler = what, scheduler
        self.keeps_first, self.first = True, 0.0
        self.keeps_parts, self.parts = False, []
        self.scale = 1.0
        self.outs = []
        self.nested = {"val": [[], []]}
        self.sums = [SumMetric()]
        self.mean = MeanMetric()
        self.late = 0.0

    def on_train_epoch_start(self):
        self.outs = []
        self.meter = Meter()

    def loss(self, batch):
        if self.keeps_first:
            self.first = self.embed.weight.norm().detach()
        if self.keeps_parts and self.training:
            self.parts.append(self.embed.weight.mean().detach())
        return super().loss(batch)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * self.scale
        self.outs.append(loss * len(batch["x"]))
        self.meter.add(loss.detach() * len(batch["x"]))
        self.sums[0].update(loss.detach() * len(batch["x"]))
        self.mean.update(loss.detach(), weight=len(batch["x"]))
        if self.keeps_parts:
            self.parts.append(loss.detach())
            self.made = lambda: 1
        if batch_idx == 3:
            self.late = float(batch_idx)
        self.log("train_loss", loss)
        return {"loss": loss, "logits": torch.zeros(2, 3)}

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.nested["val"][1].append((batch_idx, loss * len(batch["x"])))
        return {"loss": loss, "rows": batch["x"]}

    def collected(self, hook):
        losses = [loss for _, loss in self.nested["val"][1]] if "validation" in hook else self.outs
        return float(torch.stack(losses).sum()) / 80

    def decide(self, hook, *args):
        if not self.trainer.sanity_checking:
            SETS[self.what](self, self.collected(hook))

    def on_validation_epoch_start(self):
        self.nested["val"][1].clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.scheduler:
            return optimizer
        by = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: self.collected("train") if epoch else 1.0
        )
        return [optimizer], [{"scheduler": by, "interval": self.scheduler}]


class Decides(L.Callback):
    """Does so in a callback."""

    def __init__(self, hook):
        setattr(self, hook, lambda trainer, module, *args: module.decide(hook))


class Records(L.Callback):
    """Keeps what each rank has after an epoch, and metrics of its own."""

    def on_fit_start(self, trainer, module):
        self.sum, self.rows = SumMetric(), []
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.sum.update(outputs["loss"])

    def on_validation_batch_end(self, trainer, module, outputs, *args):
        self.rows.append(outputs["rows"])

    def on_train_epoch_end(self, trainer, module):
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

    def __init__(self):
        self.found = {}

    def use(self, module, hook, names=("stack",)):
        for name in names:
            # In the first epoch, but what only a later batch writes, and not in the first batch.
            epoch = 1 if name == "number" else 0
            if module.trainer.current_epoch == epoch and module.trainer.fit_loop.batch_idx > 0:
                try:
                    self.found[f"{hook} {name}"] = USES[name](module)
                except RuntimeError as error:
                    self.found[f"{hook} {name}"] = str(error)

    def on_train_batch_start(self, trainer, module, batch, i):
        if i == 4:
            self.use(module, "on_train_batch_start", ("stack", "len", "for", "number", "compute"))

    def on_train_epoch_end(self, trainer, module):
        self.use(module, "on_train_epoch_end", ("parts", "made"))

    def on_validation_batch_end(self, trainer, module, *args):
        self.use(module, "on_validation_batch_end", ("nested",))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        try:
            self.found["outputs"] = outputs["logits"].shape[-1]
        except RuntimeError as error:
            self.found["outputs"] = str(error)


def fit_with_uses(num_devices):
    """Fit with hooks that use what steps collect where only one rank has it."""
    uses, module = Uses(), Net(scheduler="step")
    module.collected = lambda hook: 1.0
    module.keeps_parts = True

    def use(hook, *args, **kwargs):
        uses.use(module, hook)
        return getattr(type(module), hook)(module, *args, **kwargs)

    for hook in BETWEEN:
        setattr(module, hook, partial(use, hook))
    _fit(num_devices, module, [uses], max_epochs=2)
    return uses.found


def fit(num_devices, what="", hook="", by="module", schedule="zb_h1"):
    """Fit for two epochs; return what each rank has then."""
    module = Net(what, hook if by == "scheduler" else "")
    module.keeps_first = schedule != "zb_v"  # whose rank has the first stage and the last
    callbacks = []
    if by == "callback":
        callbacks.append(Decides(hook))
    elif by == "module":
        setattr(module, hook, partial(module.decide, hook))
    records = Records()
    trainer = _fit(num_devices, module, [*callbacks, records], max_epochs=2, schedule=schedule)
    group = trainer.optimizers[0].param_groups[0]
    return [
        *records.seen,
        [group["lr"], group["weight_decay"], float(module.scale)],
        [float(trainer.callback_metrics["train_loss"])],
    ]


def fit_replicas():
    """Fit with two replicas; return what each rank has after each epoch."""
    records = Records()
    _fit(4, Net(), [records], max_epochs=2, data_parallel_size=2)
    return records.seen


def _fit(num_devices, module, callbacks, max_epochs, **options):
    trainer = fits.trainer(num_devices, options, max_epochs=max_epochs, callbacks=callbacks)
    trainer.fit(module, fits.loader(), fits.loader())
    return trainer


# what is set in which hook, by the module, a callback or a scheduler
AT_ENDS = (
    ("lr", "on_train_epoch_end"),
    ("weight_decay", "on_validation_epoch_end", "callback"),
    ("weight", "on_validation_epoch_end", "module", "zb_v"),
    ("attribute", "on_train_epoch_end", "callback"),
    ("lr", "epoch", "scheduler"),
)


def _fit_all():
    return [fit(2, *row) for row in AT_ENDS], fit_with_uses(2)


@pytest.fixture(scope="module")
def found(ranks):
    return ranks(2).run(_fit_all)


@pytest.mark.parametrize("row", AT_ENDS, ids=" ".join)
def test_at_an_epochs_end_all_ranks_have_what_one_device_has(found, row):
    expected = fit(0, *row)
    for each, _ in found:
        for mine, other in zip(each[AT_ENDS.index(row)], expected, strict=True):
            assert mine == pytest.approx(other, rel=1e-6)  # torchmetrics counts in float32


def test_between_batches_a_use_is_refused_by_name_where_it_is_not(found):
    on_root, elsewhere = (uses for _, uses in found)
    # Which no rank has all of: refused on all, and what cannot be pickled on the others.
    assert "each of several stages has some of it" in on_root.pop("on_train_epoch_end parts")
    assert "each of several stages has some of it" in elsewhere.pop("on_train_epoch_end parts")
    assert "it cannot be pickled" in elsewhere["on_train_epoch_end made"]
    assert not [value for value in on_root.values() if isinstance(value, str)]
    assert not [hook for hook, value in elsewhere.items() if not isinstance(value, str)]
    assert elsewhere.keys() == on_root.keys() >= {f"{hook} stack" for hook in BETWEEN}
    message = elsewhere["on_train_batch_end stack"]
    assert message.startswith("self.outs is not on global rank 1 between batches: the step writes")
    assert "it on global rank 0. Use self.log in the step and trainer.callback_metrics" in message
    assert elsewhere["on_validation_batch_end nested"].startswith("self.nested")
    assert elsewhere["on_train_batch_start number"].startswith("self.late")
    assert elsewhere["on_train_batch_start compute"].startswith("self.mean")
    assert "of what training_step returns, only numbers are on every rank" in elsewhere["outputs"]


def test_a_replica_has_its_own_lists_and_metrics_over_all_replicas(ranks):
    found = ranks(4).run(fit_replicas)
    assert found[0] == found[1]
    assert found[2] == found[3]
    for one, other in zip(found[0], found[2], strict=True):
        *metrics, _, own, _, _, shared = one[:8]
        assert metrics == other[:3]
        assert (own, shared) != (other[4], other[7])
        assert metrics[1] == pytest.approx(own + other[4])


def read_normed_weights(num_devices):
    """Fit with spectral_norm; return the weights that it computes, or the error of their use."""
    L.seed_everything(7, verbose=False)
    module, found = fits.Net(dropout=0.0, depth=4), ([], [])
    for block in module.blocks:
        spectral_norm(block.linear)

    def read(*args):
        for block, values in zip((module.blocks[0], module.blocks[3]), found, strict=True):
            try:
                values.append(float(block.linear.weight.sum()))
            except RuntimeError as error:
                values.append(str(error).partition(" is not on")[0])

    module.on_train_batch_end = read
    _fit(num_devices, module, [], max_epochs=1, num_microbatches=1, schedule="1f1b")
    return found


def test_a_weight_that_a_hook_of_torch_computes_is_on_its_stage(ranks):
    of_first, of_last = ranks(1).run(read_normed_weights, 1)[0]
    on_last, on_first = ranks(2).run(read_normed_weights, 2)
    assert on_first == (of_first, ["self.blocks.3.linear.weight"] * len(of_last))
    assert on_last == (["self.blocks.0.linear.weight"] * len(of_first), of_last)
