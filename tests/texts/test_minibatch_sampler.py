"""A sampler of minibatches reads each text once, on one rank, with its weight."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_pipeoffload import MinibatchSampler
from lightning_pipeoffload.processes import forget_replica, set_replica
from lightning_pipeoffload.texts.minibatch import Minibatch, MinibatchCollate

LENGTHS = [7, 3, 9, 1, 4, 8, 2, 6, 5, 10, 3]


class Texts(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.full((LENGTHS[index],), index)


def read(rank, num_ranks=2, epoch=0, workers=0, dataset=None, **options):
    sampler = MinibatchSampler(LENGTHS, 12, rank=rank, num_ranks=num_ranks, **options)
    sampler.set_epoch(epoch)
    collate = MinibatchCollate(torch.cat)
    data = Texts() if dataset is None else dataset
    return list(DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=workers))


@pytest.mark.parametrize("mode", ["lb_mini", "lb_micro", "local_sort"])
def test_every_text_is_read_once_by_one_rank(mode):
    ranks = [read(rank, mode=mode) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 2
    tokens = torch.cat(list(chain(*chain(*ranks))))
    assert torch.bincount(tokens).tolist() == LENGTHS


@pytest.mark.parametrize("weight", ["samples", "tokens", list(range(1, 12))])
def test_weights_are_the_microbatch_s_share_of_the_minibatch(weight):
    numbers = {"samples": [1] * 11, "tokens": LENGTHS}.get(str(weight), weight)
    for minibatch in zip(*(read(rank, weight=weight) for rank in range(2)), strict=True):
        texts = [[t.unique().tolist() for t in part] for part in minibatch]
        total = sum(numbers[i] for i in chain(*chain(*texts)))
        for part, of_part in zip(minibatch, texts, strict=True):
            assert part.weights == pytest.approx(
                [sum(numbers[i] for i in t) / total for t in of_part]
            )


def test_a_rank_may_have_no_microbatch():
    (minibatch,) = read(3, num_ranks=12, samples_per_rank=1)
    assert isinstance(minibatch, Minibatch)
    counts = [len(read(rank, num_ranks=12, samples_per_rank=1)[0]) for rank in range(12)]
    assert sorted(counts) == [0] + [1] * 11


@pytest.mark.parametrize("options", [{"workers": 1}, {"dataset": Subset(Texts(), range(11))}])
def test_workers_and_datasets_that_read_many_at_once_give_the_same(options):
    plain, found = read(0), read(0, **options)
    assert [part.weights for part in plain] == [part.weights for part in found]
    assert all(map(torch.equal, chain(*plain), chain(*found)))


def test_epochs_have_orders_of_their_own_and_seeds_repeat_them():
    first, again, second = (read(0, epoch=epoch) for epoch in (0, 0, 1))
    assert all(map(torch.equal, chain(*first), chain(*again)))
    assert [len(t) for t in chain(*first)] != [len(t) for t in chain(*second)]
    unshuffled = MinibatchSampler(LENGTHS, 12, shuffle=False, rank=0, num_ranks=1)
    assert sorted(next(iter(unshuffled))) == [0, 1, 2, 3]


def test_the_rank_is_the_strategy_s_unless_it_is_given():
    sampler = MinibatchSampler(LENGTHS, 12)
    assert (sampler.rank, sampler.num_ranks, len(sampler)) == (0, 1, 3)
    set_replica(1, 2)
    try:
        assert (sampler.rank, sampler.num_ranks, len(sampler)) == (1, 2, 2)
    finally:
        forget_replica()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 9}, "text 9 has 10 tokens, and max_tokens=9"),
        ({"samples_per_rank": 0}, "samples_per_rank=0 must be at least 1"),
        ({"weight": "words"}, "weight='words' must be samples, tokens, or a number"),
        ({"weight": [1.0]}, "weight has 1 numbers"),
        ({"weight": [-1.0] * 11}, "none below zero"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MinibatchSampler(LENGTHS, **{"max_tokens": 12, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: read(0, weight=[0.0] * 11), "weigh 0.0 together"),
        (
            lambda: list(DataLoader(Texts(), 2, collate_fn=MinibatchCollate())),
            "that no MinibatchSampler has asked for",
        ),
        (lambda: Minibatch([1, 2], [0.5]), "2 microbatches have 1 weights"),
    ],
)
def test_minibatches_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_texts_that_weigh_nothing_make_no_microbatch_of_their_own():
    """A loss may have no mean there, and nothing times that is not nothing."""
    weights = [0.0, *[1.0] * 10]
    parts = [part for rank in range(2) for part in read(rank, mode="local_sort", weight=weights)]
    read_tokens = torch.cat(list(chain(*parts)))
    assert torch.bincount(read_tokens).tolist() == [0, *LENGTHS[1:]]
    assert all(weight > 0 for part in parts for weight in part.weights)
