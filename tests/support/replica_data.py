"""Data that share themselves out over replicas, or do not; and a fit on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from lightning_pipeoffload import data_parallel_rank, data_parallel_size
from tests.support import fits, replica_fits


class Stream(IterableDataset):
    """Samples as they come, each replica's and worker's part, or all of them to each."""

    def __init__(self, is_shared: bool) -> None:
        self.is_shared = is_shared

    def __iter__(self) -> Iterator[Any]:
        first, step = 0, 1
        if self.is_shared:
            first, step = data_parallel_rank(), data_parallel_size()
        worker = get_worker_info()
        if worker is not None:
            first, step = first + step * worker.id, step * worker.num_workers
        yield from list(replica_fits.samples())[first::step]


class PartSampler(Sampler[int]):
    """A sampler of the user's own, which shares samples out in an order of its own."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(replica_fits.NUM_SAMPLES, generator=generator).tolist()
        yield from order[data_parallel_rank() :: data_parallel_size()]

    def __len__(self) -> int:
        return replica_fits.NUM_SAMPLES // data_parallel_size()


def loader(kind: str) -> DataLoader[Any]:
    """Return a loader of "stream", "shared stream", "in workers" or "own sampler"."""
    if kind == "own sampler":
        samples = replica_fits.samples()
        return DataLoader(samples, 8, sampler=PartSampler(), collate_fn=fits.collate)
    stream = Stream(kind != "stream")
    num_workers = 2 if kind == "in workers" else 0
    return DataLoader(stream, 8, collate_fn=fits.collate, num_workers=num_workers)


def fit(kind: str, num_replicas: int, num_ranks: int) -> dict[str, Any]:
    """Train for an epoch; return the tokens of each batch, what was raised, and who one is after.

    Those are the replica and the number of replicas, in the fit's last hook and when it is over.
    """
    L.seed_everything(7, workers=True, verbose=False)
    batches = replica_fits.Batches()
    told: list[tuple[int, int]] = []
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
        trainer.fit(replica_fits.Net(), loader(kind))
    except ValueError as refusal:
        error = str(refusal)
    told.append((data_parallel_rank(), data_parallel_size()))
    return {"tokens": batches.tokens, "error": error, "told": told}
