"""Loaders give the same batches on every rank, whatever else draws random numbers there."""

import os
import random
import warnings
from contextlib import ExitStack

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_pipeoffload.loop.data import PipelineLoaders, leave_out_seen
from tests.support import fits
from tests.support.pairs import some

COUNT = 8
DATASET = TensorDataset(torch.arange(COUNT).double())


class Augmented(TensorDataset):
    """Its samples have noise from each of the three libraries."""

    def __init__(self):
        super().__init__(torch.zeros(COUNT).double())

    def __getitem__(self, index):
        return (torch.rand(()).double() + np.random.rand() + random.random(),)


class Stream(IterableDataset):
    """Samples by three libraries' random numbers."""

    def __iter__(self):
        for _ in range(COUNT // 2):
            yield torch.rand(()).double(), np.random.rand(), random.random()


class PickedByNumpy(Sampler):
    """An order of numpy's."""

    def __iter__(self):
        return iter(np.random.permutation(COUNT).tolist())

    def __len__(self):
        return COUNT


class Pairs(Sampler):
    """Batches of Python's choice."""

    def __iter__(self):
        for _ in range(3):
            yield random.sample(range(COUNT), 2)

    def __len__(self):
        return 3


class Handmade:
    """No DataLoader at all."""

    def __iter__(self):
        return iter([[torch.rand(2).double()] for _ in range(3)])


def shuffled(**options):
    return DataLoader(DATASET, 2, shuffle=True, **options)


def with_init(init):
    return DataLoader(Augmented(), 2, num_workers=1, worker_init_fn=init)


def draw_once(worker):
    """Draw a number, as an init function of a user may."""
    random.random()


# Two passes of each differ: an order or an augmentation that does not stay the same for ever.
RANDOM = {
    "shuffle": shuffled,
    "a sampler of one's own": lambda: DataLoader(DATASET, 2, sampler=PickedByNumpy()),
    "a batch sampler of one's own": lambda: DataLoader(DATASET, batch_sampler=Pairs()),
    "IterableDataset, two workers": lambda: DataLoader(Stream(), 2, num_workers=2),
    "augmentation, two workers": lambda: DataLoader(Augmented(), 2, num_workers=2),
    "augmentation, persistent_workers": lambda: DataLoader(
        Augmented(), 2, num_workers=1, persistent_workers=True
    ),
    "in_order=False": lambda: shuffled(num_workers=2, in_order=False, prefetch_factor=1),
    "worker_init_fn": lambda: with_init(draw_once),
    "Lightning's worker_init_fn": lambda: with_init(pl_worker_init_function),
    "a generator of its own": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "no DataLoader": Handmade,
    "a dict of loaders": lambda: {"first": shuffled(), "second": DataLoader(Augmented(), 2)},
    "CombinedLoader": lambda: CombinedLoader(
        {"short": shuffled(), "long": DataLoader(Stream(), 1)}, "max_size"
    ),
}


def leaves(batch):
    return torch.cat([x.double() for x in torch.utils._pytree.tree_leaves(batch) if x is not None])


class Draws(L.LightningModule):
    """Draws more random numbers the lower its rank, in a hook and in its first block."""

    def __init__(self, make):
        super().__init__()
        self.make, self.batches = make, []
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(2))).double()

    def train_dataloader(self):
        return self.make()

    def on_train_batch_start(self, batch, batch_idx):
        count = 1 + self.global_rank
        torch.rand(count), np.random.rand(count), [random.random() for _ in range(count)]

    def training_step(self, batch, batch_idx):
        return self.blocks(leaves(batch)[:, None]).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches.append((self.current_epoch, leaves(batch).tolist()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(num_devices, name, seed=7, **options):
    """Return (epoch, batch) for each batch of a fit of two epochs."""
    if seed is not None:
        L.seed_everything(seed, workers=True, verbose=False)
    module = Draws(RANDOM[name] if isinstance(name, str) else name)
    trainer = fits.trainer(num_devices, {"num_microbatches": 1}, max_epochs=2, **options)
    if num_devices:
        fits.outlive_failures(trainer)
    trainer.fit(module)
    return module.batches


@pytest.mark.parametrize("name", some(RANDOM, 3))
def test_ranks_read_the_same_random_batches(ranks, name):
    first, second = ranks(2).run(read, 2, name)
    assert first == second
    assert batches_of(0, first) != batches_of(1, first)


def batches_of(epoch, found):
    return [batch for at, batch in found if at == epoch]


def test_ranks_read_the_same_where_loaders_are_made_anew(ranks):
    first, second = ranks(2).run(read_anew, "shuffle")
    assert first == second == ranks(2).run(read, 2, "shuffle")[0]


def read_anew(name):
    return read(2, name, reload_dataloaders_every_n_epochs=1)


def test_without_a_seed_global_rank_0s_counts(ranks):
    first, second = ranks(2).run(read_unseeded, "augmentation, two workers")
    assert first == second


def read_unseeded(name):
    os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier test
    torch.seed(), np.random.seed(), random.seed()
    return read(2, name, seed=None)


class Numbers(IterableDataset):
    """Workers take turns."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(range(COUNT)[worker.id :: worker.num_workers] if worker else range(COUNT))


# One device's batches in one device's order.
PLAIN = {
    "in order": lambda: DataLoader(DATASET, 2),
    "in order, two workers, prefetch_factor": lambda: DataLoader(
        DATASET, 2, num_workers=2, prefetch_factor=3
    ),
    "IterableDataset in order, two workers": lambda: DataLoader(Numbers(), 2, num_workers=2),
    "drop_last": lambda: DataLoader(DATASET, 3, drop_last=True),
    "a generator of its own": RANDOM["a generator of its own"],
    "CombinedLoader in order": lambda: CombinedLoader(
        [DataLoader(DATASET, 2), DataLoader(Numbers(), 1)], "max_size_cycle"
    ),
    "a list of tensors": lambda: [torch.ones(2, 3).double(), torch.zeros(2, 3).double()],
}


@pytest.mark.parametrize("name", some(PLAIN, 3))
def test_ranks_read_one_devices_batches(ranks, name):
    first, second = ranks(2).run(read_plain, 2, name)
    assert first == second == read_plain(0, name)


def read_plain(num_devices, name):
    return read(num_devices, PLAIN[name])


def owned(make, epochs, is_training=True):
    loaders, loader = PipelineLoaders(1, epochs), make()
    loaders.intercept(loader, is_training)
    return loaders, loader


@pytest.mark.parametrize("is_training", [False, True])
def test_a_loader_that_starts_over_in_training_gives_others(is_training):
    _, loader = owned(shuffled, lambda: 0, is_training)
    first, second = (torch.cat([batch for (batch,) in loader]).tolist() for _ in range(2))
    assert (first != second) is is_training


class Prefetcher:
    """Is its own iterator, as loaders of other libraries are."""

    def __iter__(self):
        self.batches = iter(DataLoader(DATASET, 2))
        return self

    def __next__(self):
        return next(self.batches)


def test_a_loader_may_be_its_own_iterator():
    _, loader = owned(Prefetcher, lambda: 0)
    for _ in range(2):
        assert torch.cat([batch for (batch,) in loader]).tolist() == [*range(COUNT)]


def test_two_loaders_of_one_dataset_have_orders_of_their_own_and_get_their_class_back():
    loaders, one = owned(shuffled, lambda: 0)
    loaders.intercept(another := shuffled(), is_training=True)
    assert not all(torch.equal(a, b) for (a,), (b,) in zip(one, another, strict=True))
    filters = [*warnings.filters]
    with ExitStack() as at_end:
        leave_out_seen(one, 1, at_end)
        assert warnings.filters != filters
    assert warnings.filters == filters
    loaders.release()
    assert type(one) is type(another) is DataLoader


def independent_trials(num_devices):
    """Return what each trial of a loop starts from, reads and loses; seeded once."""
    L.seed_everything(7, verbose=False)
    found = []
    for _ in range(2):
        module, record = fits.Net(), fits.Record()
        start = module.head.weight[0, 0].item()
        trainer = fits.trainer(num_devices, max_epochs=1, callbacks=[record], limit_val_batches=0)
        trainer.fit(module, fits.loader("shuffled"))
        found.append((start, record.batches, record.losses))
    return found


@pytest.mark.slow
def test_trials_in_a_loop_differ_as_on_one_device(ranks):
    (alone,) = ranks(1).run(independent_trials, 1)
    first, second = ranks(2).run(independent_trials, 2)
    assert first == second == alone
    starts, orders, _ = zip(*alone, strict=True)
    assert len(set(starts)) == len(set(map(str, orders))) == 2
    assert independent_trials(0)[0][0] == starts[0]


def stop_and_go_on(num_devices, folder):
    """Return what fits read and lose that resume after others which ``max_steps`` ended."""
    found = []
    for steps, more, accumulated, options in (
        (2, 6, 1, {}),
        (4, 3, 2, {"val_check_interval": 2}),
        (3, 3, 1, {"limit_train_batches": 3}),
    ):
        L.seed_everything(7, verbose=False)
        for limit in (
            {"max_steps": steps},
            {"max_steps": steps + more, "ckpt_path": f"{folder}/ckpt"},
        ):
            module, record = fits.Net(dropout=0.0, depth=2), fits.Record()
            ckpt_path = limit.pop("ckpt_path", None)
            trainer = fits.trainer(
                num_devices,
                callbacks=[record],
                accumulate_grad_batches=accumulated,
                **options,
                **limit,
            )
            trainer.fit(module, fits.loader(), fits.loader(), ckpt_path=ckpt_path)
            trainer.save_checkpoint(f"{folder}/ckpt")
        found.append(
            (trainer.current_epoch, record.batches, [f"{loss:.6f}" for loss in record.losses])
        )
    return found


def test_a_fit_that_goes_on_after_max_steps_begins_the_next_epoch_with_its_first_batch(
    ranks, tmp_path
):
    found, _ = ranks(2).run(stop_and_go_on, 2, str(tmp_path))
    assert found == stop_and_go_on(0, str(tmp_path))
