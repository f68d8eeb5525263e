"""Follows the values of a traced step: where each is made and used, and whether it trains.

``requires_grad`` is not enough: a value that is used only after a ``detach()`` never gets a
gradient, and the ``grad`` of its weights stays None, so that an optimizer skips them. So the trace
walks the graph of the loss to find which values that cross a cut get a gradient back.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes  # private: its documented home

from lightning_pipeoffload.runtime import (
    BlockOutput,
    dense_stride,
    leaves_of,
    map_in_place,
    map_output,
    output_tensors,
)
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.call_checks import CallsError
from lightning_pipeoffload.runtime.cut.carried_values import CarriedValue, FunctionCounter, Port
from lightning_pipeoffload.runtime.cut.own_backwards import UserBackwards
from lightning_pipeoffload.runtime.cut.record import RecordedCall, StepRecord
from lightning_pipeoffload.runtime.shapes import (
    OF_SHARD,
    ShapeOnly,
    refuse_dtensor,
    shape_only_leaves,
    written_arguments,
)
from lightning_pipeoffload.runtime.users_code import in_brackets, running_user_line
from lightning_pipeoffload.runtime.weight_grad import uses_in

_Edge: TypeAlias = tuple[Any, int]  # an autograd node, and the place among its outputs


@dataclass(eq=False)
class _Source:
    """The call that made a tensor; fields as in :class:`.carried_values.CarriedValue`."""

    position: int
    num_calls: int  # of blocks before
    port: Port | None = None
    digest: int = 0
    trains_from: int | None = None
    is_output: bool = False  # passed to the next position

    @property
    def maker_position(self) -> int:
        return self.position - self.is_output


class ValueTrace(FunctionCounter):
    """Records which shape-only tensors are used in another segment than the one that made them.

    A block gets and returns aliases, other objects than the step has outside of it. So a value that
    escapes from a block by a hook or an attribute can be distinguished from the step's own values:
    it does not exist where the block does not run. A list or dict that is an argument has aliases
    during the call only: values that the block puts into it escape too.

    Args:
        chain: The blocks.
        record: The record to fill.
        before_function: Called with each function of torch before it runs, and its arguments.
        log: A list for the calls between the blocks and numbers of their results; None: no log.
    """

    def __init__(
        self,
        chain: BlockChain,
        record: StepRecord,
        before_function: Callable[[Any, tuple[Any, ...], dict[str, Any]], None],
        log: list[RecordedCall] | None = None,
    ) -> None:
        super().__init__()
        self._record = record
        self._before_function = before_function
        self._log = log
        self._chain, self._calls = chain, record.calls
        self._running: int | None = None  # the call of the block that runs
        self._lines: dict[int, str] = {}  # that call blocks, where some are called again
        self._new: list[ShapeOnly] = []
        self._inside: list[ref[ShapeOnly]] = []  # what blocks have got and made
        self._aliased: dict[int, tuple[Any, Any]] = {}  # a block's argument of each alias, by id
        self._carried_values: dict[Port | _Source, CarriedValue] = {}
        self._reach = LossGraph()
        self._reach.set_position(0)
        self._edges: defaultdict[Port | _Source, set[_Edge]] = defaultdict(set)
        self._output_edges: list[list[_Edge | None]] = []

    @property
    def position(self) -> int:
        """The position of the running block, or the least position of the code that runs."""
        return (
            self._calls.least_remaining_positions[self.num_calls]
            if self._running is None
            else self._running_block
        )

    @property
    def _running_block(self) -> int:
        assert self._running is not None
        return self._calls.blocks[self._running]

    @property
    def is_between_repeated_calls(self) -> bool:
        """Whether code between repeated calls of blocks runs: its operands decide its position."""
        return (
            self._running is None
            and not self._calls.is_sequential
            and self.position < len(self._chain)
        )

    def position_of_operation(self, tensors: Iterable[Any]) -> int:
        """Return the position of an operation on some tensors, at the present point of the step."""
        if not self.is_between_repeated_calls:
            return self.position
        return max(
            self.position, *(tensor.source.position for tensor in _leaves_with_source(tensors)), 0
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._before_function(func, args, kwargs or {})
        result = super().__torch_function__(func, types, args, kwargs)
        if self._log is not None and self._running is None:
            self._log_call(func, (args, kwargs), result)
        return result

    def _log_call(self, func: Callable[..., Any], arguments: Any, result: Any) -> None:
        name = getattr(func, "__name__", "")
        if self._log is not None and "empty" not in name:  # whose result is what was in memory
            inputs = [
                float(leaf) for leaf in leaves_of(arguments) if isinstance(leaf, (int, float))
            ]
            with _disable_current_modes():  # which would take these reads for the step's
                results = [number for leaf in leaves_of(result) for number in _checksums(leaf)]
            self._log.append(
                RecordedCall(self.position, name, inputs, results, running_user_line())
            )

    def replace_result(self, call: int, result: Any, args: tuple[Any, ...]) -> Any:
        """Assign a port to new tensors."""
        place = -1
        arg_ids = {id(leaf) for leaf in leaves_of(args)}
        for leaf in leaves_of(result):
            place += isinstance(leaf, Tensor)
            # w.to(x.device) may return the weight itself.
            if isinstance(leaf, ShapeOnly) and (hasattr(leaf, "source") or id(leaf) not in arg_ids):
                self._assign_port(leaf, Port(self.num_calls, call, place), args)
        self._set_trains_from((args, result))
        return result

    def sole_source_weights(self, tensor: Any) -> frozenset[str]:
        """Return the weights of a tensor computed only from weights since the last call of a block.

        Empty if it has any other operand, or was computed before.
        """
        weights: frozenset[str] = getattr(tensor, "weights", frozenset())
        return weights if weights and tensor.source.num_calls == self.num_calls else frozenset()

    def observe(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        result: Any,
        position: int,
        weights: frozenset[str] = frozenset(),
    ) -> None:
        """Record the tensors that an operation uses and makes.

        ``weights`` is not empty if all operands are weights, or were computed only from weights;
        then the operation has the position of the code that uses its result.
        """
        tensors = list(_leaves_with_source(args))
        if not (weights or self._calls.is_sequential):
            self._reach.assign_position(tensors)
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        for tensor in tensors if not weights else ():
            self.record_use(tensor, position)
        for leaf in shape_only_leaves(result):
            if weights:
                leaf.weights = weights  # type: ignore[attr-defined]
            if not hasattr(leaf, "source"):
                source = _Source(position, self.num_calls)
                _set_source(
                    leaf, source, self._running, tensors[0].lineage if is_view and tensors else ()
                )
                self._new.append(leaf)  # a custom function makes it require a gradient later
                if self._running is not None:
                    self._inside.append(ref(leaf))
        if self.is_between_repeated_calls:
            self._refuse_write_into_earlier(written_arguments(func, args), position)

    def _refuse_write_into_earlier(self, written: Iterable[Any], position: int) -> None:
        """Refuse a write that the stage of the written value cannot make."""
        if any(value.source.position < position for value in _leaves_with_source([*written])):
            raise CallsError(
                f"the step writes in place{in_brackets(running_user_line())} into what stages "
                f"before {self._chain.block_name(min(position, len(self._chain) - 1))} have, and "
                f"calls {self._chain.block_name(self.position)} again: compute a new tensor "
                f"instead (x = x + y for x += y)"
            )

    def enter_block(self, index: int, arguments: Any) -> Any:
        """Return aliases of the arguments, for the block."""
        self._running = self.num_calls
        self._reach.set_position(index)
        name = self._chain.block_name(index)
        if not self._calls.is_sequential:
            self._lines[index] = running_user_line()

        def alias(leaf: Any) -> Any:
            refuse_dtensor(leaf, name, "gets")
            if not isinstance(leaf, ShapeOnly) or not hasattr(leaf, "source"):
                return leaf
            if id(leaf) in self._aliased:  # in a list that is in the arguments twice
                return leaf
            if leaf.source.position <= index:  # else it may be in a list, and unused
                self.record_use(leaf, index)
            if not self._calls.is_sequential:
                self._reach.assign_position((leaf,))
            inner = _Alias.apply(leaf, None, None)
            inner.is_weight = getattr(leaf, "is_weight", False)
            _set_source(inner, leaf.source, self._running, leaf.lineage[1:])  # type: ignore[attr-defined]
            self._inside.append(ref(inner))
            self._aliased[id(inner)] = inner, leaf
            return inner

        with self.paused():
            return map_in_place(alias, arguments)

    def leave_block(self, index: int, arguments: Any, output: Any) -> Any:
        """Return aliases of a block's output, for the step, and count anew after it."""
        name = self._chain.block_name(index)
        origin = f"the output of {name}"
        backwards, following = ref(self._record.backwards), self.num_calls + 1
        position = self._calls.position_after(self.num_calls)
        place = -1

        def alias(leaf: Any) -> Any:
            nonlocal place
            if not isinstance(leaf, Tensor):
                return leaf
            refuse_dtensor(leaf, name, "returns")
            place += 1
            if hasattr(leaf, "source"):
                self.record_use(leaf, index)
            # A tensor with a value is in the graph if shapes were written into it.
            has_no_graph = not isinstance(leaf, ShapeOnly) and leaf.grad_fn is None
            outer: Any = (
                ShapeOnly.like(leaf, origin)
                if has_no_graph
                else _Alias.apply(leaf, backwards, index)
            )
            outer.origins = frozenset((origin,)) | (outer.origins & OF_SHARD)
            port = Port(following, 0, place)
            source = _Source(position, following, port, is_output=position > index)
            _set_source(outer, source, None, getattr(leaf, "lineage", ()))
            return outer

        with self.paused():
            self._set_trains_from((arguments, self._new))
            self._new.clear()
            self._running = None
            map_in_place(lambda leaf: self._aliased.get(id(leaf), (None, leaf))[1], arguments)
            self._aliased.clear()
            output = map_output(alias, output)
            self.start(following)
            self._reach.set_position(self.position)
            tensors = output_tensors(output)
            if not self._calls.is_sequential:  # the block itself passes what may be in a list too
                self._reach.assign_position(tensors, index)
            self._set_trains_from(tensors)
            self._record.outputs.append(BlockOutput.of(output))
            self._output_edges.append([_edge_of(leaf) for leaf in tensors])
        return output

    def trace_loss_graph(self, loss: Tensor) -> LossGraph:
        """Record the values that get a gradient from the loss."""
        for leaf in _leaves_with_source(loss):
            self.record_use(leaf, len(self._chain))
        if loss.grad_fn is not None:
            self._reach.walk(loss)
        for key, carried in self._carried_values.items():
            carried.set_gradient_spans(self._reach.gradient_spans(self._edges[key]))
        outputs = self._record.outputs
        for index, edges in enumerate(self._output_edges):
            arrives = [
                edge is not None and bool(self._reach.gradient_spans([edge])) for edge in edges
            ]
            outputs[index] = outputs[index].with_gradient_flags(arrives)
        return self._reach

    def blocks_with_escaped_tensors(self) -> set[int]:
        """Return the blocks whose tensors escaped to an attribute or hook, and were never used."""
        gc.collect()  # a circle in a block's frame holds its values too
        calls = {value.call for reference in self._inside if (value := reference()) is not None}  # type: ignore[attr-defined]
        return {self._calls.blocks[call] for call in calls} - self._record.opened

    def _assign_port(self, leaf: ShapeOnly, port: Port, args: tuple[Any, ...]) -> None:
        if not hasattr(leaf, "source"):
            _set_source(
                leaf, _Source(self.position_of_operation(args), self.num_calls), self._running
            )
        if leaf.source.port is None and leaf.source.num_calls == self.num_calls:  # type: ignore[attr-defined]
            leaf.source.port, leaf.source.digest = port, self.digest  # type: ignore[attr-defined]

    def _set_trains_from(self, tree: Any) -> None:
        for leaf in _leaves_with_source(tree):
            if leaf.source.trains_from is None and leaf.requires_grad:
                is_sequential = self._calls.is_sequential
                leaf.source.trains_from = self.num_calls if is_sequential else leaf.source.position

    def record_use(self, tensor: Any, position: int) -> None:
        """Record that code at ``position`` uses a tensor; it is carried if it was made before."""
        if hasattr(tensor, "weights"):
            is_new = bool(self.sole_source_weights(tensor))
            for name in tensor.weights:
                self._record.segments[name].add(position if is_new else tensor.source.position)
            if is_new:
                return
        if tensor.call is not None and tensor.call < self.num_calls:
            self._record.opened.add(self._calls.blocks[tensor.call])
        if tensor.source.position < position:
            self._record_carried_value(tensor, position)
        elif tensor.source.position > position:
            self._refuse_output_of_later_block(tensor)

    def _refuse_output_of_later_block(self, tensor: Any) -> NoReturn:
        called = [block for block in self._lines if block <= tensor.source.position]
        ends = [b for b in called if self._chain.output_origins(b) <= tensor.origins]
        later = max(ends or called)
        raise CallsError(
            f"the step calls {self._chain.block_name(self._running_block)} again"
            f"{in_brackets(running_user_line())} with what {self._chain.block_name(later)} has "
            f"computed{in_brackets(self._lines[later])}; in a pipeline a block can be called "
            f"again with what blocks before it, or the same one just before, have computed"
        )

    def _record_carried_value(self, tensor: Any, position: int) -> None:
        source = tensor.source
        key = source.port or source
        carried = self._carried_values.get(key)
        if carried is None:
            carried = self._carried_values[key] = CarriedValue(
                source.port, source.position, 0, tensor.shape, tensor.dtype,
                source.trains_from, tensor.origins, running_user_line(), source.digest,
                stride=dense_stride(tensor),
            )  # fmt: skip
            self._record.carried_values.append(carried)
        edge = _edge_of(tensor)
        if edge is not None:
            self._edges[key].add(edge)
        carried.record_use(position, source.trains_from)


class _Alias(torch.autograd.Function):
    """An alias of a value; a view would make uses of it count as uses of its base."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, backwards: ref[UserBackwards] | None, block: int | None
    ) -> ShapeOnly:
        ctx.backwards, ctx.block = backwards, block
        if not isinstance(tensor, ShapeOnly):
            return ShapeOnly.like(tensor, "")
        return ShapeOnly(tensor.meta, tensor.device, tensor.origins)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        backwards = ctx.backwards() if ctx.backwards is not None else None
        if backwards is not None:
            backwards.record_reached(ctx.block)
        return *gradients, None, None


def _set_source(
    tensor: Any, source: _Source, call: int | None, lineage: tuple[_Source, ...] = ()
) -> None:
    """Set the source of a tensor, and its lineage: the sources of its bases, nearest first."""
    tensor.source = source
    tensor.call = call
    tensor.lineage = (source, *lineage)


def _leaves_with_source(tree: Any) -> Iterator[Any]:
    return (
        leaf for leaf in leaves_of(tree) if isinstance(leaf, ShapeOnly) and hasattr(leaf, "source")
    )


_MOST_ELEMENTS = 4096


@torch.no_grad()
def _checksums(leaf: Any) -> Iterable[float]:
    """Return a few numbers of a value for comparison; shape-only tensors have none."""
    if isinstance(leaf, (int, float)):
        return [float(leaf)]
    if not isinstance(leaf, Tensor) or isinstance(leaf, (ShapeOnly, DTensor)) or leaf.is_meta:
        return []
    if torch._C._are_functorch_transforms_active():  # private: vmap reads no value
        return []
    if leaf.layout is not torch.strided or leaf.is_quantized or not leaf.numel():
        return []
    flat = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    sample = flat.detach().reshape(-1)
    sample = sample[:: max(1, len(sample) // _MOST_ELEMENTS)].double()
    places = torch.arange(len(sample), dtype=sample.dtype, device=sample.device)
    return sample.sum().item(), (sample @ places).item()


# The backward graph of the loss


class LossGraph:
    """The autograd graph of the loss.

    Attributes:
        leaves: The leaves of the graph, which get a gradient.
        uses: By id of a leaf, pairs of a position that uses it and whether this part of its
            gradient could be deferred to W.
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.uses: defaultdict[int, set[tuple[int, bool]]] = defaultdict(set)
        self._starts: list[int] = []
        self._positions: list[int] = []
        self._assigned: dict[Any, int] = {}  # by node
        self._last_use: dict[_Edge, int] = {}

    def set_position(self, position: int) -> None:
        """Assign a position to the nodes that are made from now on."""
        # Private: the only record of the order in which nodes were made.
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._positions.append(position)

    def assign_position(self, tensors: Iterable[Any], position: int | None = None) -> None:
        """Assign a position, by default those of the tensors, to the nodes that have made them."""
        for tensor in tensors:
            if tensor.grad_fn is not None:
                of_tensor = tensor.source.position if position is None else position
                self._assigned.setdefault(tensor.grad_fn, of_tensor)

    def walk(self, loss: Tensor) -> None:
        """Follow the graph from the loss through all positions."""
        self._last_use[loss.grad_fn, loss.output_nr] = self._positions[-1]
        for node in _nodes_of_graph(loss.grad_fn):
            if hasattr(node, "variable"):
                self.leaves.append(node.variable)
            position = self._position_of(node)
            for leaf, could_wait in uses_in(node):
                self.uses[id(leaf)].add((position, could_wait))
            for edge in node.next_functions:
                self._last_use[edge] = max(position, self._last_use.get(edge, 0))

    def gradient_spans(self, edges: Iterable[_Edge]) -> list[tuple[int, int]]:
        """Return, for each edge in the graph, the positions of its creation and of its last use."""
        return [
            (self._position_of(edge[0]), self._last_use[edge])
            for edge in edges
            if edge in self._last_use
        ]

    def _position_of(self, node: Any) -> int:
        begun = bisect_right(self._starts, node._sequence_nr())  # private: see begin
        return self._assigned.get(node, self._positions[max(begun - 1, 0)])


def _edge_of(tensor: Tensor) -> _Edge | None:
    return (tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else None


def _nodes_of_graph(root: Any) -> Iterator[Any]:
    seen = {root}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
