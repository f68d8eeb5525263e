"""The shapes of results inside a compiled region, from those of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_MOST_KNOWN = 256
_Read = Callable[[Sequence[Any]], int]


class ResultShape:
    """The shape of one result.

    Args:
        sizes: Numbers, or expressions.
        reads: How the expressions' symbols are read off the region's inputs.
    """

    def __init__(self, sizes: Sequence[Any], reads: Mapping[Any, _Read]) -> None:
        self._sizes = sizes
        self._reads = reads
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return the sizes for these inputs."""
        values = tuple(read(inputs) for read in self._reads.values())
        if values not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[values] = self._compute(values)
        return self._known[values]

    def _compute(self, values: tuple[int, ...]) -> tuple[int, ...]:
        of_symbols = dict(zip(self._reads, values, strict=True))
        return tuple(
            size if isinstance(size, int) else int(size.xreplace(of_symbols))
            for size in self._sizes
        )


class ShapeReader:
    """Makes the shapes of one graph's results.

    Args:
        placeholders: The graph's inputs.
    """

    def __init__(self, placeholders: Sequence[fx.Node]) -> None:
        self._reads: dict[Any, _Read] = {}
        for index, node in enumerate(placeholders):
            self._add(index, node.meta.get("example_value"))

    def read(self, example: Tensor) -> ResultShape | None:
        """Return the shape of a result; None: its inputs' shapes do not tell."""
        sizes = [_expression(size) for size in example.shape]
        symbols = {s for size in sizes if not isinstance(size, int) for s in size.free_symbols}
        if not symbols <= self._reads.keys():
            return None
        return ResultShape(sizes, {symbol: self._reads[symbol] for symbol in symbols})

    def _add(self, index: int, example: Any) -> None:
        if isinstance(example, torch.SymInt):
            self._reads.setdefault(_expression(example), lambda inputs: int(inputs[index]))
        elif isinstance(example, Tensor):
            for dim, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt):
                    self._add_size(_expression(size), index, dim)

    def _add_size(self, symbol: Any, index: int, dim: int) -> None:
        self._reads.setdefault(symbol, lambda inputs: int(inputs[index].shape[dim]))


def _expression(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
