"""The same batches on every rank of a pipeline, and after a resume.

A shuffling sampler draws its order from the global generator, workers their seeds too; ranks that
draw differently (one has more dropout) would read different batches, silently. So samplers and
workers get generators of their own, seeded by run and epoch. As an epoch's order is known then, a
fit that resumes within one can leave out what it has seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.warnings import PossibleUserWarning
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


def leave_out_seen(loader: object, count_seen: Callable[[], int]) -> None:
    """Let the next iteration over a loader start after the batches that were seen.

    They are read and dropped, so that workers draw for the rest what they would have drawn.
    Lightning itself starts anew, unless the loader saves its state; then this does nothing.

    Args:
        loader: of training batches.
        count_seen: says how many, when the first batch is asked for.
    """
    if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
        return
    plain = type(loader)

    def iterate(self: Any) -> Iterator[Any]:
        self.__class__ = plain
        return _iterate_after(self, count_seen)

    # iter() looks at the type only; the sampler and the batches are the user's own.
    loader.__class__ = type(plain.__name__, (plain,), {"__iter__": iterate})
    warnings.filterwarnings("ignore", ".*dataloader is not resumable", PossibleUserWarning)


def _iterate_after(loader: DataLoader[Any], count_seen: Callable[[], int]) -> Iterator[Any]:
    batches = iter(loader)
    for _ in range(count_seen()):
        try:
            next(batches)
        except StopIteration:  # the shorter one of several, which starts again
            batches = iter(loader)
            next(batches)
    yield from batches
