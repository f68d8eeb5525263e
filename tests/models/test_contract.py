"""Steps that do more than compute a loss: each trains as one device, or is refused by name.

The table of docs/contract.md says the same in the user's words; a test compares its answers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build
from tests.support.pairs import slow
from tests.support.small_modules import Regression, call_step, descend

V = ("zb_v", 2)
OTHERS = [("gpipe", 1), ("zb_h1", 2), ("zb_v", 1)]
LOSSES, CACHE = [], {}


class Step(Regression):
    """Four blocks, with a hook of the row before them and one behind."""

    def __init__(self):
        super().__init__([nn.Linear(4, 4) for _ in range(4)])
        self.prepare()
        self.double()

    def prepare(self):
        pass

    def start(self):
        """Do what a copy of the module would lack."""

    def before(self, x):
        return x

    def call(self, block, x):
        return torch.tanh(block(x))

    def behind(self, loss):
        return loss

    def step(self, x):
        x = self.embed(self.before(x))
        for block in self.blocks:
            x = self.call(block, x)
        return self.behind(self.head(x).pow(2).mean())


# 1. A counter


class CountsBefore(Step):
    def prepare(self):
        self.count = 0

    def before(self, x):
        self.count += 1
        return x * self.count


class CountsBehind(CountsBefore):
    def before(self, x):
        return x

    def behind(self, loss):
        self.count += 1
        return loss * self.count


class CountsBehindAndReadsBefore(CountsBehind):
    def before(self, x):
        return x * (1 + self.count)


class CountsOnItsBlocks(Step):
    """An attribute and a buffer of each block, which the step writes before it calls the block."""

    def prepare(self):
        for block in self.blocks:
            block.count = 0
            block.register_buffer("scale", torch.ones(()))

    def call(self, block, x):
        block.count += 1
        block.scale = block.scale * 0.9
        return super().call(block, x * block.count * block.scale)


class CountsInAnArray(Step):
    def prepare(self):
        self.counts = np.zeros(2)

    def before(self, x):
        self.counts[0] += 1
        return x * self.counts[0]


class CountsInAnArrayBehind(CountsInAnArray):
    def before(self, x):
        return x * (1 + self.counts[0])

    def behind(self, loss):
        self.counts[0] += 1
        return loss


@dataclass
class Counts:
    """As torch's own, no key of a dict."""

    number: int = 0
    sizes: list = field(default_factory=list)


class CountsInADataclass(CountsBehind):
    def prepare(self):
        self.counts, self.count = Counts(), 1

    def behind(self, loss):
        self.counts = Counts(self.counts.number + 1, [*self.counts.sizes, loss.detach()])
        return loss * self.counts.number


class ReplacesAModelsOutput(Step):
    def behind(self, loss):
        self.output = BaseModelOutput(loss)
        return loss


class CountsInsideOfATuple(Step):
    def prepare(self):
        self.counts = [torch.zeros(())], {}

    def behind(self, loss):
        self.counts[0][0].add_(1)
        self.counts[1]["steps"] = self.counts[1].get("steps", 0) + 1
        return loss * self.counts[0][0] * self.counts[1]["steps"]


class CountsInsideOfATupleBefore(CountsInsideOfATuple):
    def before(self, x):
        return super().behind(x)

    def behind(self, loss):
        return loss


# 2. A moving average of the loss


class Averages(Step):
    def prepare(self):
        self.average = 1.0

    def behind(self, loss):
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / self.average


class AveragesInABuffer(Step):
    def prepare(self):
        self.register_buffer("average", torch.ones(()))

    def behind(self, loss):
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / self.average


# 3. A queue


class QueuesBehind(Step):
    def prepare(self):
        self.queue = []

    def behind(self, loss):
        self.queue.append(loss.detach())
        return loss / torch.stack(self.queue[-3:]).sum()


class QueuesBefore(Step):
    def prepare(self):
        self.queue = [1.0, 2.0]

    def before(self, x):
        self.queue.append(float(x[0, 0]))
        return x * self.queue.pop(0)


class FillsBehindAndConsumesBefore(QueuesBefore):
    def before(self, x):
        return x * self.queue.pop(0)

    def behind(self, loss):
        self.queue.append(loss.detach())
        return loss


class MakesInTheFirstStep(Step):
    def before(self, x):
        if not hasattr(self, "queue"):
            self.queue = [float(n) for n in range(1, 30)]
        return x * self.queue.pop(0)


# 4. A generator


class Draws(Step):
    def prepare(self):
        self.noise = torch.Generator().manual_seed(3)
        self.sources = {"numpy": [np.random.default_rng(3)]}

    def before(self, x):
        return x + torch.randn(x.shape, generator=self.noise, dtype=x.dtype)

    def behind(self, loss):
        return loss * self.sources["numpy"][0].random()


# 5. A checkpointed block that reads an attribute


class Masked(nn.Linear):
    mask = None

    def forward(self, x):
        return super().forward(x) * self.mask


class Checkpointed(Step):
    def prepare(self):
        self.blocks = nn.ModuleList(Masked(4, 4) for _ in range(4))

    def before(self, x):
        for block in self.blocks:
            block.mask = x.abs().mean()
        return x

    def call(self, block, x):
        return torch.tanh(checkpoint(block, x, use_reentrant=False))


class TakesAMask(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask


class CheckpointedWithAnArgument(Step):
    def prepare(self):
        self.blocks = nn.ModuleList(TakesAMask(4, 4) for _ in range(4))

    def before(self, x):
        self.mask = x.abs().mean()
        return x

    def call(self, block, x):
        return torch.tanh(checkpoint(block, x, self.mask, use_reentrant=False))


# 6. A step that writes into its batch


class WritesItsBatch(Step):
    def before(self, x):
        return x.mul_(2).sub_(x.mean())


# 7. A weight that is written where it is used, and spectral norm


class ScalesItsWeights(Step):
    def call(self, block, x):
        block.weight.data.mul_(0.9)
        return super().call(block, x)


class Spectral(Step):
    def prepare(self):
        for layer in (self.embed, self.blocks[1], self.head):
            nn.utils.parametrizations.spectral_norm(layer)


# 8. An open file, and an iterator


class Reads(Step):
    def before(self, x):
        return x * float(self.file.readline())


class WritesALog(Step):
    def behind(self, loss):
        self.file.write(f"{float(loss)}\n")
        return loss


class TellsTheTime(Step):
    def before(self, x):
        return x * perf_counter()


class DrawsFromAnObject(Step):
    def prepare(self):
        self.helper = SimpleNamespace(draw=np.random.default_rng(3).random)

    def before(self, x):
        return x * self.helper.draw()


class Iterates(Step):
    def before(self, x):
        return x * next(self.scales)


# 9. A list in a Python module


class FillsAGlobal(Step):
    def behind(self, loss):
        LOSSES.append(loss.detach())
        return loss


class CountsWithAGlobal(Step):
    def before(self, x):
        LOSSES.append(1.0)
        return x * len(LOSSES)


class CachesInAGlobal(Step):
    def before(self, x):
        return x * CACHE.setdefault("scale", 2.0)


class FillsItsClass(Step):
    seen = []

    def behind(self, loss):
        self.seen.append(float(loss))
        return loss


# 10. A hook that reads .grad


class ReadsGradients(Step):
    def start(self):
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter):
        parameter.grad.mul_(0.5)


class ScalesByAnAttribute(Step):
    def before(self, x):
        self.scale = x.abs().mean()
        return x

    def call(self, block, x):
        x = super().call(block, x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.scale)
        return x


class BindsAtOnce(ScalesByAnAttribute):
    def call(self, block, x):
        x = Step.call(self, block, x)
        if x.requires_grad:
            x.register_hook(lambda gradient, scale=self.scale: gradient * scale)
        return x


TRAINS = [
    CountsInADataclass,
    ReplacesAModelsOutput,
    CountsInsideOfATuple,
    CountsInsideOfATupleBefore,
    CountsBefore,
    CountsBehind,
    CountsOnItsBlocks,
    CountsInAnArray,
    Averages,
    AveragesInABuffer,
    QueuesBehind,
    QueuesBefore,
    CheckpointedWithAnArgument,
    WritesItsBatch,
    ScalesItsWeights,
    Spectral,
    CachesInAGlobal,
    ReadsGradients,
    BindsAtOnce,
]

REFUSED = {
    CountsBehindAndReadsBefore: r"self\.count",
    CountsInAnArrayBehind: r"self\.counts",
    FillsBehindAndConsumesBefore: r"self\.queue",
    MakesInTheFirstStep: r"self\.queue",
    Checkpointed: r"blocks\.3|mask",
    Reads: r"self\.file",
    WritesALog: r"self\.file",
    TellsTheTime: r"gives another value each time",
    DrawsFromAnObject: r"gives another value each time",
    Iterates: r"self\.scales",
    FillsAGlobal: r"LOSSES",
    CountsWithAGlobal: r"LOSSES",
    FillsItsClass: r"FillsItsClass\.seen",
    ScalesByAnAttribute: r"scale",
}

DOCUMENTED = {
    "counts: ": [CountsBefore, CountsBehind],
    "counts behind the blocks, and reads": [CountsBehindAndReadsBefore],
    "averages the loss": [Averages, AveragesInABuffer],
    "fills a queue behind the blocks and reads it there": [QueuesBehind],
    "fills a queue behind the blocks and reads it before": [FillsBehindAndConsumesBefore],
    "draws from a generator": [Draws],
    "checkpoints a block that reads": [Checkpointed],
    "writes its batch": [WritesItsBatch],
    "writes a weight or a buffer": [ScalesItsWeights],
    "has layers with `spectral_norm`": [Spectral],
    "reads or writes an open file": [Reads, WritesALog],
    "appends to a list of a Python module": [FillsAGlobal, FillsItsClass],
    "registers a hook on a parameter": [ReadsGradients],
    "has a Lightning hook": [],  # tests/loop/hooks/test_gradient_hooks.py
}


def test_the_documented_answers_are_those_of_the_tests():
    page = (Path(__file__).parents[2] / "docs/contract.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(DOCUMENTED)
    for (text, answer, _), (start, kinds) in zip(rows, DOCUMENTED.items(), strict=True):
        assert text.startswith(f"| {start}")
        for kind in kinds:
            trains = kind is Draws or kind in TRAINS
            assert (answer == "trains", answer == "refused") == (trains, kind in REFUSED)


def train(kind, schedule="", num_ranks=1, **attributes):
    """Train three batches of four microbatches; return the weights.

    Args:
        kind: The module's class.
        schedule: The schedule; "": one device trains, without a pipeline.
        num_ranks: The ranks of the pipeline.
        attributes: Makes what cannot be copied, for each rank.
    """
    torch.manual_seed(1)
    LOSSES.clear()
    CACHE.clear()
    module = kind()
    pipeline = None
    if schedule:
        pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step)
    ranks = pipeline.ranks if pipeline else []
    for owner in [rank.module for rank in ranks] or [module]:
        for name, make in attributes.items():
            setattr(owner, name, make())
        owner.start()
    for seed, batch in enumerate(torch.randn(3, 8, 4, dtype=torch.float64)):
        if pipeline:
            pipeline.run(batch, 2, seed)
        else:
            for part in batch.split(2):
                (call_step(module, part) / 4).backward()
            descend(module.state_dict(keep_vars=True).values())
        for rank in ranks:
            descend(rank.ownership.local_tensors().values())
    if pipeline is None:
        return module.state_dict()
    return {n: t for rank in ranks for n, t in rank.ownership.local_tensors().items()}


def assert_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "schedule", "num_ranks"),
    [(kind, *V) for kind in TRAINS] + [slow((kind, *other)) for kind in TRAINS for other in OTHERS],
)
def test_trains_as_one_device(kind, schedule, num_ranks):
    assert_equal(train(kind, schedule, num_ranks), train(kind))


@pytest.mark.parametrize(("schedule", "num_ranks"), [V, *map(slow, OTHERS[1:])])
def test_draws_the_same_for_every_number_of_ranks(schedule, num_ranks):
    assert_equal(train(Draws, schedule, num_ranks), train(Draws, "gpipe", 1))


def open_file():
    return open(__file__)


def test_a_file_and_an_iterator_that_no_step_touches_are_left_alone():
    held = {"file": open_file, "scales": lambda: iter([1.0])}
    assert_equal(train(Step, "zb_v", 2, **held), train(Step))


@pytest.mark.parametrize("kind", REFUSED)
def test_is_refused_by_name(kind):
    held = {"file": open_file, "scales": lambda: iter([1.0] * 99)}
    with pytest.raises((ValueError, RuntimeError), match=REFUSED[kind]):
        train(kind, "zb_v", 2, **held)
