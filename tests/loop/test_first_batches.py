"""Replicas that read the same batches are refused; those that share out data are let alone."""

from functools import partial

import lightning as L
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    get_worker_info,
)

from lightning_pipeoffload import data_parallel_rank, data_parallel_size
from lightning_pipeoffload.loop.data import FirstBatches
from tests.support import fits, replica_fits
from tests.support.pairs import slow


class Stream(IterableDataset):
    """Samples as they come, each replica's and worker's part, or all of them to each."""

    def __init__(self, is_shared):
        self.is_shared = is_shared

    def __iter__(self):
        first, step = 0, 1
        if self.is_shared:
            first, step = data_parallel_rank(), data_parallel_size()
        worker = get_worker_info()
        if worker is not None:
            first, step = first + step * worker.id, step * worker.num_workers
        yield from list(replica_fits.samples())[first::step]


class PartSampler(Sampler[int]):
    """A sampler of the user's own, which shares samples out in an order of its own."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(replica_fits.NUM_SAMPLES, generator=generator).tolist()
        yield from order[data_parallel_rank() :: data_parallel_size()]

    def __len__(self):
        return replica_fits.NUM_SAMPLES // data_parallel_size()


def loader_of(kind):
    """Return a loader_of of "stream", "shared stream", "in workers" or "own sampler"."""
    if kind == "own sampler":
        samples = replica_fits.samples()
        return DataLoader(samples, 8, sampler=PartSampler(), collate_fn=fits.collate)
    stream = Stream(kind != "stream")
    num_workers = 2 if kind == "in workers" else 0
    return DataLoader(stream, 8, collate_fn=fits.collate, num_workers=num_workers)


def fit(kind, num_replicas, num_ranks):
    """Train for an epoch; return the tokens of each batch, what was raised, and who one is after.

    Those are the replica and the number of replicas, in the fit's last hook and when it is over.
    """
    L.seed_everything(7, workers=True, verbose=False)
    batches = replica_fits.Batches()
    told = []
    last = L.pytorch.callbacks.LambdaCallback(
        on_fit_end=lambda *_: told.append((data_parallel_rank(), data_parallel_size()))
    )
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_replicas * num_ranks,
        strategy=fits.strategy(2, data_parallel_size=num_replicas),
        callbacks=[batches, last],
        max_epochs=1,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    error = ""
    try:
        trainer.fit(replica_fits.Net(), loader_of(kind))
    except ValueError as refusal:
        error = str(refusal)
    told.append((data_parallel_rank(), data_parallel_size()))
    return {"tokens": batches.tokens, "error": error, "told": told}


class Both:
    """Two replicas in one process, of which the second has given checksums."""

    num = 2

    def __init__(self, others=None):
        self.others = others
        self.gathered = []

    def gather(self, checksums):
        self.gathered.append(checksums)
        return [checksums, self.others]


def read(loader, replicas):
    first = FirstBatches(replicas, checks_lists=False)
    batches = list(loader)
    for number, batch in enumerate(batches):
        first.check(loader, batch, number, is_training=True)
    return first, batches


def gathered(loader):
    """Return the checksums of a replica that reads ``loader``."""
    replicas = Both([[]])
    first, _ = read(loader, replicas)
    first.compare_if_due()
    first.compare_if_due()
    return replicas.gathered[0]


def loader(tokens, **options):
    return DataLoader(TensorDataset(torch.tensor(tokens)), 2, **options)


@pytest.mark.parametrize(
    ("mine", "theirs", "is_refused"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], True),
        ([1, 2, 3, 4, 5, 6], [1, 2, 4, 3, 5, 6], False),
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], False),  # constant: nothing to tell them by
        ([1, 2], [1, 2], False),
    ],
)
def test_the_first_two_batches_are_compared_once(mine, theirs, is_refused):
    replicas = Both(gathered(loader(theirs)))
    first, batches = read(loader(mine), replicas)
    assert len(batches) == len(mine) // 2
    first.compare_if_due()
    assert not replicas.gathered
    if is_refused:
        with pytest.raises(ValueError, match=r"replicas 0 and 1 read the same .* TensorDataset"):
            first.compare_if_due()
    else:
        first.compare_if_due()
    first.compare_if_due()
    assert len(replicas.gathered) == 1


def test_the_batches_of_a_distributed_sampler_are_not_compared():
    data = TensorDataset(torch.tensor([1, 1, 2, 2]))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    for shared in (
        DataLoader(data, 2, sampler=sampler),
        DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False)),
    ):
        replicas = Both()
        first, batches = read(shared, replicas)
        first.compare_if_due()
        first.compare_if_due()
        assert (len(batches), replicas.gathered) == (1, [])


@pytest.mark.parametrize("kind", ["stream", slow("own sampler")])
def test_two_replicas_of_one_rank(ranks, kind):
    found = ranks(2).run(partial(fit, kind), 2, 1)
    if kind == "stream":
        for each in found:
            assert "replicas 0 and 1 read the same batches of Stream" in each["error"]
            assert "lightning_pipeoffload.data_parallel_rank()" in each["error"]
            assert len(each["tokens"]) == 1
    else:
        assert_shared_out(found)


def test_a_stream_that_workers_share_out_over_two_replicas(ranks):
    found = ranks(4).run(partial(fit, "in workers"), 2, 2)
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[2]["tokens"] == found[3]["tokens"]
    assert_shared_out(found[::2])


def assert_shared_out(found):
    assert not any(each["error"] for each in found)
    tokens = [token for each in found for batch in each["tokens"] for token in batch]
    assert sorted(tokens) == sorted(replica_fits.samples().tensors[0].tolist())
    assert [each["told"] for each in found] == [[(0, 2), (0, 1)], [(1, 2), (0, 1)]]
