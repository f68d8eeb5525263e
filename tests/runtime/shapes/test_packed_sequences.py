"""Packed sequences: their lengths are of the batch, and so are there on every stage."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.comparison import assert_trains_exactly, evaluate, evaluate_plain
from tests.support.pairs import slow


def recur(layer, x, lengths, total_length=None):
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=total_length)[0]


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 4, batch_first=True)

    def forward(self, x, lengths):
        return x + recur(self.layer, x, lengths, x.shape[1])


class Net(nn.Module):
    """Recurrent layers before the blocks, in them, between and after them."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.first = kind(4, 4, batch_first=True)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))
        self.last = kind(4, 1, batch_first=True)
        self.double()

    def training_step(self, batch, batch_idx):
        x, lengths = batch["x"], batch["lengths"]
        x = skip = recur(self.first, x, lengths)  # as long as the microbatch's longest
        for index, block in enumerate(self.blocks):
            x = block(x, lengths)
            if index == 1:
                x = skip + recur(self.first, x, lengths)
        return recur(self.last, x, lengths).square().mean()

    validation_step = training_step


class PassingPacked(Net):
    """Its blocks are layers that return packed sequences."""

    def training_step(self, batch, batch_idx):
        packed = pack_padded_sequence(batch["x"], batch["lengths"], True, enforce_sorted=False)
        for block in self.blocks:
            packed, _ = block(packed)
        return pad_packed_sequence(packed)[0].square().mean()


@pytest.fixture
def batch():
    lengths = torch.tensor([6, 1, 2, 3, 5, 5, 4, 6])
    return {"x": torch.randn(8, 6, 4).double(), "lengths": lengths}


@pytest.mark.parametrize(
    ("kind", "schedule", "options"),
    [
        (nn.LSTM, "zb_h1", {}),
        slow((nn.GRU, "interleaved_1f1b", {"recompute": "full"})),
        slow((nn.LSTM, "1f1b", {"recompute": "cheap"})),
    ],
)
def test_layers_run_on_packed_sequences(batch, kind, schedule, options):
    assert_trains_exactly(Net(kind), batch, schedule, num_ranks=2, **options)


@pytest.mark.slow
def test_evaluations_pack_sequences_too(batch):
    module = Net()
    with torch.inference_mode():
        found, expected = evaluate(module, batch), evaluate_plain(module, batch)
    torch.testing.assert_close(found, expected)


def test_a_block_that_returns_a_packed_sequence_is_refused(batch):
    module = PassingPacked()
    module.blocks = nn.ModuleList(nn.LSTM(4, 4).double() for _ in range(4))
    with pytest.raises(ValueError, match="blocks.0 returns a PackedSequence.*: let the block take"):
        assert_trains_exactly(module, batch, num_ranks=2)
