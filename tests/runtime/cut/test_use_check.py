"""What a step keeps for the next one: on every stage that reads it, or refused by name."""

import importlib

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build
from tests.runtime.cut.test_step_refusals import HERE
from tests.support.small_modules import (
    Step,
    assert_exact,
    assert_same,
    call_step,
    loss_of,
    run_pipeline,
    run_plain,
    through,
)

READS = "# <- is read"


def step_with(function, blocks=None, **attributes):
    module = Step(function, blocks)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module.double()


def curriculum(m, x):
    x = m.embed(x)
    if m.running_loss < 1:  # <- is read
        x = 2 * x
    loss = loss_of(m, through(m.blocks, x))
    m.running_loss = 0.9 * m.running_loss + 0.1 * loss.detach()  # <- named in the message
    return loss


def feeds_back(m, x):
    x = m.embed(x)
    if m.last is not None:
        x = x + m.last  # <- is read
    y = through(m.blocks, x)
    m.last = y.detach()  # <- named in the message
    return loss_of(m, y)


def collects(m, x):
    x = m.embed(x) * (1 + len(m.losses))  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    m.losses.append(loss.detach())
    return loss


def averages_in_place(m, x):
    x = m.embed(x) * m.average.clone()  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    m.average.add_(1)
    return loss


def between_the_blocks(m, x):
    x = m.embed(x) * m.count  # <- is read
    x = through(m.blocks[:3], x)
    m.count += 1  # <- named in the message
    return loss_of(m, m.blocks[3](x))


REFUSED = {
    curriculum: {"running_loss": torch.tensor(0.0)},
    feeds_back: {"last": None},
    collects: {"losses": []},
    averages_in_place: {"average": torch.ones(())},
    between_the_blocks: {"count": 0},
}


class Scaled(nn.Module):
    """A block that scales by an attribute and counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.scale * self.calls


def scales_blocks(m, x):
    loss = loss_of(m, through(m.blocks, m.embed(x)))
    for block in m.blocks:
        block.scale = block.scale / 2
    return loss


def refusal(module):
    with pytest.raises((ValueError, RuntimeError), match="writ(es|ten)") as caught:
        run_pipeline(module, build("zb_h1", 2, 3), torch.randn(6, 4).double(), 2)
    return str(caught.value)


@pytest.mark.parametrize(("step", "attributes"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_what_a_later_stage_has_written_cannot_be_read(step, attributes):
    message = refusal(step_with(step, **attributes))
    (name,) = attributes
    assert message.startswith(f"self.{name} is written")
    assert READS in message
    assert (HERE in message) == (step not in (collects, averages_in_place))


def test_a_block_cannot_read_what_the_last_stage_has_given_it():
    message = refusal(step_with(scales_blocks, [Scaled() for _ in range(4)]))
    assert message.startswith("self.blocks.0.scale is written behind the blocks")
    assert "which stage 0 does not run" in message


def keeps_in_validation(m, x):
    x = m.embed(x)
    if m.training:
        return loss_of(m, through(m.blocks, x * m.best))  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    m.best = loss.detach()  # <- named in the message
    return loss


@pytest.mark.parametrize("modes", [(False, True), (True, False, True)])
def test_a_step_of_another_kind_may_have_written_it(modes):
    module = step_with(keeps_in_validation, best=torch.ones(()))
    pipeline = InProcessPipeline(module, build("1f1b", 2, 2), call_step)
    x = torch.randn(4, 4).double()
    *first, last = modes
    for mode in first:
        run_in(pipeline, mode, x)
    with pytest.raises(RuntimeError, match=r"self\.best is written .* # <- named .* # <- is"):
        run_in(pipeline, last, x)


def run_in(pipeline, mode, x):
    for rank in pipeline.ranks:
        rank.module.train(mode)
    pipeline.run(x, 2)


def counts_before(m, x):
    m.count += 1
    return loss_of(m, through(m.blocks, m.embed(x) * m.count))


def sets_before(m, x):
    m.count = 1
    loss = loss_of(m, through(m.blocks, m.embed(x) * m.count))
    m.count = 2
    return loss


def counts_behind(m, x):
    loss = loss_of(m, through(m.blocks, m.embed(x)))
    m.count += 1
    return loss * m.count


def collects_on_the_way(m, x):
    for block in (m.embed, *m.blocks):
        x = block(x)
        m.seen.append(x.detach())
    return loss_of(m, x)


def clears_before(m, x):
    m.seen.clear()
    x = m.embed(x)
    for block in m.blocks:
        x = block(x)
        m.seen += [x]
    return loss_of(m, x) + sum(part.mean() for part in m.seen)


def only_blocks(m, x):
    return loss_of(m, through(m.blocks, m.embed(x)))


ALLOWED = [
    counts_before,
    sets_before,
    counts_behind,
    collects_on_the_way,
    clears_before,
    only_blocks,
]


@pytest.mark.parametrize("step", ALLOWED, ids=[f.__name__ for f in ALLOWED])
def test_what_every_reader_has_written_is_exact(step):
    module = step_with(step, [Scaled() for _ in range(4)], count=0, seen=[])
    assert_exact(module, torch.randn(6, 4).double())


@pytest.mark.parametrize("step", [curriculum, feeds_back, collects])
def test_one_stage_reads_what_it_likes(step):
    x = torch.randn(6, 4).double()
    module = step_with(step, **REFUSED[step])
    assert_same(run_pipeline(module, build("1f1b", 1, 3), x, 2), run_plain(module, x, 2))


class Shared:
    """An object that blocks have together, such as a configuration that they change."""

    def __init__(self):
        self.factor = 1.0
        self.calls = 0


class Together(nn.Module):
    """A block that does something with what all blocks share."""

    def __init__(self, shared, use):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shared, self.use = shared, use

    def forward(self, x):
        return self.use(self, self.linear(x))


def takes_over(block, x):
    x = x * block.shared.factor
    block.shared.factor = block.shared.factor + 0.5
    return x


def counts(block, x):
    block.shared.calls += 1
    return x * block.shared.calls


def sharing(use, step=only_blocks):
    shared = Shared()
    return step_with(step, [Together(shared, use) for _ in range(4)], shared=shared)


@pytest.mark.parametrize("use", [takes_over, counts])
def test_a_block_cannot_read_what_another_stages_block_has_left_in_an_object(use):
    assert refusal(sharing(use)).startswith("self.blocks.0.shared is written in blocks.")


def counts_in_an_object(m, x):
    m.shared.calls += 1
    return loss_of(m, through(m.blocks, m.embed(x) * m.shared.calls)) * m.shared.calls


def test_what_every_stage_counts_in_an_object_is_exact():
    module = sharing(lambda block, x: x, counts_in_an_object)
    assert_exact(module, torch.randn(6, 4).double())


KEEPS_A_COUNT = """
count = 0
def bump():
    global count
    count += 1
def scale():
    return 1.0 + count
"""
IMPORTS_BY_NAME = """
from keeps_a_count import bump, scale
from tests.support.small_modules import Step, loss_of, through
class Counts(Step):
    pass
def count_up(m, x):
    loss = loss_of(m, through(m.blocks, m.embed(x) * scale()))
    bump()
    return loss
"""


def test_a_python_module_is_watched_of_which_only_functions_are_imported(tmp_path, monkeypatch):
    (tmp_path / "keeps_a_count.py").write_text(KEEPS_A_COUNT)
    (tmp_path / "imports_by_name.py").write_text(IMPORTS_BY_NAME)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("imports_by_name")
    message = refusal(own.Counts(own.count_up).double())
    assert message.startswith("the step writes keeps_a_count.count")
