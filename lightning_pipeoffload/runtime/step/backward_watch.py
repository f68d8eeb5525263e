"""Watches what the user's code in a backward reads and writes beside its arguments.

Hooks on tensors, modules and parameters and the backwards of autograd functions find on one device
what their own forward has left, and leave something for the next one. Here forwards of other
microbatches come in between, and other stages do their part elsewhere::

    one device    F0 B0        F1 B1        F2 B2
    a stage       F0 F1 F2     B0           F3 B1

So each microbatch's first backward is watched, and so are forwards behind it that could read what
hooks have left. What would differ is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.step.checkpoint_replay import CheckpointWatch
from lightning_pipeoffload.runtime.step.stage_pass import StageContext
from lightning_pipeoffload.runtime.users_code.attribute_uses import AttributeUses, Uses, look_at
from lightning_pipeoffload.runtime.users_code.look import is_same_look
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets
from lightning_pipeoffload.runtime.users_code.written_state import (
    Kept,
    Variable,
    noting_assignments,
    written_namespaces,
)
from lightning_pipeoffload.runtime.weight_grad.queue import has_hooks
from lightning_pipeoffload.schedule.actions import Kind

_NUM_FORWARDS = 2  # of a microbatch that are watched
_NUM_BACKWARDS = 8  # of a stage that are watched: hooks do the same in each
_BETWEEN = "other microbatches' forwards come between a forward and its backward"


class BackwardWatch:
    """Watches the backwards of one stage.

    Args:
        context: The stage.
    """

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._module = context.writes.module
        blocks = [context.chain.blocks[index] for index in context.stage.blocks]
        self._in_blocks = {part for block in blocks for part in block.modules()}
        self._left: dict[tuple[Any, str], tuple[Variable, str]] = {}
        self._overlaps = False
        self._is_cut = context.num_stages > 1
        self._watched: dict[Kind, set[int]] = {Kind.B: set(), Kind.W: set()}  # microbatches
        self._num_forwards: Counter[int] = Counter()

    def keep(self, microbatch: int) -> Kept | None:
        """Keep what a forward has left of what steps write, if its backward will be watched."""
        is_watched = self._is_new(Kind.B, microbatch)
        return self._context.writes.state.keep() if is_watched else None

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Watch an F, which may read what backwards have left; the first step's and the next's.

        Args:
            microbatch: The number of the microbatch.
        """
        self._num_forwards[microbatch] = count = self._num_forwards[microbatch] + 1
        is_watched = count <= _NUM_FORWARDS and self._left and self._overlaps
        return self._watching_forward() if is_watched else nullcontext()

    def take_back(self, microbatches: Iterable[int]) -> None:
        """Forget the last F of some microbatches, which runs again."""
        self._num_forwards.subtract(microbatches)

    def backward(
        self, microbatch: int, left: Kept | None, num_alive: int
    ) -> AbstractContextManager[None]:
        """Watch a B.

        Args:
            microbatch: The number of the microbatch.
            left: What its forward has left.
            num_alive: How many microbatches the stage has run but not their backwards.
        """
        self._overlaps |= num_alive > 1
        return self._first(Kind.B, microbatch, left)

    def weight(self, microbatch: int, left: Kept | None) -> AbstractContextManager[None]:
        """Watch a W.

        Args:
            microbatch: The number of the microbatch.
            left: What its forward has left.
        """
        return self._first(Kind.W, microbatch, left)

    def watches_weight(self, microbatch: int) -> bool:
        """Whether a W is one of those that are watched."""
        return self._is_new(Kind.W, microbatch)

    def _first(
        self, kind: Kind, microbatch: int, left: Kept | None
    ) -> AbstractContextManager[None]:
        if not self._is_new(kind, microbatch):
            return nullcontext()
        self._watched[kind].add(microbatch)
        return self._watching(left)

    def _is_new(self, kind: Kind, microbatch: int) -> bool:
        watched = self._watched[kind]
        return self._is_cut and len(watched) < _NUM_BACKWARDS and microbatch not in watched

    @contextmanager
    def _watching(self, left: Kept | None) -> Iterator[None]:
        changed = left.changed() if left else []
        uses = _BackwardUses(
            self._module, self._context.chain.blocks, self._context.writes.state.variables
        )
        weights = self._hooked_weights()
        with _noting_writes(self._module) as written, uses.watching():
            yield
        self._refuse_reads(uses.found.values(), changed)
        self._refuse_weights(weights)
        for variable, line in written:
            self._take_in(variable, line)

    @contextmanager
    def _watching_forward(self) -> Iterator[None]:
        variables = [variable for variable, _ in self._left.values()]
        uses = AttributeUses(self._module, self._context.chain.blocks, variables)
        with uses.watching():
            yield
        lines = {variable.label: line for variable, line in self._left.values()}
        for use in uses.found.values():
            for read in use.reads:
                raise ValueError(
                    f"{use.label} is written in the backward{in_brackets(lines[use.label])} and "
                    f"read in a later forward{in_brackets(read.line)}, but {_BETWEEN}, so it would "
                    f"be an older one; update it between batches, in on_train_batch_end() say"
                )

    def _refuse_reads(self, found: Iterable[Uses], changed: list[str]) -> None:
        for use in found:
            if use.reads and (not self._context.is_last or use.label in changed):
                raise ValueError(
                    f"{use.label} is written by the step and read in the backward"
                    f"{in_brackets(use.reads[0].line)}, but {_BETWEEN}, and what later stages "
                    f"write is not here, so it would be another one; give what the backward needs "
                    f"to an autograd function's ctx, or bind it when the hook is made"
                )

    def _hooked_weights(self) -> list[tuple[str, Tensor, Tensor]]:
        local = self._context.ownership.local_tensors().items()
        return [(n, p, p.detach().clone()) for n, p in local if _has_hooks(p)]

    def _refuse_weights(self, weights: list[tuple[str, Tensor, Tensor]]) -> None:
        for name, weight, before in weights:
            if not torch.equal(weight.detach(), before):
                raise ValueError(
                    f"a hook on {name} writes the weight itself in the backward, but other "
                    f"microbatches' forwards have run with the old one and others have not; let "
                    f"the optimizer do it, or on_before_optimizer_step()"
                )

    def _take_in(self, variable: Variable, line: str) -> None:
        """Remember what a backward has written in its own blocks; refuse what is not there."""
        owner = variable.namespace.owner
        if owner not in self._in_blocks and not self._context.is_last:
            raise ValueError(
                f"{variable.label} is written in the backward{in_brackets(line)}, on stage "
                f"{self._context.stage.index}, and other stages would not see it; write an "
                f"attribute of the block whose backward it is, or log from a hook like "
                f"on_after_backward(), where gradients are whole"
            )
        self._left.setdefault((variable.namespace.key, variable.name), (variable, line))


class _BackwardUses(AttributeUses):
    """Sees reads, but for those of what a checkpoint runs again, which finds what F saw."""

    def _note_read(self, uses: Uses, name: str, frame: FrameType, value: Any) -> None:
        if IN_FORCE.latest(CheckpointWatch) is None:
            super()._note_read(uses, name, frame, value)


def _has_hooks(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and has_hooks(tensor)


@contextmanager
def _noting_writes(module: nn.Module) -> Iterator[list[tuple[Variable, str]]]:
    """Note what is written inside, with the line that assigns it; filled at the end."""
    before = {
        (namespace.key, name): (namespace, look_at(value))
        for namespace in written_namespaces(module)
        for name, value in namespace.variables().items()
    }
    written: list[tuple[Variable, str]] = []
    with noting_assignments() as lines:
        yield written
    for namespace in written_namespaces(module):
        for name, value in namespace.variables().items():
            _, look = before.get((namespace.key, name), (namespace, []))
            if not is_same_look(look, look_at(value)):
                line = lines.get((id(namespace.owner), name), "")
                written.append((Variable(namespace, name), line))
