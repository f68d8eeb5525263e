"""What a step keeps in a class or in a Python module, read by stages that have not written it."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.schedule import build
from tests.runtime.cut.test_step_refusals import HERE, Step, loss_of, through
from tests.runtime.users_code import other_counts
from tests.support.small_modules import linear_blocks, run_pipeline

READS = "# <- is read"
SEEN, LAST = 0, {"loss": 1.0}
LOSSES = []


class Settings:
    scale = 1.0


class Counting(Step):
    counter = 0
    losses = []

    def __init__(self, function, blocks=None):
        super().__init__(function, blocks)
        reset()
        self.double()


def reset():
    global SEEN
    SEEN, Counting.counter, other_counts.seen = 0, 0, 0
    LAST["loss"] = Settings.scale = 1.0
    for kept in (LOSSES, Counting.losses):
        kept.clear()


def by_type(m, x):
    x = m.embed(x) * (1 + type(m).counter)  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    type(m).counter += 1  # <- named in the message
    return loss


def by_class_name(m, x):
    x = m.embed(x) * (1 + Counting.counter)  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    Counting.counter += 1  # <- named in the message
    return loss


def by_instance(m, x):
    x = m.embed(x) * (1 + m.counter)  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    m.__class__.counter += 1  # <- named in the message
    return loss


def between_the_blocks(m, x):
    x = through(m.blocks[:3], m.embed(x) * (1 + Counting.counter))  # <- is read
    Counting.counter += 1  # <- named in the message
    return loss_of(m, m.blocks[3](x))


def by_list_of_the_class(m, x):
    x = m.embed(x) * (1 + len(Counting.losses))  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    Counting.losses.append(loss.detach())  # <- named in the message
    return loss


def by_global(m, x):
    global SEEN
    x = m.embed(x) * (1 + SEEN)  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    SEEN += 1  # <- named in the message
    return loss


def scaled(x):
    return x * (1 + SEEN)  # <- is read


def count():
    global SEEN
    SEEN += 1  # <- named in the message


def in_functions(m, x):
    loss = loss_of(m, through(m.blocks, scaled(m.embed(x))))
    count()
    return loss


def by_global_dict(m, x):
    x = m.embed(x) * LAST["loss"]  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    LAST["loss"] = LAST["loss"] / 2
    return loss


def by_global_list(m, x):
    x = m.embed(x) * (1 + len(LOSSES))  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    LOSSES.append(loss.detach())  # <- named in the message
    return loss


def by_class_of_no_module(m, x):
    x = m.embed(x) * Settings.scale  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    Settings.scale *= 0.9  # <- named in the message
    return loss


def by_another_module(m, x):
    x = m.embed(x) * (1 + other_counts.seen)  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    other_counts.seen += 1  # <- named in the message
    return loss


REFUSED = {
    by_type: "Counting.counter",
    by_class_name: "Counting.counter",
    by_instance: "Counting.counter",
    between_the_blocks: "Counting.counter",
    by_list_of_the_class: "Counting.losses",
    by_global: f"{__name__}.SEEN",
    in_functions: f"{__name__}.SEEN",
    by_global_dict: f"{__name__}.LAST",
    by_global_list: f"{__name__}.LOSSES",
    by_class_of_no_module: "Settings.scale",
    by_another_module: f"{other_counts.__name__}.seen",
}


@pytest.mark.parametrize(("step", "name"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_what_a_later_stage_has_written_cannot_be_read(step, name):
    module = Counting(step)
    with pytest.raises(ValueError, match="is written") as caught:
        run_pipeline(module, build("zb_h1", 2, 3), torch.randn(6, 4).double(), 2)
    message = str(caught.value)
    assert message.startswith(f"{name} is written")
    assert READS in message
    assert (HERE in message) == (step is not by_global_dict)
    assert (Counting.counter, SEEN, LAST["loss"], other_counts.seen) == (0, 0, 1.0, 0)
    assert Settings.scale == 1
    assert not LOSSES
    assert not Counting.losses


class Writer(nn.Linear):
    """A block that counts for those before it."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        global SEEN
        SEEN += 1  # <- named in the message
        return super().forward(x)


def reads_what_a_block_writes(m, x):
    return loss_of(m, through(m.blocks, m.embed(x) * (1 + SEEN)))  # <- is read


def test_what_a_block_has_written_cannot_be_read_by_other_stages():
    module = Counting(reads_what_a_block_writes, [Writer(), *linear_blocks(3)])
    with pytest.raises(ValueError, match=r"SEEN is written in blocks\.0 .*named.* # <- is read"):
        run_pipeline(module, build("1f1b", 2, 3), torch.randn(6, 4).double(), 2)


def sets_before(m, x):
    global SEEN
    SEEN = type(m).counter = 1
    loss = loss_of(m, through(m.blocks, m.embed(x) * SEEN * Counting.counter))
    SEEN = type(m).counter = 2
    return loss


def counts_behind(m, x):
    global SEEN
    loss = loss_of(m, through(m.blocks, m.embed(x)))
    SEEN += 1
    LOSSES.append(loss.detach())
    Counting.losses.append(loss.detach())
    return loss * SEEN


@pytest.mark.parametrize("step", [sets_before, counts_behind])
def test_what_every_reader_has_written_is_exact(step):
    module = Counting(step)
    x = torch.randn(6, 4).double()
    losses = [module.step(part).detach() for part in x.split(2)]
    reset()
    found = run_pipeline(module, build("zb_h1", 2, 3), x, 2)
    torch.testing.assert_close(found.losses, losses)


class Shared(nn.Module):
    factor = 1.0


class Scaling(nn.Linear):
    """The first of them says by how much."""

    def __init__(self, is_first, write, read):
        super().__init__(4, 4)
        self.shared = Shared()
        self.is_first, self.write, self.read = is_first, write, read

    def forward(self, x):
        if self.is_first:
            self.write(self.shared)
        return super().forward(x) * self.read(self.shared)


def write_attribute(shared):
    shared.factor = 2.0


def write_class(shared):
    type(shared).factor = 2.0


def write_global(shared):
    global SEEN
    SEEN = 2.0


def read_attribute(shared):
    return shared.factor


def read_class(shared):
    return Shared.factor


def read_global(shared):
    return SEEN


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (write_attribute, read_attribute),
        (write_class, read_class),
        (write_class, read_attribute),
        (write_global, read_global),
    ],
)
def test_a_number_that_a_block_writes_cannot_be_read_in_one_of_another_stage(write, read):
    blocks = [Scaling(not place, write, read) for place in range(4)]
    for block in blocks:
        block.shared = blocks[0].shared
    module = Counting(only_through, blocks)
    with pytest.raises(ValueError, match=r"is written in blocks\.0.*and read in blocks\.2"):
        run_pipeline(module, build("zb_h1", 2, 3), torch.randn(6, 4).double(), 2)


def only_through(m, x):
    return loss_of(m, through(m.blocks, m.embed(x)))
