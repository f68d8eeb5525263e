"""What a loader yields: the microbatches of one rank, and what each of them weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory  # private: what a loader itself calls


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
