"""Steps that do more than compute a loss: each trains as one device, or is refused by name.

The table of docs/contract.md says the same in the user's words; a test compares its answers.
"""

from collections import ChainMap
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers.modeling_outputs import BaseModelOutput

from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.schedule import build
from tests.support import fits
from tests.support.pairs import slow
from tests.support.small_modules import (
    Regression,
    assert_same,
    compare_with_plain,
    linear_blocks,
    run_pipeline,
)

V = ("zb_v", 2)
OTHERS = [("gpipe", 1), ("zb_h1", 2), ("zb_v", 1)]
LOSSES, CACHE = [], {}


class Step(Regression, L.LightningModule):
    """Four blocks; functions of the module stand before, around and after them."""

    seen = []
    kept = ()

    def __init__(self, before=None, call=None, after=None, prepare=None, **attributes):
        super().__init__(linear_blocks(4))
        self.functions = before, call, after
        for name, value in attributes.items():
            setattr(self, name, value)
        if prepare:
            prepare(self)
        self.double()

    def step(self, x):
        before, call, after = self.functions
        x = self.embed(before(self, x) if before else x)
        for block in self.blocks:
            x = torch.tanh(call(self, block, x) if call else block(x))
        loss = self.head(x).pow(2).mean()
        return after(self, loss) if after else loss

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_end(self):  # where all ranks have what the steps have written
        names = {"count", "average", "queue", "norm"} & vars(self).keys()
        self.kept = {name: getattr(self, name) for name in names}


# Counters


def counts(m, value):
    m.count += 1
    return value * m.count


def reads_the_count(m, x):
    return x * (1 + m.count)


def has_counters(m):
    for block in m.blocks:
        block.count = 0
        block.register_buffer("scale", torch.ones(()))


def counts_on_its_block(m, block, x):
    block.count += 1
    block.scale = block.scale * 0.9
    return block(x * block.count * block.scale)


def counts_in_an_array(m, value):
    m.counts[0] += 1
    return value * m.counts[0]


def reads_the_array(m, x):
    return x * (1 + m.counts[0])


@dataclass
class Counts:
    """As torch's own, no key of a dict."""

    number: int = 1
    sizes: list = field(default_factory=list)


def counts_in_a_dataclass(m, loss):
    m.counts = Counts(m.counts.number + 1, [*m.counts.sizes, loss.detach()])
    return loss * m.counts.number


def counts_in_a_tuple(m, value):
    m.counts[0][0].add_(1)
    m.counts[1]["steps"] = m.counts[1].get("steps", 0) + 1
    return value * m.counts[0][0] * m.counts[1]["steps"]


def keeps_a_models_output(m, loss):
    m.output = BaseModelOutput(loss)
    return loss


# Averages and queues


def averages(m, loss):
    m.average = 0.9 * m.average + 0.1 * loss.detach()
    return loss / m.average


def has_an_average(m):
    m.register_buffer("average", torch.ones(()))


def queues_after(m, loss):
    m.queue.append(loss.detach())
    return loss / torch.stack(m.queue[-3:]).sum()


def queues_before(m, x):
    m.queue.append(float(x[0, 0]))
    return x * m.queue.pop(0)


def fills(m, loss):
    m.queue.append(loss.detach())
    return loss


def consumes(m, x):
    return x * m.queue.pop(0)


def makes_in_the_first_step(m, x):
    if not hasattr(m, "queue"):
        m.queue = [float(n) for n in range(1, 30)]
    return consumes(m, x)


# Random numbers, checkpoints, writes


def has_generators(m):
    m.noise = torch.Generator().manual_seed(3)
    m.sources = {"numpy": [np.random.default_rng(3)]}


def draws_before(m, x):
    return x + torch.randn(x.shape, generator=m.noise, dtype=x.dtype)


def draws_after(m, loss):
    return loss * m.sources["numpy"][0].random()


class Masked(nn.Linear):
    mask = None

    def forward(self, x, mask=None):
        return super().forward(x) * (self.mask if mask is None else mask)


def has_masked_blocks(m):
    m.blocks = nn.ModuleList(Masked(4, 4) for _ in range(4))


def sets_masks(m, x):
    for block in (m, *m.blocks):
        block.mask = x.abs().mean()
    return x


def checkpoints(m, block, x):
    return checkpoint(block, x, use_reentrant=False)


def checkpoints_with_an_argument(m, block, x):
    return checkpoint(block, x, m.mask, use_reentrant=False)


def writes_its_batch(m, x):
    return x.mul_(2).sub_(x.mean())


def scales_its_weights(m, block, x):
    block.weight.data.mul_(0.9)
    return block(x)


def is_normed(m, norm):
    for layer in (m.embed, m.blocks[1], m.head):
        norm(layer)


# Files, clocks, iterators, globals


def reads(m, x):
    return x * float(m.file.readline())


def writes_a_log(m, loss):
    m.file.write(f"{float(loss)}\n")
    return loss


def tells_the_time(m, x):
    return x * perf_counter()


def draws_from_an_object(m, x):
    return x * m.helper.draw()


def iterates(m, x):
    return x * next(m.scales)


def fills_a_global(m, loss):
    LOSSES.append(loss.detach())
    return loss


def counts_with_a_global(m, x):
    LOSSES.append(1.0)
    return x * len(LOSSES)


def caches_in_a_global(m, x):
    return x * CACHE.setdefault("scale", 2.0)


def fills_its_class(m, loss):
    m.seen.append(float(loss))
    return loss


# Hooks


def halve(parameter):
    parameter.grad.mul_(0.5)


def halves_gradients(m):
    for parameter in m.parameters():
        parameter.register_post_accumulate_grad_hook(halve)


def sets_a_scale(m, x):
    m.scale = x.abs().mean()
    return x


def scales_gradients(m, block, x):
    x = block(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * m.scale)
    return x


def binds_the_scale(m, block, x):
    x = block(x)
    if x.requires_grad:
        x.register_hook(lambda gradient, scale=m.scale: gradient * scale)
    return x


def of(**how):
    return partial(Step, **how)


TRAINS = {
    "counts before": of(count=0, before=counts),
    "counts after": of(count=0, after=counts),
    "counts on its blocks": of(prepare=has_counters, call=counts_on_its_block),
    "counts in an array": lambda: Step(counts=np.zeros(2), before=counts_in_an_array),
    "counts in a dataclass": of(counts=Counts(), after=counts_in_a_dataclass),
    "counts in a tuple": lambda: Step(counts=([torch.zeros(())], {}), after=counts_in_a_tuple),
    "counts in a tuple before": lambda: Step(
        counts=([torch.zeros(())], {}), before=counts_in_a_tuple
    ),
    "replaces a model's output": of(after=keeps_a_models_output),
    "averages": of(average=1.0, after=averages),
    "averages in a buffer": of(prepare=has_an_average, after=averages),
    "queues after": lambda: Step(queue=[], after=queues_after),
    "queues before": lambda: Step(queue=[1.0, 2.0], before=queues_before),
    "checkpoints with an argument": of(
        prepare=has_masked_blocks, before=sets_masks, call=checkpoints_with_an_argument
    ),
    "writes its batch": of(before=writes_its_batch),
    "scales its weights": of(call=scales_its_weights),
    "spectral norm": of(prepare=partial(is_normed, norm=nn.utils.parametrizations.spectral_norm)),
    "spectral norm of old": of(prepare=partial(is_normed, norm=nn.utils.spectral_norm)),
    "caches in a global": of(before=caches_in_a_global),
    "hooks on parameters": Step,
    "binds at once": of(before=sets_a_scale, call=binds_the_scale),
}
START = {"hooks on parameters": halves_gradients}  # which a copy of the module would lack

GIVES = r"returns another value each time"
REFUSED = {
    "counts after and reads before": (
        of(count=0, before=reads_the_count, after=counts),
        r"self\.count",
    ),
    "counts in an array after": (
        lambda: Step(counts=np.zeros(2), before=reads_the_array, after=counts_in_an_array),
        r"self\.counts",
    ),
    "fills after and consumes before": (
        lambda: Step(queue=[1.0, 2.0], before=consumes, after=fills),
        r"self\.queue",
    ),
    "makes in the first step": (of(before=makes_in_the_first_step), r"self\.queue"),
    "checkpoints": (
        of(prepare=has_masked_blocks, before=sets_masks, call=checkpoints),
        r"blocks\.3|mask",
    ),
    "reads": (of(before=reads), r"self\.file"),
    "writes a log": (of(after=writes_a_log), r"self\.file"),
    "tells the time": (of(before=tells_the_time), GIVES),
    "draws from an object": (
        lambda: Step(
            helper=SimpleNamespace(draw=np.random.default_rng(3).random),
            before=draws_from_an_object,
        ),
        GIVES,
    ),
    "iterates": (of(before=iterates), r"self\.scales"),
    "fills a global": (of(after=fills_a_global), "LOSSES"),
    "counts with a global": (of(before=counts_with_a_global), "LOSSES"),
    "fills its class": (of(after=fills_its_class), r"Step\.seen"),
    "scales gradients by an attribute": (of(before=sets_a_scale, call=scales_gradients), "scale"),
}

DOCUMENTED = {
    "counts: ": ["counts before", "counts after"],
    "counts after the blocks, and reads": ["counts after and reads before"],
    "averages the loss": ["averages", "averages in a buffer"],
    "fills a queue after the blocks and reads it there": ["queues after"],
    "fills a queue after the blocks and reads it before": ["fills after and consumes before"],
    "draws from a generator": [],  # test_draws_the_same_for_every_number_of_ranks, and the fits
    "checkpoints a block that reads": ["checkpoints"],
    "writes its batch": ["writes its batch"],
    "writes a weight or a buffer": ["scales its weights"],
    "has layers with `spectral_norm`": ["spectral norm"],
    "reads or writes an open file": ["reads", "writes a log"],
    "appends to a list of a Python module": ["fills a global", "fills its class"],
    "registers a hook on a parameter": ["hooks on parameters"],
    "has a Lightning hook": [],  # Watching, and tests/loop/hooks/test_gradient_hooks.py
}


def test_the_documented_answers_are_those_of_the_tests():
    page = (Path(__file__).parents[2] / "docs/contract.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(DOCUMENTED)
    for (text, answer, _), (start, names) in zip(rows, DOCUMENTED.items(), strict=True):
        assert text.startswith(f"| {start}")
        for name in names:
            assert (answer == "trains", answer == "refused") == (name in TRAINS, name in REFUSED)


def train(make, schedule, num_ranks, start=None):
    LOSSES.clear()
    CACHE.clear()
    torch.manual_seed(1)
    batches = torch.randn(3, 8, 4, dtype=torch.float64)
    compare_with_plain(make(), schedule, num_ranks, list(batches), start=start)


def open_file():
    return open(__file__)


def holds_a_file_and_an_iterator(module):
    module.file, module.scales = open_file(), iter([1.0] * 99)


@pytest.mark.parametrize(
    ("name", "schedule", "num_ranks"),
    [(name, *V) for name in TRAINS] + [slow((name, *other)) for name in TRAINS for other in OTHERS],
)
def test_trains_as_one_device(name, schedule, num_ranks):
    train(TRAINS[name], schedule, num_ranks, START.get(name))


@pytest.mark.parametrize(("schedule", "num_ranks"), [V, *map(slow, OTHERS[1:])])
def test_draws_the_same_for_every_number_of_ranks(schedule, num_ranks):
    module = Step(draws_before, after=draws_after, prepare=has_generators)
    batch = torch.randn(8, 4).double()
    found, one = (
        run_pipeline(module, build(*way, 4), batch, 2) for way in [(schedule, num_ranks), OTHERS[0]]
    )
    assert_same(found, one)
    assert len({*map(float, one.losses)}) == 4


def test_a_file_and_an_iterator_that_no_step_touches_are_left_alone():
    train(Step, *V, holds_a_file_and_an_iterator)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=message):
        train(make, *V, holds_a_file_and_an_iterator)


class Watching(Step):
    """Keeps what a hook of Lightning's reads of all gradients."""

    def on_before_optimizer_step(self, optimizer):
        gradients = [p.grad for p in self.parameters()]
        assert all(g.isfinite().all() for g in gradients)
        self.norm = torch.stack([g.norm(2) for g in gradients]).norm()


def fit(name, size, schedule):
    """Fit for three batches of four microbatches; return this rank's tensors, and what it counted.

    On one device each microbatch is a batch, and four are accumulated.
    """
    LOSSES.clear()
    torch.manual_seed(1)
    batches = torch.randn(24, 4, dtype=torch.float64)
    module = MADE[name]()
    START.get(name, bool)(module)
    accumulated = {} if size else {"accumulate_grad_batches": 4}
    trainer = fits.trainer(size, {"schedule": schedule}, max_epochs=1, **accumulated)
    if size:
        fits.outlive_failures(trainer)
    trainer.fit(module, DataLoader(batches, 8 if size else 2))
    tensors = module.state_dict().items()
    return {n: t for n, t in tensors if not isinstance(t, ShapeOnly)}, dict(module.kept)


DOCUMENTED_NAMES = [name for names in DOCUMENTED.values() for name in names]
MADE = {name: TRAINS[name] for name in DOCUMENTED_NAMES if name in TRAINS}
MADE |= {
    "draws": lambda: Step(draws_before, after=draws_after, prepare=has_generators),
    "watches gradients": Watching,
}


def fit_each(size, schedule):
    """Fit with every step that trains."""
    return {name: fit(name, size, schedule) for name in MADE}


def test_fits_over_two_processes_are_those_of_one_device_with_the_same_bits_by_each_schedule(ranks):
    (plain,) = ranks(1).run(fit_each, 0, "")
    one, two = (joined(ranks(2).run(fit_each, 2, schedule)) for schedule in ("zb_h1", "zb_v"))
    for name, (tensors, kept) in plain.items():
        assert_same_bits(one[name], two[name], name)  # of one stage on each rank, and of two
        if name != "draws":
            torch.testing.assert_close(one[name], ({**tensors}, kept), rtol=1e-12, atol=1e-12)


def joined(of_ranks):
    """Join the ranks' tensors of each fit; all ranks have counted the same."""
    found = {}
    for name in MADE:
        tensors, kept = zip(*(of_rank[name] for of_rank in of_ranks), strict=True)
        assert_same_bits(*kept, name)
        found[name] = dict(ChainMap(*tensors)), kept[0]
    return found


def assert_same_bits(one, two, name):
    torch.testing.assert_close(one, two, rtol=0, atol=0, msg=name)
