"""Models as people bring them: a pipeline computes what the plain module computes.

Each family runs with two stages on each of two ranks; those whose values go outside of the blocks,
or back to earlier stages, with one stage on each of four ranks too. Evaluation needs no more than
two ranks, since its schedule makes no difference without a backward.
"""

from functools import cache

import pytest
import torch

from tests.support.comparison import evaluate, evaluate_plain, train, train_plain
from tests.support.families import FAMILIES
from tests.support.pairs import first, slow
from tests.support.small_modules import assert_same

OVER_FOUR_RANKS = ["scaled_gpt", "t5", "llama_padding_mask", "gpt2"]
EVALUATED = ["llama_cache", "dense_convolutions", "gpt2", "mixtral", "t5", "bert", "vit"]
# The others differ from these, or from those over four ranks, in what no mechanism depends on.
BY_DEFAULT = {
    "llama_checkpointed",
    "mixtral_router_loss_with_mask",
    "deberta",
    "dense_convolutions",
}
OVER_TWO_RANKS = [
    (name, 2, "zb_v") if name in BY_DEFAULT else slow((name, 2, "zb_v")) for name in FAMILIES
]


@cache
def prepared(name):
    """Return a module, a batch, and what training it plainly gives."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    module, batch = family.task(), family.samples(8)
    return module, batch, train_plain(module, batch)


def options(family):
    return {"blocks": family.blocks} if family.blocks else {}


@pytest.mark.parametrize(
    ("name", "num_ranks", "schedule"),
    OVER_TWO_RANKS + first(3, [(name, 4, "zb_h1") for name in OVER_FOUR_RANKS]),
)
def test_training_is_the_plain_modules(name, num_ranks, schedule):
    module, batch, plain = prepared(name)
    family = FAMILIES[name]
    _, found = train(module.train(), schedule, num_ranks, batch, **options(family))
    assert_same(found, plain, family.tolerance)


@pytest.mark.parametrize("name", first(2, EVALUATED))
def test_evaluation_is_the_plain_modules(name):
    module, batch, _ = prepared(name)
    family = FAMILIES[name]
    expected = evaluate_plain(module, batch)
    found = evaluate(module, batch, **options(family))
    tolerance = {"rtol": family.tolerance, "atol": family.tolerance}
    torch.testing.assert_close(found, expected, **tolerance)
