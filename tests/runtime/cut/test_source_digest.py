import random

import numpy as np
import pytest
import torch

from lightning_pipeoffload.runtime.cut.source_digest import SourceDigest
from lightning_pipeoffload.runtime.users_code.random_sources import find_sources
from lightning_pipeoffload.runtime.users_code.source_watch import Draw


class Drawing(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.ours = torch.Generator().manual_seed(seed)
        self.numpys = np.random.default_rng(seed)
        self.pythons = random.Random(seed)
        self.legacy = np.random.RandomState(seed)


class Probed:
    def __init__(self, module, *draws):
        self.draws = {source: set(draws) for source in find_sources(module)}


def digest(seed, *draws):
    found = SourceDigest()
    module = Drawing(seed)
    found.expect(Probed(module, *(draws or (Draw(0, False),))))
    return found, module


def test_equal_seeds_are_equal_and_others_are_not():
    assert digest(1)[0].now() == digest(1)[0].now() != digest(2)[0].now()


@pytest.mark.parametrize("draw", ["ours", "numpys", "pythons", "legacy"])
def test_every_generator_counts(draw):
    found, module = digest(1)
    before = found.now()
    uses = {
        "ours": lambda: torch.rand(1, generator=module.ours),
        "numpys": lambda: module.numpys.random(),
        "pythons": lambda: module.pythons.random(),
        "legacy": lambda: module.legacy.rand(),
    }
    uses[draw]()
    assert found.now() != before
    assert draw in found.names


def test_what_only_some_stages_draw_from_is_not_compared():
    assert digest(1, Draw(3, False))[0].now() == digest(1, Draw(0, True))[0].now() == 0
