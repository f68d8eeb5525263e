"""A minibatch: one rank's microbatches with their weights; the sampler and collate function."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory  # private: what a loader itself calls

from lightning_pipeoffload.texts.index_groups import GroupSampler, IndexGroups
from lightning_pipeoffload.texts.packing import (
    Cost,
    Microbatches,
    check_packing,
    find_cost,
    pack,
    read_lengths,
)


class Minibatch:
    """One rank's microbatches of a minibatch, in order; there may be none.

    It is no list, since Lightning would move a list's elements to a device without the weights.

    Args:
        microbatches: The arguments of the module's steps, in order.
        weights: The share of each microbatch in the minibatch's loss; the sum over all ranks is 1.
        total: The number of samples or tokens of all ranks: the weight of the minibatch in the
            means that are logged for an epoch.

    Attributes:
        weights: As above.
        total: As above.

    Raises:
        ValueError: The numbers of weights and of microbatches differ.
    """

    def __init__(
        self,
        microbatches: Iterable[Any] = (),
        weights: Sequence[float] = (),
        total: float = 1.0,
    ) -> None:
        self._microbatches = list(microbatches)
        self.weights = list(weights)
        self.total = total
        if len(self.weights) != len(self):
            raise ValueError(
                f"{len(self)} microbatches have {len(self.weights)} weights; give one each"
            )

    def __len__(self) -> int:
        return len(self._microbatches)

    def __getitem__(self, number: int) -> Any:
        return self._microbatches[number]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._microbatches)

    def map(self, change: Callable[[Any], Any]) -> Minibatch:
        """Return a minibatch with ``change`` applied to each microbatch."""
        return Minibatch(map(change, self), self.weights, self.total)

    def pin_memory(self) -> Minibatch:
        """Return the minibatch in pinned memory; a loader calls it."""
        return self.map(pin_memory)


class PackedIndices(IndexGroups):
    """The indices of a rank's samples, one microbatch after another.

    Attributes:
        weights: The weight of each microbatch.
        total: The total of the minibatch.
    """

    def __init__(
        self,
        microbatches: Iterable[Sequence[int]] = (),
        weights: Sequence[float] = (),
        total: float = 1.0,
    ) -> None:
        super().__init__(microbatches)
        self.weights = list(weights)
        self.total = total


class MinibatchCollate:
    """Collates each group of samples of a :class:`MinibatchSampler` into a microbatch.

    Args:
        collate: A function that collates a list of samples into the argument of the module's step.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._collate = collate

    def __call__(self, samples: Sequence[Any]) -> Minibatch:
        """Collate the samples that were read last into a minibatch.

        Raises:
            ValueError: A ``MinibatchSampler`` has not yielded their indices.
        """
        read = PackedIndices.pop_last(len(samples), "MinibatchCollate", "MinibatchSampler")
        return Minibatch(map(self._collate, read.divide(samples)), read.weights, read.total)


class MinibatchSampler(GroupSampler):
    """Yields this rank's part of each minibatch, packed into microbatches.

    Pass it to a loader as ``batch_sampler``, with ``collate_fn=MinibatchCollate(...)``. Every rank
    computes the parts of all ranks from the lengths, the seed and the epoch, and yields its own.
    The numbers of microbatches differ, and a rank may have none.

    Args:
        lengths: The tokens of each sample of the dataset.
        max_tokens: The largest number of tokens of a microbatch; no sample may be longer.
        mode: "lb_mini": ranks have equal work, in as many microbatches as each needs; "lb_micro":
            equal numbers of samples and of microbatches; "local_sort": samples in turn, each a
            microbatch.
        cost: The cost of a sample: a function of its length, or "tokens", "1.5b" or "7b", the
            curves of transformers of these sizes.
        samples_per_rank: Samples of a minibatch, divided by the ranks. The last minibatch of an
            epoch has the remaining samples.
        weight: The weight of a microbatch's loss in the minibatch's loss: the number of "samples"
            or "tokens", if its loss is the mean over these; or a number for each sample of the
            dataset, such as its tokens with a label.
        shuffle: Whether to shuffle the samples in each epoch.
        seed: The seed of the shuffling.
        rank: The rank whose parts are yielded; None: the strategy's.
        num_ranks: The number of ranks that share a minibatch; None: the strategy's.

    Attributes:
        epoch: The next epoch, which determines the order; Lightning sets it.
        sampler: The sampler itself, on which Lightning calls ``set_epoch``.

    Raises:
        ValueError: A sample is too long, or an argument is out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        mode: str = "lb_mini",
        cost: str | Cost = "1.5b",
        samples_per_rank: int = 4,
        weight: str | Sequence[float] = "samples",
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        super().__init__(rank, num_ranks)
        self._lengths = read_lengths(lengths)
        check_packing(self._lengths, max_tokens, mode)
        if samples_per_rank < 1:
            raise ValueError(f"samples_per_rank={samples_per_rank} must be at least 1")
        self._max_tokens = max_tokens
        self._mode = mode
        self._cost = find_cost(cost)
        self._samples_per_rank = samples_per_rank
        self._weights = _weights(weight, self._lengths)
        self._shuffle = shuffle
        self._seed = seed

    @property
    def minibatch_size(self) -> int:
        """Samples of a minibatch on all ranks."""
        return self._samples_per_rank * self.num_ranks

    def __len__(self) -> int:
        return -(-len(self._lengths) // self.minibatch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(self._lengths)))
        if self._shuffle:
            random.Random(f"{self._seed} {self.epoch}").shuffle(order)
        rank, size = self.rank, self.minibatch_size
        for start in range(0, len(order), size):
            yield self._part(order[start : start + size], rank)

    def parts(self, samples: Sequence[int]) -> list[Microbatches]:
        """Return the microbatches of each rank, given a minibatch's indices into the dataset."""
        lengths = [self._lengths[sample] for sample in samples]
        shares = pack(lengths, self.num_ranks, self._max_tokens, self._cost, self._mode)
        return [[[samples[i] for i in part] for part in share if part] for share in shares]

    def _part(self, samples: Sequence[int], rank: int) -> PackedIndices:
        microbatches = [part for part in self.parts(samples)[rank] if self._weight(part)]
        total = self._weight(samples)
        if not total > 0:
            raise ValueError(
                f"the {len(samples)} samples of a minibatch weigh {total} together, so their loss "
                f"has no mean; give some of them a weight, or more to a minibatch"
            )
        weights = [self._weight(part) / total for part in microbatches]
        return PackedIndices(microbatches, weights, total)

    def _weight(self, samples: Sequence[int]) -> float:
        """Return the sum of the samples' weights; for 0 a loss has no mean."""
        return sum(self._weights[sample] for sample in samples)


def _weights(weight: str | Sequence[float], lengths: list[int]) -> list[float]:
    if isinstance(weight, str):
        named = {"samples": [1.0] * len(lengths), "tokens": list(map(float, lengths))}
        if weight not in named:
            raise ValueError(
                f"weight={weight!r} must be samples, tokens, or a number for each sample"
            )
        return named[weight]
    weights = [float(number) for number in weight]
    if len(weights) != len(lengths) or min(weights, default=0.0) < 0:
        raise ValueError(
            f"weight has {len(weights)} numbers, the least of them {min(weights, default=None)}; "
            f"give one for each of the {len(lengths)} samples, none below zero"
        )
    return weights
