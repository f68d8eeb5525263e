"""Where the backwards of a step lead: those of the loss, of the step's own, and through hooks.

A value that is used behind a ``detach()`` only requires a gradient and never gets one, so the
weights that it is computed from keep None, by which an optimizer leaves them alone. A backward that
the step starts itself would end at the cut, at what the stage before has sent, and say nothing::

    stage 0   embedding, block 0 |
    stage 1                      | block 1, loss, torch.autograd.grad(loss, x)
                                 ^ ends here: x is where the graph does not reach

A module's backward hook gets the gradients of what the module returns and of what it is given, at
once. Where a cut goes through the module no stage has both, and torch would leave the hook out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs

from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line
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


_ELSEWHERE = -1


@dataclass(frozen=True)
class StartedBackward:
    """A backward that begins between the blocks.

    Attributes:
        segment: The segment that starts it.
        goals: The segments that made what it leads to; -1 for weights and the batch.
        line: The line of the user's code.
    """

    segment: int
    goals: frozenset[int]
    line: str


@dataclass
class OwnBackwards:
    """What a step differentiates by itself.

    Attributes:
        any: Whether it does so at all, inside a block or not.
        crossed: The blocks into whose output such a backward leads back.
        started: The backwards that begin between the blocks.
    """

    any: bool = False
    crossed: set[int] = field(default_factory=set)
    started: list[StartedBackward] = field(default_factory=list)

    def see(self, func: Callable[..., Any], args: Any, kwargs: Any, segment: int | None) -> None:
        """Note the call of a torch function, if it starts a backward from the model's values.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its arguments by name.
            segment: The segment that calls it; None: a block does.
        """
        if func not in (torch.autograd.grad, Tensor.backward):
            return
        outputs, *rest = args or (kwargs["outputs"],)
        if not any(isinstance(leaf, ShapeOnly) for leaf in tensors_in(outputs)):
            return
        self.any = True
        if segment is not None:
            is_given = bool(rest) and func is torch.autograd.grad
            inputs = rest[0] if is_given else kwargs.get("inputs")
            goals = {_segment_of(leaf) for leaf in tensors_in(inputs)} or {_ELSEWHERE}
            self.started.append(StartedBackward(segment, frozenset(goals), calling_line()))

    def cross(self, block: int) -> None:
        """Note that one leads back into a block."""
        self.any = True
        self.crossed.add(block)


def _segment_of(leaf: Tensor) -> int:
    birth = getattr(leaf, "birth", None)
    return _ELSEWHERE if birth is None else birth.segment


class HookedSpan(NamedTuple):
    """A call of a module with backward hooks, and the segments that call it and return from it."""

    name: str
    first: int
    last: int


@contextmanager
def finding_hooked_spans(
    module: nn.Module, find_segment: Callable[[], int], found: list[HookedSpan]
) -> Iterator[None]:
    """Note calls of modules with backward hooks that span segments and are given gradients."""
    is_any = bool(torchs._global_backward_hooks)  # private, as is _backward_hooks
    parts = module.named_modules()
    names = {part: name for name, part in parts if is_any or part._backward_hooks}
    begun: list[tuple[nn.Module, int]] = []

    def enter(part: nn.Module, args: tuple[Any, ...]) -> None:
        trains = any(isinstance(value, Tensor) and value.requires_grad for value in args)
        if part in names and trains:
            begun.append((part, find_segment()))

    def leave(part: nn.Module, args: Any, output: Any) -> None:
        if begun and begun[-1][0] is part:
            first, last = begun.pop()[1], find_segment()
            if first < last:
                found.append(HookedSpan(names[part] or "the module", first, last))

    if not names:
        yield
        return
    before = torchs.register_module_forward_pre_hook(enter)
    with before, torchs.register_module_forward_hook(leave):
        yield
