"""Follows the values of a step that is run without values: where each is made, and where used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime.cut.backwards import BackwardReach, Edge, edge_of
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.crossings import CallCounter, Crossing, Port
from lightning_pipeoffload.runtime.cut.record import Alias, StepRecord, ValueLog
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.payload import BlockOutput
from lightning_pipeoffload.runtime.shapes.operations import written_arguments
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    memory_of,
    shape_only_leaves,
)
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line


@dataclass(eq=False)
class _Birth:
    """Where a tensor was made; see :class:`.crossings.Crossing`."""

    segment: int
    port: Port | None = None
    digest: int = 0
    trains_from: int | None = None

    @property
    def last_segment_before(self) -> int:
        is_output = self.port is not None and self.port.call == 0
        return self.segment - is_output


class ValueTrace(CallCounter):
    """Gives every shape-only tensor its birth and notes what crosses from segment to segment.

    What a block gets and returns is given another object inside of it, so that what hooks and
    attributes keep of it can be told from what the step itself has: where the block does not run,
    they keep nothing.
    """

    def __init__(self, chain: BlockChain, record: StepRecord, log: ValueLog | None = None) -> None:
        super().__init__()
        self._record = record
        self._log = log
        self._chain = chain
        self._block: int | None = None
        self._made: list[ShapeOnly] = []
        self._crossings: dict[Port | _Birth, Crossing] = {}
        self._reach = BackwardReach()
        self._edges: defaultdict[Port | _Birth, set[Edge]] = defaultdict(set)
        self._handed_on: list[list[Edge | None]] = []
        self._written: defaultdict[int, list[tuple[ShapeOnly, int]]] = defaultdict(list)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, look at its result and note its values."""
        segment = self.segment if self._block is None else None
        self._record.own_backwards.see(func, args, kwargs or {}, segment)
        if func is Tensor.register_hook:
            self._record.hook_line = calling_line()
        result = super().__torch_function__(func, types, args, kwargs)
        if self._log is not None and self._block is None:
            self._log.note(self.segment, func, (args, kwargs), result)
        return result

    def see(self, call: int, result: Any, args: tuple[Any, ...]) -> Any:
        """Give new tensors a port."""
        place = -1
        given = {id(leaf) for leaf in tree_iter(args)}
        for leaf in tree_iter(result):
            place += isinstance(leaf, Tensor)
            # A weight that w.to(x.device) gives back is a weight still.
            if isinstance(leaf, ShapeOnly) and (hasattr(leaf, "birth") or id(leaf) not in given):
                self._name(leaf, Port(self.segment, call, place))
        self._note_training((args, result))
        return result

    def observe(self, func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Note what one operation uses, makes and writes."""
        tensors = list(_shape_only_with_birth(args))
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        for tensor in tensors:
            self._use(tensor)
            if not is_view:
                self._check_memory(tensor)
        for leaf in shape_only_leaves(result):
            if not hasattr(leaf, "birth"):
                birth = _Birth(self.segment)
                _bear(leaf, birth, self._block, tensors[0].lineage if is_view and tensors else ())
                self._made.append(leaf)  # a custom function makes it require a gradient later
        for value in written_arguments(func, args):
            if isinstance(value, ShapeOnly) and hasattr(value, "birth"):
                self._written[memory_of(value)].append((value, self.segment))

    def enter_block(self, index: int, arguments: Any) -> Any:
        """Return the arguments as the block is to see them."""
        self._block = index

        def alias(leaf: Any) -> Any:
            if not isinstance(leaf, ShapeOnly) or not hasattr(leaf, "birth"):
                return leaf
            self._use(leaf)
            inner = _Alias.apply(leaf, None, None)
            inner.is_weight = getattr(leaf, "is_weight", False)
            _bear(inner, leaf.birth, index, leaf.lineage[1:])  # type: ignore[attr-defined]
            return inner

        with self.paused():
            return tree_map(alias, arguments)

    def leave_block(self, index: int, arguments: Any, output: Any) -> Any:
        """Return a block's output as the step is to see it; the next segment starts."""
        origin = f"the output of {self._chain.block_name(index)}"
        backwards = ref(self._record.own_backwards)
        place = -1

        def alias(leaf: Any) -> Any:
            nonlocal place
            if not isinstance(leaf, Tensor):
                return leaf
            place += 1
            # One that has a value may be part of the graph: what was written into it.
            has_no_graph = not isinstance(leaf, ShapeOnly) and leaf.grad_fn is None
            outer: Any = (
                ShapeOnly.like(leaf, origin)
                if has_no_graph
                else _Alias.apply(leaf, backwards, index)
            )
            outer.origins = frozenset((origin,))
            birth = _Birth(index + 1, Port(index + 1, 0, place))
            _bear(outer, birth, None, getattr(leaf, "lineage", ()))
            return outer

        with self.paused():
            self._note_training((arguments, self._made))
            self._made.clear()
            self._block = None
            output = tree_map(alias, output)
            self.start(index + 1)
            self._reach.start_segment()
            self._note_training(output)
            self._record.outputs.append(BlockOutput.of(output))
            self._handed_on.append([edge_of(leaf) for leaf in tensors_in(output)])
        return output

    def lead_back(self, loss: Tensor) -> BackwardReach:
        """Find what the loss leads back to."""
        self._use_result(loss)
        if loss.grad_fn is not None:
            self._reach.walk(loss)
        for key, crossing in self._crossings.items():
            crossing.led_back = self._reach.spans(self._edges[key])
        for index, edges in enumerate(self._handed_on):
            arrives = [edge is not None and bool(self._reach.spans([edge])) for edge in edges]
            self._record.outputs[index] = self._record.outputs[index].with_gradients(arrives)
        return self._reach

    def _use_result(self, loss: Tensor) -> None:
        for leaf in _shape_only_with_birth(loss):
            self._use(leaf)

    def _name(self, leaf: ShapeOnly, port: Port) -> None:
        if not hasattr(leaf, "birth"):
            _bear(leaf, _Birth(self.segment), self._block)
        if leaf.birth.port is None and leaf.birth.segment == self.segment:  # type: ignore[attr-defined]
            leaf.birth.port, leaf.birth.digest = port, self.digest  # type: ignore[attr-defined]

    def _note_training(self, tree: Any) -> None:
        for leaf in _shape_only_with_birth(tree):
            if leaf.birth.trains_from is None and leaf.requires_grad:
                leaf.birth.trains_from = self.segment

    def _use(self, tensor: Any) -> None:
        if tensor.block is not None and tensor.block < self.segment:
            self._record.opened.add(tensor.block)
        if tensor.birth.segment < self.segment:
            self._cross(tensor)

    def _cross(self, tensor: Any) -> None:
        birth = tensor.birth
        crossing = self._crossings.get(birth.port or birth)
        if crossing is None:
            crossing = self._crossings[birth.port or birth] = Crossing(
                birth.port, birth.segment, 0, tensor.shape, tensor.dtype,
                birth.trains_from, tensor.origins, calling_line(),
                birth.digest,
            )  # fmt: skip
            self._record.crossings.append(crossing)
        edge = edge_of(tensor)
        if edge is not None:
            self._edges[birth.port or birth].add(edge)
        crossing.used_in = self.segment
        crossing.trains_from = birth.trains_from

    def _check_memory(self, tensor: Any) -> None:
        for written, written_in in self._written.get(memory_of(tensor), ()):
            apart_from = _apart_from(tensor, written)
            if apart_from is not None and apart_from < written_in:
                alias = Alias(apart_from, written_in, tensor.origins, calling_line())
                self._record.aliases.append(alias)


class _Alias(torch.autograd.Function):
    """Another object for the same value; no view, whose use autograd would count as its base's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backwards: Any, block: int | None) -> ShapeOnly:
        ctx.backwards, ctx.block = backwards, block
        if not isinstance(tensor, ShapeOnly):
            return ShapeOnly.like(tensor, "")
        return ShapeOnly(tensor.meta, tensor.device, tensor.origins)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.backwards() if ctx.backwards is not None else None
        if found is not None:  # the probe starts none: it is the step's own
            found.cross(ctx.block)
        return *gradients, None, None


def _bear(tensor: Any, birth: _Birth, block: int | None, lineage: tuple[_Birth, ...] = ()) -> None:
    """Say where a tensor was made, and of what it is a view: of which that is one, and so on."""
    tensor.birth = birth
    tensor.block = block
    tensor.lineage = (birth, *lineage)


def _apart_from(left: Any, right: Any) -> int | None:
    """Return the first segment behind which a cut makes two memories of one; None: no cut does."""
    common = next((birth for birth in left.lineage if birth in right.lineage), None)
    lefts, rights = (_up_to(common, tensor.lineage) for tensor in (left, right))
    pairs = ((a, b) for a in lefts for b in rights if a is not b)
    return min((max(a.last_segment_before, b.last_segment_before) for a, b in pairs), default=None)


def _up_to(last: _Birth | None, lineage: tuple[_Birth, ...]) -> tuple[_Birth, ...]:
    return lineage if last is None else lineage[: lineage.index(last) + 1]


def _shape_only_with_birth(tree: Any) -> Iterator[Any]:
    return (
        leaf for leaf in tree_iter(tree) if isinstance(leaf, ShapeOnly) and hasattr(leaf, "birth")
    )
