"""Modules draw other masks for shards on each tensor rank, and the same ones for what all have."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.tensor_parallel import ShardDraws


class Drops(nn.Module):
    """Draws for a shard itself, as an attention, around a module that does not."""

    def __init__(self):
        super().__init__()
        self.inner, self.of_shard = nn.Dropout(), nn.Dropout()

    def forward(self, x):
        first = nn.functional.dropout(x)
        inner = [self.inner(x) for _ in range(2)]
        return first, nn.functional.dropout(x), self.of_shard(x), *inner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.drops, self.after = nn.Dropout(), Drops(), nn.Dropout()

    def forward(self, x):
        return [*self.drops(x), self.before(x), self.after(x), torch.rand(32)]


def draw(tensor_rank, seed=1):
    net, draws = Net(), ShardDraws(tensor_rank)
    shards = {net.drops: True, net.drops.of_shard: True, net.after: True}
    draws.register_drawing_modules({**shards, net.drops.inner: False, net.before: False}, [], False)
    torch.manual_seed(seed)
    return net(torch.ones(32))


def test_masks_of_shards_differ_and_others_are_equal():
    first, second, again = draw(0), draw(1), draw(1)
    alike = [torch.equal(*masks) for masks in zip(first, second, strict=True)]
    assert alike == [False, False, False, True, True, True, False, True]
    assert all(torch.equal(*masks) for masks in zip(second, again, strict=True))
    masks = [tuple(mask.tolist()) for mask in [*first, *second]]
    assert len({*masks}) == len(first) + 4


def test_a_module_of_both_kinds_and_a_compiled_one_are_refused():
    draws, dropout = ShardDraws(0), nn.Dropout()
    draws.register_drawing_modules({dropout: True}, [], False)
    with pytest.raises(ValueError, match="Dropout draws .* in one step, and not in another"):
        draws.register_drawing_modules({dropout: False}, [], False)
    with pytest.raises(ValueError, match="Dropout draws .* not supported with compile"):
        ShardDraws(0).register_drawing_modules({dropout: True}, [], True)


def test_a_block_that_draws_itself_is_refused():
    net = Net()
    with pytest.raises(ValueError, match="Drops draws .* a block or has blocks in it; have it"):
        ShardDraws(0).register_drawing_modules({net.drops: True}, [net.drops], False)
