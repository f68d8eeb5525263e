"""Whole texts in rows of one shape: each once in an epoch, with positions and labels of its own."""

import random
import re
from itertools import chain
from math import nan

import pytest
import torch
from torch.utils.data import DataLoader
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from lightning_pipeoffload import PackedRows, PackedRowsSampler
from lightning_pipeoffload.processes import forget_replica, set_replica

LENGTHS = [random.Random(7).randint(1, 40) for _ in range(90)]


def texts_of(sampler):
    return [divide(batch) for batch in sampler]


def divide(batch):
    return batch.divide([*batch])


@pytest.fixture
def replica():
    yield set_replica
    forget_replica()


@pytest.mark.parametrize("cost", [None, "7b", lambda length: length**2])
@pytest.mark.parametrize(("num_rows", "num_replicas"), [(4, 1), (8, 2), (3, 3)])
def test_each_text_is_in_one_row_with_room(replica, num_rows, num_replicas, cost):
    sampler = PackedRowsSampler(LENGTHS, num_rows, 64, cost=cost)
    read = []
    for number in range(num_replicas):
        replica(number, num_replicas)
        batches = texts_of(sampler)
        assert len(batches) == len(sampler)
        assert all(len(rows) == num_rows for rows in batches)
        read += chain(*batches)
    assert sorted(chain(*read)) == [*range(len(LENGTHS))]
    assert max(sum(LENGTHS[text] for text in row) for row in read) <= 64
    least = -(-sum(LENGTHS) // (64 * num_rows * num_replicas))
    assert len(sampler) <= least + 1


def test_epochs_differ_in_order_and_not_in_number():
    sampler = PackedRowsSampler(LENGTHS, 4, 64, seed=3)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append(texts_of(sampler))
    first, second, again = epochs
    assert first == again
    assert first != second
    assert len(first) == len(second)
    assert texts_of(PackedRowsSampler(LENGTHS, 4, 64, shuffle=False)) == texts_of(
        PackedRowsSampler(LENGTHS, 4, 64, shuffle=False, seed=9)
    )


def test_rows_have_nearly_the_same_cost_with_heavy_ones_in_the_middle():
    for rows in texts_of(PackedRowsSampler(LENGTHS, 8, 96)):
        costs = [sum(LENGTHS[text] for text in row) for row in rows]
        assert max(costs) < 1.4 * min(costs)
        assert costs[:4] == sorted(costs[:4])
        assert costs[4:] == sorted(costs[4:], reverse=True)


def test_fewer_texts_than_rows_are_read_again():
    sampler = PackedRowsSampler([5, 6, 7, 8, 9], 4, 9)
    read = [*chain(*chain(*texts_of(sampler)))]
    assert len(sampler) == 2
    assert len(read) == 8
    assert {*read} == {*range(5)}


class Texts(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


ITEMS = [
    {"input_ids": [11, 12, 13, 14]},
    {"input_ids": torch.tensor([21, 22, 23]), "labels": [-100, -100, 23]},
    {"input_ids": [31, 32]},
]


def load(items=ITEMS, sampler=None, collate=None, **options):
    sampler = sampler or PackedRowsSampler([4, 3, 2], 2, 6, shuffle=False)
    collate = collate or PackedRows(2, 6)
    return next(
        iter(DataLoader(Texts(items), batch_sampler=sampler, collate_fn=collate, **options))
    )


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_texts_have_positions_and_labels_of_their_own(options):
    batch = load(**options)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 0, 0], [21, 22, 23, 31, 32, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 0]]
    assert batch["labels"].tolist() == [
        [-100, 12, 13, 14, -100, -100],
        [-100, -100, 23, -100, 32, -100],
    ]


def test_kernels_for_variable_lengths_get_where_texts_begin():
    batch = load(collate=PackedRows(2, 6, cu_seqlens=True), num_workers=1)
    assert batch["cu_seqlens"].tolist() == [[0, 4, 6, 6], [0, 3, 5, 6]]
    assert batch["cu_seqlens"].dtype == torch.int32
    for bounds, positions in zip(batch["cu_seqlens"], batch["position_ids"], strict=True):
        (expected, _), _ = prepare_fa_kwargs_from_position_ids(positions[None])
        assert bounds.unique().tolist() == expected.tolist()


def test_labels_may_be_those_of_the_next_token():
    batch = load(collate=PackedRows(2, 6, shifts_labels=True))
    assert batch["labels"].tolist() == [
        [12, 13, 14, -100, -100, -100],
        [-100, 23, -100, 32, -100, -100],
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PackedRowsSampler([3, 9], 2, 8),
            "text 1 has 9 tokens, and max_tokens=8 is the most of a row",
        ),
        (lambda: PackedRowsSampler([3, 0], 2, 8), "text 1 has 0 tokens"),
        (lambda: PackedRowsSampler([], 2, 8), "lengths is empty"),
        (lambda: PackedRowsSampler([3, [1, 2]], 2, 8), "lengths[1] is a list; lengths are numbers"),
        (lambda: PackedRowsSampler([3.5], 2, 8), "lengths[0] is a float"),
        (lambda: PackedRowsSampler([3], 2, 8, cost=lambda n: nan), "cost gives a text nan"),
        (lambda: PackedRowsSampler([3], 0, 8), "num_rows=0 must be a whole number, at least 1"),
        (lambda: PackedRowsSampler([3], 2, 8, cost="13b"), "cost='13b' must be one of"),
        (lambda: PackedRowsSampler([3], 2, 8, cost=lambda n: 0), "cost gives a text 0"),
        (lambda: PackedRows(2, 8.0), "max_tokens=8.0 must be a whole number"),
        (lambda: PackedRows(2, 8)([{"input_ids": [1]}]), "that no PackedRowsSampler has asked for"),
        (lambda: load(collate=PackedRows(3, 6)), "PackedRows(num_rows=3) got 2 rows"),
        (lambda: load(collate=PackedRows(2, 4)), "its row has room for 1 of max_tokens=4"),
        (lambda: load([[1, 2]] * 3), "and text 0 is a list"),
        (lambda: load([{"ids": [1]}] * 3), "and text 0 is a dict with ids"),
        (
            lambda: load([{"input_ids": [1, 2], "labels": [1]}] * 3),
            "text 0 has input_ids of shape [2] and labels of shape [1]",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
