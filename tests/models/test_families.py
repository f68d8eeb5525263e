"""Models as people bring them: a pipeline computes what the plain module computes.

Every family with a schedule of two stages on each of two ranks, and those whose values go beside
the blocks or back to earlier stages with one of four ranks too; evaluation with two ranks, for what
its schedule is makes no difference without a backward.
"""

from functools import cache

import pytest
import torch

from tests.support.comparison import evaluate, evaluate_plain, train, train_plain
from tests.support.families import FAMILIES, NEEDS_TORCHVISION
from tests.support.small_modules import assert_same


def _has_torchvision():
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # the latter where it was built for another torch
        return False
    return True


no_torchvision = pytest.mark.skipif(
    not _has_torchvision(), reason="no torchvision for this torch; tried on small ones of the kind"
)
EVALUATED = ["gpt2", "llama_cache", "mixtral", "t5", "bert", "vit", "dense_convolutions"]
OVER_FOUR_RANKS = ["gpt2", "llama_padding_mask", "t5", "scaled_gpt"]
# In the default run those over four ranks stand for themselves, and for these their neighbours.
SLOW = {
    *OVER_FOUR_RANKS,
    *("llama_cache", "llama_eager_attention", "llama_checkpointed_reentrant", "qwen2", "qwen3"),
    *("mixtral", "bart", "roberta", "vit", "windowed_transformer"),
}
NAMES = [
    pytest.param(
        name,
        marks=[no_torchvision] * (name in NEEDS_TORCHVISION) + [pytest.mark.slow] * (name in SLOW),
    )
    for name in FAMILIES
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
    [pytest.param(*name.values, 2, "zb_v", marks=name.marks) for name in NAMES]
    + [(name, 4, "zb_h1") for name in OVER_FOUR_RANKS],
)
def test_training_is_the_plain_modules(name, num_ranks, schedule):
    module, batch, plain = prepared(name)
    family = FAMILIES[name]
    _, found = train(module.train(), schedule, num_ranks, batch, **options(family))
    assert_same(found, plain, family.tolerance)


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_is_the_plain_modules(name):
    module, batch, _ = prepared(name)
    family = FAMILIES[name]
    expected = evaluate_plain(module, batch)
    found = evaluate(module, batch, **options(family))
    tolerance = {"rtol": family.tolerance, "atol": family.tolerance}
    torch.testing.assert_close(found, expected, **tolerance)
