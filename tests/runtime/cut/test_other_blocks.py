"""The blocks= that a refusal names train, copied from its message."""

import ast

import pytest
import torch
from torch import nn

from lightning_pipeoffload.schedule import build
from tests.support.small_modules import (
    assert_same,
    linear_blocks,
    loss_of,
    run_pipeline,
    run_plain,
    through,
)


class Parts(nn.Module):
    """A step over layers, or containers of layers, with these names, and a head."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)
        self.head = nn.Linear(4, 1)

    def step(self, x):
        return self.function(self, x)


def dict_backwards(m, x):
    return loss_of(m, through([m.layers["b"], m.layers["c"], m.layers["a"]], x))


def below_a_frozen_tower(m, x):
    with torch.no_grad():
        x = through(m.tower, x)
    return loss_of(m, through(m.trained, x))


def decoder_first(m, x):
    return loss_of(m, through([*m.decoder, *m.encoder], x))


def two_towers(m, x):
    return loss_of(m, through(m.encoder, x) * through(m.decoder, 2 * x))


def stages(m, x):
    for number in range(1, 4):
        x = getattr(m, f"layer{number}")(x)
    return loss_of(m, x)


def norms_between(m, x):
    for norm, layer in zip(m.norms, m.layers, strict=False):
        x = layer(norm(x))
    return loss_of(m, through(m.layers[:1], x))


def attributes(m, x):
    return loss_of(m, m.second(m.first(x).relu()))


def listed(count=3):
    return nn.ModuleList(linear_blocks(count))


def two_chains(step):
    return lambda: Parts(step, encoder=listed(), decoder=listed())


def of_a_dict():
    return Parts(dict_backwards, layers=nn.ModuleDict(zip("abc", linear_blocks(3), strict=True)))


def of_attributes():
    return Parts(attributes, first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def of_stages():
    layers = {f"layer{n}": nn.Sequential(*linear_blocks(2)) for n in range(1, 4)}
    return Parts(stages, **layers)


def of_a_tower():
    tower = listed(6).requires_grad_(False)
    return Parts(below_a_frozen_tower, tower=tower, trained=listed())


# What each message names, until what it names trains.
NAMED = [
    (of_a_dict, [["layers.*"], ["layers.b", "layers.c", "layers.a"]]),
    (of_a_tower, ["trained"]),
    (two_chains(decoder_first), [["encoder.*", "decoder.*"], ["decoder.*", "encoder.*"]]),
    (two_chains(two_towers), [["encoder.*", "decoder.*"]]),
    (of_stages, [["layer1.*", "layer2.*", "layer3.*"]]),
    (of_attributes, [["first", "second", "head"]]),
    (lambda: Parts(norms_between, norms=listed(), layers=listed(4)), ["norms"]),
]


@pytest.mark.parametrize(("make", "named"), NAMED)
def test_the_named_blocks_train(make, named):
    module, batch = make().double(), torch.randn(4, 4).double()
    schedule = build("1f1b", 3 if make is of_stages else 2, 4)
    blocks = None
    for following in named:
        with pytest.raises(ValueError, match="blocks=") as refused:
            run_pipeline(module, schedule, batch, 1, blocks=blocks)
        blocks = ast.literal_eval(str(refused.value).rpartition("blocks=")[2])
        assert blocks == following
    assert_same(
        run_pipeline(module, schedule, batch, 1, blocks=blocks), run_plain(module, batch, 1)
    )
