"""What differs between ranks is named on all of them before anything runs."""

import os

import pytest
import torch
from torch import nn

from lightning_pipeoffload.processes import describe_optimizers
from lightning_pipeoffload.schedule import build
from tests.support import fits
from tests.support.pairs import some


def on_global_rank_1():
    return os.environ["LOCAL_RANK"] == "1"


class Scaled(fits.Block):
    def __init__(self, dropout, scale, first_path, local_rank):
        super().__init__(dropout)
        self.scale = scale
        self.first_path = first_path
        self.local_rank = local_rank
        self.count = local_rank
        self.object = object()

    def extra_repr(self):
        return f"weight {float(self.linear.weight[0, 0])}, path {self.first_path}"


class Net(fits.Net):
    """Differs where it may; by what ``changed`` says too, on global rank 1."""

    def __init__(self, changed):
        super().__init__(depth=4)
        self.changed = changed if on_global_rank_1() else ""
        rank = int(on_global_rank_1())
        scale = 2.0 if self.changed == "scale" else 1.0
        self.blocks[2] = Scaled(0.1, scale, f"/tmp/{rank}", rank).double()
        self.note = f"rank {rank}"
        torch.nn.init.constant_(self.blocks[2].linear.weight, rank)
        self.register_buffer("seen", torch.full((2,), float(rank)), persistent=False)
        if self.changed == "dropout":
            self.blocks[1].dropout.p = 0.2
        if self.changed == "class":
            self.blocks[3].dropout = nn.AlphaDropout(0.1)
        if self.changed == "parameter":
            self.extra = nn.Parameter(torch.ones(3))
        if self.changed == "frozen":
            self.head.requires_grad_(False)

    def configure_optimizers(self):
        kind = torch.optim.Adam if self.changed == "optimizer" else torch.optim.AdamW
        lr = 2e-2 if self.changed == "rate" else 1e-2
        blocks, rest = [*self.blocks.parameters()], [*self.embed.parameters()]
        (rest if self.changed == "group" else blocks).extend(self.head.parameters())
        optimizer = kind([{"params": blocks}, {"params": rest, "weight_decay": 0.0}], lr=lr)
        frequency = 2 if self.changed == "scheduler" else 1
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        how = {"scheduler": scheduler, "interval": "step", "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": how}


CASES = {
    "dropout": "blocks.1.dropout of the module is Dropout(p=0.1, inplace=False)",
    "class": "blocks.3.dropout of the module is Dropout(p=0.1, inplace=False)",
    "scale": "scale of blocks.2 of the module is 1.0",
    "parameter": "extra of the module is missing on global rank 0 and (3,) torch.float32, trained",
    "frozen": "head.weight of the module is (32, 16) torch.float64, trained on global rank 0 and "
    "(32, 16) torch.float64, not trained on",
    "optimizer": "optimizer 0 is AdamW on global rank 0 and Adam on global rank 1",
    "rate": "lr in group 0 of optimizer 0 is 0.01 on global rank 0 and 0.02 on global rank 1",
    "group": "the group of head.weight is 0 of optimizer 0 on global rank 0 and 1 of optimizer 0",
    "scheduler": "scheduler 0 is StepLR per 1 steps on global rank 0 and StepLR per 2 steps on",
}
OPTIONS = {
    "num_microbatches": (4, 8, "the strategy's num_microbatches is 4 on global rank 0 and 8 on"),
    "schedule": ("1f1b", "gpipe", "the strategy's schedule is 1f1b of "),
    "split": ("even", "auto", "the strategy's split is even on global rank 0 and auto on"),
    "save_distributed_checkpoint": (
        False,
        True,
        "the strategy's save_distributed_checkpoint is False",
    ),
}
PLAN = {"schedule": (build("1f1b", 2, 4), build("zb_h1", 2, 4), "the strategy's schedule is 1f1b")}
TRAINER = {
    "accumulate_grad_batches": (1, 2, "the Trainer's accumulate_grad_batches is 1 on global rank"),
    "gradient_clip_val": (0.5, None, "the Trainer's gradient_clip_val is 0.5 on global rank 0"),
    "precision": ("32-true", "bf16-mixed", "the Trainer's precision is 32-true on global rank 0"),
}


@pytest.mark.parametrize("changed", some(CASES, 3))
def test_another_module_or_optimizer_is_named(ranks, changed):
    assert_named(ranks(2).run(_refusal, changed, {}, {}), CASES[changed])


@pytest.mark.parametrize(
    ("options", "trainer"),
    some(
        [*(({n: o}, {}) for n, o in OPTIONS.items()), *(({}, {n: o}) for n, o in TRAINER.items())]
        + [(PLAN, {})],
        4,
    ),
)
def test_another_argument_is_named(ranks, options, trainer):
    ((_, _, text),) = (options | trainer).values()
    assert_named(ranks(2).run(_refusal, "", options, trainer), text)


def assert_named(refusals, text):
    assert refusals[0] == refusals[1]
    assert refusals[0].startswith(f"the ranks of a pipeline have to run the same, but {text}")
    assert "make module, optimizers and arguments alike" in refusals[0]


def test_what_may_differ_does_and_an_evaluation_is_compared_too(ranks):
    assert ranks(2).run(_refusal, "", {}, {}) == [None, None]
    assert_named(ranks(2).run(_refusal, "dropout", {}, {}, "validate"), CASES["dropout"])


def _refusal(changed, options, trainer_options, run="fit"):
    rank = int(on_global_rank_1())
    chosen = {name: values[rank] for name, values in options.items()}
    trainer = fits.trainer(
        2, chosen, max_steps=2, **{name: values[rank] for name, values in trainer_options.items()}
    )
    fits.outlive_failures(trainer)
    try:
        getattr(trainer, run)(Net(changed), fits.loader())
    except ValueError as error:
        return str(error)
    return None


def test_no_address_is_compared():
    described, kept = [], []
    for _ in range(2):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1))
        optimizer.param_groups[0]["rule"] = object()
        kept.append(optimizer)  # else the second may have the first one's place
        described.append(describe_optimizers([optimizer], [[["weight"]]], []))
    assert described[0] == described[1]
