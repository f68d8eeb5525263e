"""Which values between the blocks the loss leads back to: only those get a gradient.

A value that is used behind a ``detach()`` only requires a gradient and never gets one, so the
weights that it is computed from keep None, by which an optimizer leaves them alone. The graph of a
step that is run without values tells which values those are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.weight_grad.kernels import uses_in

Edge: TypeAlias = tuple[Any, int]  # an autograd node, and the place among its outputs


def edge_of(tensor: Tensor) -> Edge | None:
    """Return where a tensor's gradient goes to; None: nowhere."""
    return (tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else None


class BackwardReach:
    """What a step's graph leads to from the loss.

    Attributes:
        leaves: The leaves of the graph that get a gradient.
        uses: The segments that use each of them, by its id, and whether its gradient could wait
            for W.
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.uses: defaultdict[int, set[tuple[int, bool]]] = defaultdict(set)
        self._starts: list[int] = []
        self._last_use: dict[Edge, int] = {}

    def start_segment(self) -> None:
        """Say that what is made from now on is in the next segment."""
        # Private: nothing else tells in which order nodes were made.
        self._starts.append(torch._C._autograd._get_sequence_nr())

    def walk(self, loss: Tensor) -> None:
        """Follow the graph from the loss, of all segments."""
        self._last_use[loss.grad_fn, loss.output_nr] = len(self._starts)
        for node in _nodes_behind(loss.grad_fn):
            if hasattr(node, "variable"):
                self.leaves.append(node.variable)
            segment = self._segment_of(node)
            for leaf, could_wait in uses_in(node):
                self.uses[id(leaf)].add((segment, could_wait))
            for edge in node.next_functions:
                self._last_use[edge] = max(segment, self._last_use.get(edge, 0))

    def spans(self, edges: Iterable[Edge]) -> list[tuple[int, int]]:
        """Return where each is made and the last segment with a use that the loss leads back to."""
        return [
            (self._segment_of(edge[0]), self._last_use[edge])
            for edge in edges
            if edge in self._last_use
        ]

    def _segment_of(self, node: Any) -> int:
        return bisect_right(self._starts, node._sequence_nr())  # private: see start_segment


def _nodes_behind(root: Any) -> Iterator[Any]:
    seen = {root}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
