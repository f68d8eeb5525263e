"""Whole texts packed into the rows of batches of one shape, for a pipeline on uneven texts.

A row holds several texts, each with positions of its own from 0, which is how attention tells them
apart; one row is one microbatch::

    input_ids     a  a  a  a  a  b  b  b  0  0
    position_ids  0  1  2  3  4  0  1  2  0  1     texts a and b, and what is left of the row
    labels        -  a  a  a  a  -  b  b  -  -     -: -100, which losses leave out

The texts of an epoch are shared out to as many rows as they need, of nearly equal cost. Of a batch
the light rows come first and last, the heavy ones in the middle: while the pipeline fills and
drains, the other ranks wait for its first and last microbatches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.texts.index_groups import GroupSampler, IndexGroups
from lightning_pipeoffload.texts.packing import Cost, check_lengths, find_cost, read_lengths

IGNORED_LABEL = -100  # torch's ignore_index, and transformers'

Rows = list[list[int]]


class PackedRowsSampler(GroupSampler):
    """Yields the texts of each batch's rows.

    Pass it to a loader as ``batch_sampler``, with ``collate_fn=PackedRows(...)``. In an epoch each
    text is read once, by one replica, and all epochs have as many batches. Where there are fewer
    texts than rows, some are read twice, as by torch's ``DistributedSampler``.

    Args:
        lengths: The tokens of each text of the dataset.
        num_rows: The rows of a replica's batch; each is a microbatch.
        max_tokens: The tokens of a row; no text may be longer.
        cost: The cost of a text, by which rows are made equal: a function of its length, or
            "tokens", "1.5b" or "7b", the curves of transformers of these sizes; None: "tokens".
        shuffle: Whether to mix texts and rows anew in each epoch.
        seed: The seed of the mixing.

    Raises:
        ValueError: A text is empty or too long, or an argument is out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        num_rows: int,
        max_tokens: int,
        cost: str | Cost | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_sizes(num_rows, max_tokens)
        self.num_rows, self.max_tokens = num_rows, max_tokens
        self._lengths = read_lengths(lengths)
        if not self._lengths:
            raise ValueError("lengths is empty; give the number of tokens of each text")
        check_lengths(self._lengths, max_tokens, "a row")
        find = find_cost("tokens" if cost is None else cost)
        self._by_length = sorted(self._lengths, reverse=True)
        self._costs = [find(length) for length in self._by_length]
        for each in self._costs:
            if not each > 0:  # nor not a number
                raise ValueError(f"cost gives a text {each}; it must be more than 0")
        self._shuffle, self._seed = shuffle, seed
        self._packed: dict[int, Rows] = {}  # by the number of rows that all replicas read at once

    def __len__(self) -> int:
        return len(self._rows()) // self._num_global_batch_rows

    @property
    def num_texts(self) -> int:
        """The number of texts whose lengths it has."""
        return len(self._lengths)

    def __iter__(self) -> Iterator[IndexGroups]:
        texts, rows = [*range(len(self._lengths))], [*self._rows()]
        if self._shuffle:
            generator = random.Random(f"{self._seed} {self.epoch}")
            generator.shuffle(texts)
            generator.shuffle(rows)
        # A row names its texts by their place among the lengths, so those of one length are mixed.
        texts.sort(key=self._lengths.__getitem__, reverse=True)
        max_size = max(map(len, rows))
        for start in range(0, len(rows), self._num_global_batch_rows):
            batch = sorted(rows[start : start + self._num_global_batch_rows], key=self._cost_of)
            rows_of_rank = batch[self.rank :: self.num_ranks]
            ordered = rows_of_rank[::2] + rows_of_rank[1::2][::-1]
            yield IndexGroups([[texts[place] for place in row] for row in ordered], max_size)

    @property
    def _num_global_batch_rows(self) -> int:
        return self.num_rows * self.num_ranks

    def _cost_of(self, row: Sequence[int]) -> float:
        return sum(self._costs[place] for place in row)

    def _rows(self) -> Rows:
        """Return the rows of an epoch, for as few batches as the texts need."""
        size = self._num_global_batch_rows
        if size not in self._packed:
            least = most = -(-sum(self._lengths) // (self.max_tokens * size))
            while (rows := self._pack(most * size)) is None:
                least, most = most + 1, 2 * most
            while least < most:
                middle = (least + most) // 2
                packed = self._pack(middle * size)
                if packed is None:
                    least = middle + 1
                else:
                    rows, most = packed, middle
            self._packed[size] = rows
        return self._packed[size]

    def _pack(self, num_rows: int) -> Rows | None:
        """Put each text, the longest first, into the row of the least cost that has room for it."""
        num_texts = len(self._by_length)
        if num_texts < num_rows:
            return [[place % num_texts] for place in range(num_rows)]
        rows: Rows = [[] for _ in range(num_rows)]
        room = [self.max_tokens] * num_rows
        open_rows = [(0.0, number) for number in range(num_rows)]
        for place, length in enumerate(self._by_length):
            too_full = []
            while open_rows and room[open_rows[0][1]] < length:
                too_full.append(heappop(open_rows))
            if not open_rows:
                return None
            cost, row = heappop(open_rows)
            rows[row].append(place)
            room[row] -= length
            too_full.append((cost + self._costs[place], row))
            for entry in too_full:
                if room[entry[1]] >= self._by_length[-1]:
                    heappush(open_rows, entry)
        return rows


class PackedRows:
    """Makes a batch of the texts that a :class:`PackedRowsSampler` has put into rows.

    A dataset's items are mappings with ``"input_ids"``, the tokens of a text, and maybe
    ``"labels"``, as many numbers, -100 where the loss shall count none. A batch has tensors of
    int64 of shape ``[num_rows, max_tokens]``: ``"input_ids"``, ``"position_ids"``, which begin at 0
    in each text, and ``"labels"``. What texts leave of a row is 0, with labels of -100.

    Args:
        num_rows: The rows of a batch, as the sampler has.
        max_tokens: The tokens of a row, as the sampler has.
        shifts_labels: Whether the label of a token is the next token of its text, for a module that
            compares what it predicts for a token with that token's label. Else a token's label is
            the token itself, and the first label of each text is -100: Hugging Face's models
            compare what they predict for a token with the label of the next one.
        cu_seqlens: Whether batches have ``"cu_seqlens"`` too, int32 of shape ``[num_rows, n]``: of
            each row 0 and the cumulative lengths of its texts, then ``max_tokens`` up to ``n``
            numbers. So padding is a text of its own, and what follows are texts without tokens,
            which kernels for variable lengths skip. ``n`` is the same in all batches.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        num_rows: int,
        max_tokens: int,
        shifts_labels: bool = False,
        cu_seqlens: bool = False,
    ) -> None:
        _check_sizes(num_rows, max_tokens)
        self.num_rows, self.max_tokens = num_rows, max_tokens
        self.shifts_labels, self.cu_seqlens = shifts_labels, cu_seqlens

    def __call__(self, items: Sequence[Any]) -> dict[str, Tensor]:
        """Pack the texts that were read last.

        Raises:
            ValueError: A ``PackedRowsSampler`` has not yielded their indices, its rows are not
                those of this object, or an item is not what its length says.
        """
        read = IndexGroups.pop_last(len(items), "PackedRows", "PackedRowsSampler")
        if len(read.sizes) != self.num_rows:
            raise ValueError(
                f"PackedRows(num_rows={self.num_rows}) got {len(read.sizes)} rows; give it the "
                f"num_rows of its PackedRowsSampler"
            )
        shape = self.num_rows, self.max_tokens
        batch = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "position_ids": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, IGNORED_LABEL),
        }
        if self.cu_seqlens:
            bounds = self.num_rows, read.max_size + 2
            batch["cu_seqlens"] = torch.full(bounds, self.max_tokens, dtype=torch.int32)
        rows = zip(read.divide(items), read.divide(read), strict=True)
        for number, (texts, indices) in enumerate(rows):
            self._fill({name: tensor[number] for name, tensor in batch.items()}, texts, indices)
        return batch

    def _fill(
        self, row: Mapping[str, Tensor], items: Sequence[Any], indices: Sequence[int]
    ) -> None:
        starts, start = [], 0
        for item, index in zip(items, indices, strict=True):
            tokens, labels = self._read(item, index)
            end = start + len(tokens)
            if end > self.max_tokens:
                raise ValueError(
                    f"text {index} has {len(tokens)} tokens, and its row has room for "
                    f"{self.max_tokens - start} of max_tokens={self.max_tokens}: the lengths that "
                    f"PackedRowsSampler was given are not those of the dataset's texts"
                )
            row["input_ids"][start:end] = tokens
            row["labels"][start:end] = labels
            row["position_ids"][start:end] = torch.arange(len(tokens))
            starts.append(start)
            start = end
        row["position_ids"][start:] = torch.arange(self.max_tokens - start)
        if self.cu_seqlens:
            starts.append(start)
            row["cu_seqlens"][: len(starts)] = torch.tensor(starts)

    def _read(self, item: Any, index: int) -> tuple[Tensor, Tensor]:
        if not isinstance(item, Mapping) or "input_ids" not in item:
            raise ValueError(
                f'PackedRows packs items like {{"input_ids": [1, 2, 3]}}, and text {index} is a '
                f"{type(item).__name__}"
                + (f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else "")
            )
        tokens = torch.as_tensor(item["input_ids"], dtype=torch.int64)
        labels = torch.as_tensor(item.get("labels", tokens), dtype=torch.int64)
        if tokens.dim() != 1 or labels.shape != tokens.shape:
            raise ValueError(
                f"text {index} has input_ids of shape {[*tokens.shape]} and labels of shape "
                f"{[*labels.shape]}; both must be a list of the same length"
            )
        ignored = torch.tensor([IGNORED_LABEL])
        if self.shifts_labels:
            return tokens, torch.cat([labels[1:], ignored])
        return tokens, torch.cat([ignored, labels[1:]])


def find_text_starts(position_ids: Tensor) -> list[int]:
    """Return where the texts of a row begin, and what they leave of it."""
    return position_ids.flatten().eq(0).nonzero().flatten().tolist()


def _check_sizes(num_rows: int, max_tokens: int) -> None:
    for name, value in (("num_rows", num_rows), ("max_tokens", max_tokens)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
