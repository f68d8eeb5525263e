"""Samplers that say in which groups a loader's collate function shall put the samples it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from torch.utils.data import Sampler
from typing_extensions import Self

from lightning_pipeoffload.processes import data_parallel_rank, data_parallel_size


class IndexGroups(list[int]):
    """Indices of samples in a flat list for a loader, one group after another.

    A loader reads the samples and then calls its collate function in the same process. That
    function takes the groups of what was read last, by :meth:`pop_last`.

    Attributes:
        sizes: The number of samples of each group.
        max_size: The samples of the largest group of any batch of the epoch.
    """

    _last_read: ClassVar[IndexGroups | None] = None

    def __init__(self, groups: Iterable[Sequence[int]] = (), max_size: int = 0) -> None:
        groups = list(groups)
        super().__init__(index for group in groups for index in group)
        self.sizes, self.max_size = [len(group) for group in groups], max_size

    def __iter__(self) -> Iterator[int]:
        IndexGroups._last_read = self
        return super().__iter__()

    @classmethod
    def pop_last(cls, num_samples: int, collate: str, sampler: str) -> Self:
        """Return the groups that were read last.

        Args:
            num_samples: The number of samples that were read.
            collate: The name of the collate function, for the message.
            sampler: The name of the sampler that it needs.

        Raises:
            ValueError: These are not of this class, or of another number of samples.
        """
        read, IndexGroups._last_read = IndexGroups._last_read, None
        if not isinstance(read, cls) or sum(read.sizes) != num_samples:
            raise ValueError(
                f"{collate} got {num_samples} samples that no {sampler} has asked for: use it "
                f"with DataLoader(..., batch_sampler={sampler}(...)), and with a dataset whose "
                f"__getitems__, if it has one, iterates over what it is given"
            )
        return read

    def divide(self, samples: Sequence[Any]) -> list[list[Any]]:
        """Return the samples in groups."""
        return [list(samples[a:b]) for a, b in pairwise(accumulate(self.sizes, initial=0))]


class GroupSampler(Sampler[list[int]]):
    """A ``batch_sampler`` that yields what this replica reads of each batch, in an epoch's order.

    Args:
        rank: The replica whose part is yielded; None: this process's.
        num_ranks: The number of replicas that share a batch; None: the strategy's.

    Attributes:
        epoch: The next epoch, which determines the order; Lightning sets it.
        sampler: The sampler itself, on which Lightning calls ``set_epoch``.
    """

    def __init__(self, rank: int | None = None, num_ranks: int | None = None) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self.epoch = 0
        self.sampler = self

    @property
    def rank(self) -> int:
        """The replica whose part is yielded."""
        return data_parallel_rank() if self._rank is None else self._rank

    @property
    def num_ranks(self) -> int:
        """The number of replicas that share a batch."""
        return data_parallel_size() if self._num_ranks is None else self._num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the next order."""
        self.epoch = epoch
