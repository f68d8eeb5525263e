"""Loaders give the same batches on every rank, whatever else draws random numbers."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_pipeoffload.data import own_generators

DATASET = TensorDataset(torch.arange(32))


class Augmented(TensorDataset):
    """Its samples have noise, drawn in the worker."""

    def __getitem__(self, index):
        return self.tensors[0][index] + torch.rand(())


class Stream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(torch.rand(4) + (worker.id if worker else 0))


LOADERS = {
    "shuffled": lambda: DataLoader(DATASET, 4, shuffle=True),
    "sampled": lambda: DataLoader(DATASET, 4, sampler=RandomSampler(DATASET, num_samples=16)),
    "weighted": lambda: DataLoader(DATASET, 4, sampler=WeightedRandomSampler([1.0] * 32, 16)),
    "in batches of one's own": lambda: DataLoader(
        DATASET, batch_sampler=BatchSampler(RandomSampler(DATASET), 4, drop_last=True)
    ),
    "by workers": lambda: DataLoader(Augmented(torch.zeros(8)), 4, num_workers=1),
    "streamed by workers": lambda: DataLoader(Stream(), 4, num_workers=1),
}


def batches(loader, seed, epoch=0, noise=0):
    """Read an epoch as a rank does that has drawn ``noise`` numbers before."""
    own_generators(loader, seed)
    loader.sampler.set_epoch(epoch)
    torch.manual_seed(noise)
    return [batch[0] if isinstance(batch, list) else batch for batch in loader]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_ranks_read_the_same(make):
    first, second = batches(make(), seed=1, noise=1), batches(make(), seed=1, noise=2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("other", [{"seed": 2}, {"seed": 1, "epoch": 1}])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_seeds_and_epochs_differ(make, other):
    first, second = batches(make(), seed=1), batches(make(), **other)
    assert not torch.equal(torch.cat(first), torch.cat(second))


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_reading_leaves_the_global_generator_alone(make):
    loader = make()
    own_generators(loader, seed=1)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_read_again_is_the_same():
    loader = DataLoader(DATASET, 4, shuffle=True)
    first = batches(loader, seed=1, epoch=3)
    loader.sampler.set_epoch(3)
    torch.testing.assert_close([batch[0] for batch in loader], first)


def test_unshuffled_loaders_keep_their_order():
    found = batches(DataLoader(DATASET, 4), seed=1)
    assert torch.equal(torch.cat(found), torch.arange(32))


def test_the_users_generator_is_left_alone():
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(DATASET, 4, shuffle=True, generator=generator)
    own_generators(loader, seed=1)
    assert loader.generator is generator
    assert generator.initial_seed() == 5


def test_the_samplers_own_set_epoch_is_called():
    class Counting(RandomSampler):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Counting(DATASET)
    loader = DataLoader(DATASET, 4, sampler=sampler)
    batches(loader, seed=1, epoch=7)
    assert sampler.epoch == 7


def test_the_users_worker_init_is_left_alone():
    def init(worker):
        """Do nothing."""

    loader = DataLoader(DATASET, 4, num_workers=1, worker_init_fn=init)
    own_generators(loader, seed=1)
    assert loader.worker_init_fn is init


def test_what_is_no_loader_is_left_alone():
    batches = [torch.ones(1)]
    own_generators(batches, seed=1)
    assert batches == [torch.ones(1)]
