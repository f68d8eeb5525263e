"""A minibatch: one rank's microbatches with their weights, and how a loader makes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from torch.utils.data import Sampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory  # private: what a loader itself calls

from lightning_pipeoffload.odc.packing import Cost, Microbatches, check_packing, find_cost, pack
from lightning_pipeoffload.processes.data_parallel import data_parallel_rank, data_parallel_size


class Minibatch:
    """One rank's microbatches of a minibatch, in order; there may be none.

    It is no list, which Lightning would take apart and put together again without the weights.

    Args:
        microbatches: What the module's step is to see, one after the other.
        weights: The share of each in the minibatch's loss. Those of all ranks add up to one.
        total: What a share of one is: how many samples, or tokens, all ranks have. So much a
            minibatch counts in what is logged of an epoch.

    Attributes:
        weights: As above.
        total: As above.

    Raises:
        ValueError: The microbatches have not one weight each.
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
        """Return the same with each microbatch changed."""
        return Minibatch(map(change, self), self.weights, self.total)

    def pin_memory(self) -> Minibatch:
        """Return the same in memory that an accelerator reads fast, as a loader asks for it."""
        return self.map(pin_memory)


class PackedIndices(list[int]):
    """The places of a rank's texts, microbatch after microbatch, as a loader takes them: flat.

    A loader looks the texts up and hands them to its collate function, in the same process and one
    right after the other; what else that has to know it finds in ``last_read``.

    Args:
        microbatches: The places of the texts in each microbatch.
        weights: The weight of each.
        total: The total of the minibatch.

    Attributes:
        sizes: The number of texts of each microbatch.
        weights: As above.
        total: As above.
        last_read: The one whose texts were looked up last, until ``MinibatchCollate`` takes it.
    """

    last_read: ClassVar[PackedIndices | None] = None

    def __init__(
        self,
        microbatches: Iterable[Sequence[int]] = (),
        weights: Sequence[float] = (),
        total: float = 1.0,
    ) -> None:
        microbatches = list(microbatches)
        super().__init__(index for microbatch in microbatches for index in microbatch)
        self.sizes = [len(microbatch) for microbatch in microbatches]
        self.weights = list(weights)
        self.total = total

    def __iter__(self) -> Iterator[int]:
        PackedIndices.last_read = self
        return super().__iter__()


class MinibatchCollate:
    """Groups the texts of a :class:`MinibatchSampler` and makes a microbatch of each group.

    Args:
        collate: A function that makes what the module's step takes of a list of samples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._collate = collate

    def __call__(self, samples: Sequence[Any]) -> Minibatch:
        """Make a minibatch of the samples that were read last.

        Raises:
            ValueError: They were not read by the indices of a ``MinibatchSampler``.
        """
        read, PackedIndices.last_read = PackedIndices.last_read, None
        if read is None or sum(read.sizes) != len(samples):
            raise ValueError(
                f"MinibatchCollate got {len(samples)} samples that no MinibatchSampler has asked "
                f"for: use it with DataLoader(..., batch_sampler=MinibatchSampler(...)), and with "
                f"a dataset whose __getitems__, if it has one, iterates over what it is given"
            )
        bounds = pairwise(accumulate(read.sizes, initial=0))
        groups = [list(samples[start:end]) for start, end in bounds]
        return Minibatch(map(self._collate, groups), read.weights, read.total)


class MinibatchSampler(Sampler[list[int]]):
    """Yields this rank's part of each minibatch, packed into microbatches.

    Give it to a loader as ``batch_sampler``, beside ``collate_fn=MinibatchCollate(...)``. Every
    rank computes the parts of all, from the lengths, the seed and the epoch, and takes its own: the
    numbers of microbatches differ, and a rank may have none.

    Args:
        lengths: The tokens of each sample of the dataset.
        max_tokens: The most tokens of one microbatch; no sample may be longer.
        mode: "lb_mini": ranks have equal work, in as many microbatches as each needs; "lb_micro":
            equal numbers of samples and of microbatches; "local_sort": dealt out, each sample a
            microbatch.
        cost: What a sample costs: a function of its length, or "tokens", "1.5b" or "7b", the curves
            of transformers of these sizes.
        samples_per_rank: Samples of a minibatch, divided by the ranks. The last minibatch of an
            epoch has what is left.
        weight: What a microbatch's loss weighs in the minibatch's: "samples" or "tokens", as many
            as it has, where its loss is the mean over these; or a number for each sample of the
            dataset, such as the tokens that count.
        shuffle: Whether each epoch has an order of its own.
        seed: The seed of these orders.
        rank: This process; None: as the strategy knows it.
        num_ranks: How many share a minibatch; None: as the strategy knows it.

    Attributes:
        epoch: The epoch whose order comes next; Lightning sets it.
        sampler: Itself, where Lightning looks for what it is to tell the epoch.

    Raises:
        ValueError: A sample is too long, or an argument cannot be.
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
        self._lengths = [int(length) for length in lengths]
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
        self._rank = rank
        self._num_ranks = num_ranks
        self.epoch = 0
        self.sampler = self

    @property
    def rank(self) -> int:
        """The rank whose parts are yielded."""
        return data_parallel_rank() if self._rank is None else self._rank

    @property
    def num_ranks(self) -> int:
        """How many ranks share a minibatch."""
        return data_parallel_size() if self._num_ranks is None else self._num_ranks

    @property
    def minibatch_size(self) -> int:
        """Samples of a minibatch, those of all ranks."""
        return self._samples_per_rank * self.num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Choose the order that comes next."""
        self.epoch = epoch

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
        """Share out a minibatch.

        Args:
            samples: The places of its samples in the dataset.

        Returns:
            The microbatches of each rank.
        """
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
        """Return what samples weigh together; of nothing a loss may have no mean."""
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
