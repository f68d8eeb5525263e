"""The graph of a compiled region, rewritten so that its backward computes no weight gradients.

If a zero is added to a product's result, both have the same gradient. So the rewrite detaches the
weight of each product whose weight gradient may wait for W, and adds a zero, a new input of the
graph, to its result; the product's input becomes an output of the graph. The backward of the region
then returns the input's gradient and, as the gradients of the zeros, those of the products'
results::

    before   y = linear(x, weight, bias)                        return y
    after    y = linear(x, detached weight, detached bias) + 0  return y, x

All are ordinary inputs and outputs, whose memory no compiler reuses while they are referenced.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode  # private: the fake tensors of this compilation

from lightning_pipeoffload.runtime.compiled.products import (
    DeferrableProduct,
    WeightFinder,
    WeightSource,
    match_deferrable_product,
)

_IN_PLACE = {
    operator.setitem,
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul,
}  # fmt: skip


def writes_in_place(graph: fx.Graph) -> bool:
    """Return whether any call in a graph may write one of its arguments."""
    return any(_writes(node) for node in graph.nodes)


def _writes(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return _is_in_place(str(target))
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if getattr(target, "__module__", None) == operator.or_.__module__:  # or_ and others write none
        return target in _IN_PLACE
    named = _is_in_place(getattr(target, "__name__", ""))
    return named or node.kwargs.get("out") is not None or _has_inplace_argument(node)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") or name == "__setitem__"


def _has_inplace_argument(node: fx.Node) -> bool:
    target: Any = node.target
    if not inspect.isfunction(target):
        return bool(node.kwargs.get("inplace"))
    parameters = inspect.signature(target).parameters
    if "inplace" not in parameters:
        return False
    index = [*parameters].index("inplace")
    return bool(node.kwargs.get("inplace") or node.args[index : index + 1] == (True,))


Shape = Callable[[Sequence[Any]], tuple[int, ...]]
"""Computes the shape of a result from a region's inputs."""


def _size_readers(placeholders: Sequence[fx.Node]) -> dict[Any, Callable[[Sequence[Any]], int]]:
    """Return, for each symbolic size, a function that reads it from a region's inputs."""
    readers: dict[Any, Callable[[Sequence[Any]], int]] = {}
    for index, node in enumerate(placeholders):
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            readers.setdefault(_expression(example), partial(_size_at, index, None))
        elif isinstance(example, Tensor):
            for dim, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt):
                    readers.setdefault(_expression(size), partial(_size_at, index, dim))
    return readers


def _size_at(index: int, dim: int | None, inputs: Sequence[Any]) -> int:
    return int(inputs[index] if dim is None else inputs[index].shape[dim])


def _expression(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _make_shape_function(
    example: Tensor, readers: Mapping[Any, Callable[[Sequence[Any]], int]]
) -> Shape | None:
    """Return a function that computes a result's shape from a region's inputs; None if none can."""
    sizes = [_expression(size) for size in example.shape]
    symbols = [*{s for size in sizes if not isinstance(size, int) for s in size.free_symbols}]
    if not readers.keys() >= {*symbols}:
        return None
    readers_of_symbols = [readers[symbol] for symbol in symbols]

    @lru_cache(256)
    def compute(*values: int) -> tuple[int, ...]:
        substitutions = dict(zip(symbols, values, strict=True))
        return tuple(s if isinstance(s, int) else int(s.xreplace(substitutions)) for s in sizes)

    return lambda inputs: compute(*(read(inputs) for read in readers_of_symbols))


@dataclass(frozen=True)
class ProductInput:
    """The source of a product's input: the region's "input" or "output" number ``index``."""

    place: str
    index: int


@dataclass(frozen=True)
class SplitProduct:
    """A product in the rewritten graph, its original, and the shape of its result."""

    original: DeferrableProduct
    product_input: ProductInput
    shape: Shape


@dataclass
class SplitGraph:
    """A rewritten graph.

    Attributes:
        examples: Example inputs, for a compiler.
        kept: The indices of the region's inputs that the graph still takes; the weights and then
            the zeros follow them.
        num_outputs: The number of the region's outputs; the products' inputs follow them.
        sources: The sources of the weights.
    """

    module: fx.GraphModule
    examples: list[Any]
    kept: list[int]
    num_outputs: int
    sources: list[WeightSource]
    products: list[SplitProduct]


def split_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> SplitGraph | None:
    """Return a rewritten copy of dynamo's graph; None if no weight gradient in it may wait."""
    splitting = _Splitting(module, inputs)
    splitting.rewire_deferrable_products()
    return splitting.finish() if splitting.products else None


class _Splitting:
    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._module = module
        self._inputs = inputs
        # A compiler makes new symbols for the sizes of tensors outside of dynamo's fake mode.
        self._mode = detect_fake_mode(inputs)
        self._graph = fx.Graph()
        outputs: Any = self._graph.graph_copy(module.graph, {})
        self._outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        self._num_outputs = len(self._outputs)
        self._placeholders = self._graph.find_nodes(op="placeholder")
        self._copies = writes_in_place(self._graph)
        self._product_inputs: dict[tuple[fx.Node, torch.dtype], ProductInput] = {}
        self._weights: dict[WeightSource, fx.Node] = {}
        self._zeros: list[Tensor] = []
        self.products: list[SplitProduct] = []

    def rewire_deferrable_products(self) -> None:
        finder = WeightFinder(self._placeholders, self._inputs)
        candidates = [match_deferrable_product(node, finder) for node in self._graph.nodes]
        readers = _size_readers(self._placeholders)
        shaped = [
            (product, _make_shape_function(product.example, readers))
            for product in candidates
            if product
        ]
        products = [(product, shape) for product, shape in shaped if shape is not None]
        self._add_weights([product for product, _ in products])
        for product, shape in products:
            self._replace(product, shape)

    def _add_weights(self, products: Sequence[DeferrableProduct]) -> None:
        for product in products:
            for source in (product.weight, product.bias):
                if source is not None and source not in self._weights:
                    self._weights[source] = self._add_input(f"deferred_{len(self._weights)}")

    def _replace(self, product: DeferrableProduct, shape: Shape) -> None:
        node, example = product.node, product.example
        arguments = product.signature.arguments(node)
        with self._graph.inserting_before(node):
            x = self._in_dtype(arguments["x"], example.dtype)
            product_input = self._product_input(arguments["x"], x, example.dtype)
        product.signature.set_argument(node, "x", x)
        for name, source in (("weight", product.weight), ("bias", product.bias)):
            if source is not None:
                product.signature.set_argument(node, name, self._weights[source])
                _erase_unread(self._graph, arguments[name])
        self._add_zero(node, example)
        self.products.append(SplitProduct(product, product_input, shape))

    def _add_zero(self, node: fx.Node, example: Tensor) -> None:
        zero = self._add_input(f"zero_{len(self._zeros)}")
        self._zeros.append(self._example_of_zero(example))
        with self._graph.inserting_after(node):
            total = self._graph.call_function(torch.add, (node, zero))
        total.meta["example_value"] = example
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
        self._outputs = [total if output is node else output for output in self._outputs]

    def _example_of_zero(self, result: Tensor) -> Tensor:
        with self._mode or nullcontext():
            zero = torch.zeros((), dtype=result.dtype, device=result.device)
            return zero.expand(result.shape).detach().requires_grad_()

    def _example_of_weight(self, weight: Tensor) -> Tensor:
        if self._mode is None:
            return weight.detach()
        return self._mode.from_tensor(weight.detach(), static_shapes=True)

    def _add_input(self, name: str) -> fx.Node:
        with self._graph.inserting_after(self._graph.find_nodes(op="placeholder")[-1]):
            return self._graph.placeholder(name)

    def _in_dtype(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        if x.meta["example_value"].dtype == dtype:
            return x
        return self._graph.call_method("to", (x, dtype))

    def _product_input(self, before: fx.Node, x: fx.Node, dtype: torch.dtype) -> ProductInput:
        if self._copies:
            return self._add_output(self._graph.call_method("clone", (self._detach(x),)))
        if (before, dtype) not in self._product_inputs:
            if x in self._placeholders:
                product_input = ProductInput("input", self._placeholders.index(x))
            elif x in self._outputs[: self._num_outputs]:
                product_input = ProductInput("output", self._outputs.index(x))
            else:
                product_input = self._add_output(self._detach(x))
            self._product_inputs[before, dtype] = product_input
        return self._product_inputs[before, dtype]

    def _detach(self, x: fx.Node) -> fx.Node:
        return self._graph.call_method("detach", (x,))

    def _add_output(self, x: fx.Node) -> ProductInput:
        self._outputs.append(x)
        return ProductInput("output", len(self._outputs) - 1)

    def finish(self) -> SplitGraph:
        self._graph.output(tuple(self._outputs))
        kept = [
            index for index in range(len(self._placeholders)) if not self._erase_if_replaced(index)
        ]
        self._graph.lint()
        examples = [self._inputs[index] for index in kept]
        examples += [self._example_of_weight(s.compute_weight(self._inputs)) for s in self._weights]
        return SplitGraph(
            fx.GraphModule(self._module, self._graph),
            [*examples, *self._zeros],
            kept,
            self._num_outputs,
            [*self._weights],
            self.products,
        )

    def _erase_if_replaced(self, index: int) -> bool:
        node = self._placeholders[index]
        if node.users or all(source.index != index for source in self._weights):
            return False
        self._graph.erase_node(node)
        return True


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    while not node.users and node.op != "placeholder":
        (before,) = node.all_input_nodes
        graph.erase_node(node)
        node = before
