"""The same batches on every rank of a pipeline.

A shuffling sampler draws its order from the global generator, workers their seeds too; ranks that
draw differently (one has more dropout) would read different batches, silently. So samplers and
workers get generators of their own, seeded by run and epoch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_pipeoffload.runtime.randomness import mix_seed


def own_generators(loader: object, seed: int) -> None:
    """Give a loader generators that depend on ``seed`` and the epoch only.

    Generators that the user has given are left alone; they are her promise.
    """
    if not isinstance(loader, DataLoader):
        return
    if loader.worker_init_fn is None and loader.num_workers:
        # Lightning's own would mix in the global rank.
        loader.worker_init_fn = partial(pl_worker_init_function, rank=0)
    generators = []
    holders: tuple[Any, ...] = (
        loader,
        loader.sampler,
        getattr(loader.batch_sampler, "sampler", None),
    )
    for holder in holders:
        if holder is not None and getattr(holder, "generator", False) is None:
            holder.generator = torch.Generator()
            generators.append(holder.generator)
    _seed_each_epoch(loader.sampler, generators, seed)


def _seed_each_epoch(sampler: Any, generators: list[torch.Generator], seed: int) -> None:
    """Let Lightning's call of ``sampler.set_epoch`` seed the generators."""
    inner = getattr(sampler, "set_epoch", None)

    def set_epoch(epoch: int) -> None:
        if inner is not None:
            inner(epoch)
        for place, generator in enumerate(generators):
            generator.manual_seed(mix_seed(seed, epoch, place))

    set_epoch(0)
    sampler.set_epoch = set_epoch
