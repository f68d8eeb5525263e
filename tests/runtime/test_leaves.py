"""Leaves of trees of all kinds, as torch's own pytree finds them."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_pipeoffload.runtime.leaves import leaves_of

Pair = namedtuple("Pair", ["left", "right"])
X, Y, Z = (torch.full((), float(i)) for i in range(3))
TREES = {
    "tensor": X,
    "none": None,
    "arguments": ((X, [Y, None]), {"z": Z, "flag": True}),
    "others": [Pair(X, (Y,)), OrderedDict(b=Z, a="text"), ()],
}


@pytest.mark.parametrize("name", TREES)
def test_leaves_are_those_of_torch_in_its_order(name):
    found, expected = list(leaves_of(TREES[name])), tree_leaves(TREES[name])
    assert list(map(id, found)) == list(map(id, expected))
