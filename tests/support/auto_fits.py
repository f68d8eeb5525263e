"""Fits by ``schedule="auto"``, and the same ones with what it has chosen named by hand."""

import lightning as L
import torch
from torch import nn

from tests.support import fits


class Awkward(fits.Net):
    """What a measurement could leave a trace in: statistics, counts, a generator, an average."""

    def __init__(self, tie=False, frozen=False):
        super().__init__(tie)
        for block in self.blocks:
            block.linear = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.average = nn.Parameter(torch.ones(16), requires_grad=False)
        self.generator = torch.Generator().manual_seed(5)
        self.calls = 0
        self.losses = []
        self.blocks[1].requires_grad_(not frozen)
        self.double()

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.losses.append(batch_idx)
        self.seen += len(batch["x"])
        noise = 1 + 0.1 * torch.randn((), generator=self.generator, dtype=torch.float64)
        return super().training_step(batch, batch_idx) * noise

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


class Scaled(nn.Module):
    """A block that keeps much and computes little."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return x + nn.functional.gelu(x * self.weight)


class Wide(fits.Net):
    """Blocks of which each keeps 32 KiB of two samples."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 1024)
        self.blocks = nn.ModuleList(Scaled() for _ in range(8))
        self.norm = nn.LayerNorm(1024)
        self.head = nn.Linear(1024, 32, bias=False)
        self.double()


class Bare(Wide):
    """A module in which nothing depends on the number of microbatches."""

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        loss = nn.functional.cross_entropy(self.head(self.norm(hidden)), batch["y"])
        self.log("train_loss", loss)
        return loss


class Counting(nn.Module):
    """A block that uses how often it was called: another number where it runs again."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, x):
        self.calls += 1
        return x + torch.tanh(self.linear(x)) / self.calls


class Counts(fits.Net):
    """Has such a block."""

    def __init__(self):
        super().__init__(dropout=0.0, depth=4)
        self.blocks[1] = Counting().double()


class Late(fits.Net):
    """Makes its layers in ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.blocks = None

    def configure_model(self):
        if self.blocks is None:
            self.blocks = nn.ModuleList(fits.Block(0.1) for _ in range(8)).double()


class Levels(fits.Net):
    """Its blocks are those that the step calls, of two lists."""

    def __init__(self, depth):
        super().__init__(depth=2 * depth)
        self.first, self.second = self.blocks[:depth], self.blocks[depth:]
        del self.blocks
        self.blocks = *self.first, *self.second


MODULES = {
    "awkward": Awkward,
    "bare": Bare,
    "counts": Counts,
    "plain": fits.Net,
    "late": Late,
    "levels": Levels,
    "wide": Wide,
}


class Drawn(L.Callback):
    """Keeps what the global generators give in the midst of training."""

    def __init__(self):
        self.numbers = []

    def on_train_batch_end(self, *args):
        self.numbers.append(float(torch.rand(())))


def fit(num_devices, path, form, options):
    """Fit for three batches; return what is left of it."""
    options = {"schedule": "auto", **options}
    module_options, data = options.pop("module", {}), options.pop("data", {})
    ckpt_path, trainer_options = options.pop("ckpt_path", None), options.pop("trainer", {})
    L.seed_everything(7, workers=True, verbose=False)
    drawn = Drawn()
    record = fits.Record()
    module = MODULES[form](**module_options)
    trainer = fits.trainer(
        num_devices,
        options,
        max_steps=3 if ckpt_path is None else 5,
        limit_val_batches=1,
        callbacks=[drawn, record],
        **trainer_options,
    )
    trainer.fit(module, fits.loader(**data), fits.loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    if trainer.global_rank:
        return {}
    return {
        "report": trainer.strategy.report(),
        "state": torch.load(path, weights_only=False)["state_dict"],
        "drawn": drawn.numbers,
        "losses": record.losses,
        "batches": record.batches,
        "kept": getattr(module, "calls", 0),
    }


def auto_and_by_hand(num_devices, folder, form, options):
    """Fit by what is chosen, and once more by what was chosen, named."""
    own = fit(num_devices, f"{folder}/own.ckpt", form, options)
    report = own.get("report", {})
    names = "schedule", "num_chunks", "num_microbatches", "recompute"
    chosen = [report.get(name) for name in names]
    if num_devices > 1:
        torch.distributed.broadcast_object_list(chosen, 0)
    named = dict(zip(names, chosen, strict=True))
    return own, fit(num_devices, f"{folder}/named.ckpt", form, {**options, **named})


def by_each(num_devices, folder, options, plans):
    """Fit a module with a tied weight by each of some plans."""
    tied = {"module": {"tie": True}, **options}
    return [fit(num_devices, f"{folder}/{i}.ckpt", "plain", tied | p) for i, p in enumerate(plans)]


def fit_levels(num_devices, folder, starts):
    """Fit modules of so many layers, with so many batches of a sanity check; return the reports."""
    options = {"plan_cache": f"{folder}/plans"}
    reports = []
    for depth, num_checked in starts:
        more = {"module": {"depth": depth}, "trainer": {"num_sanity_val_steps": num_checked}}
        reports.append(fit(num_devices, f"{folder}/a.ckpt", "levels", options | more))
    return [done.get("report") for done in reports]


def fit_twice(num_devices):
    """Train a module by one trainer, and on by another; return its schedules and losses."""
    L.seed_everything(7, workers=True, verbose=False)
    module, schedules, record = fits.Net(), [], fits.Record()
    for _ in range(2):
        trainer = fits.trainer(num_devices, {"schedule": "auto"}, max_steps=2, callbacks=[record])
        trainer.fit(module, fits.loader(), fits.loader())
        schedules.append(trainer.strategy.report()["schedule"])
    return schedules, record.losses


def differences(one, other):
    """Name what is not the same, to the bit."""
    found = [name for name in ("drawn", "losses", "batches", "kept") if one[name] != other[name]]
    states = one["state"], other["state"]
    return found + [n for n, t in states[0].items() if not torch.equal(t, states[1][n])]
