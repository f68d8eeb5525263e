"""Products with a weight in the graph of a compiled region, and what makes their weight gradients.

The graph is dynamo's: calls of torch's functions and methods as the model has them, parameters
among its inputs. What is not found here gets its gradient in B, as the region computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_pipeoffload.runtime.compiled.weight_sources import WeightFinder, WeightSource
from lightning_pipeoffload.runtime.weight_grad.calls import (
    BatchedProduct,
    Convolution,
    DeferredCall,
    Linear,
    MatrixProduct,
)

Options = tuple[Any, ...]
Arguments = dict[str, Any]
Kind = tuple[type[DeferredCall], Options]


@dataclass(frozen=True)
class Signature:
    """The arguments of an operation.

    Attributes:
        order: Their names in order: "x", "weight" and "bias", others as torch has them.
        names: What torch calls x, weight and bias.
        kind: Says what makes the gradients of a call with these arguments, their values being the
            graph's examples; None: nothing here does.
    """

    order: tuple[str, ...]
    names: Mapping[str, str]
    kind: Callable[[Arguments], Kind | None]

    def arguments(self, node: fx.Node) -> Arguments:
        """Return a call's arguments by name."""
        ours = {name: own for own, name in self.names.items()}
        named = {ours.get(name, name): value for name, value in node.kwargs.items()}
        return {**dict(zip(self.order, node.args, strict=False)), **named}

    def put(self, node: fx.Node, name: str, value: fx.Node) -> None:
        """Replace an argument of a call."""
        if self.names.get(name, name) in node.kwargs:
            node.update_kwarg(self.names.get(name, name), value)
        else:
            node.update_arg(self.order.index(name), value)


@dataclass(frozen=True)
class FoundProduct:
    """A call whose weight gradient may wait.

    Attributes:
        node: The call in the graph.
        signature: The names of its arguments.
        weight: Where its weight comes from.
        bias: Where its bias comes from; None: it has none that trains.
        kind: What makes the gradients.
    """

    node: fx.Node
    signature: Signature
    weight: WeightSource
    bias: WeightSource | None
    kind: Kind

    @property
    def example(self) -> Tensor:
        """The result that dynamo has made up."""
        found: Tensor = self.node.meta["example_value"]
        return found


def find_product(node: fx.Node, finder: WeightFinder) -> FoundProduct | None:
    """Return a call whose weight gradient may wait; None: it is no such call."""
    signature = _signature_of(node)
    if signature is None or not _trains(node):
        return None
    found = signature.arguments(node)
    kind = signature.kind({name: _example(value) for name, value in found.items()})
    if kind is None:
        return None
    bias, dtype = found.get("bias"), node.meta["example_value"].dtype
    weight = finder.find(found["weight"], dtype)
    bias_source = finder.find(bias, dtype) if finder.is_trained(bias) else None
    if weight is None or finder.is_trained(bias) and bias_source is None:
        return None
    return FoundProduct(node, signature, weight, bias_source, kind)


def _signature_of(node: fx.Node) -> Signature | None:
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def _trains(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and example.requires_grad


def _example(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def _linear(arguments: Arguments) -> Kind | None:
    return (Linear, ()) if arguments["weight"].dim() == 2 else None


def _product(arguments: Arguments) -> Kind | None:
    x, weight = arguments["x"], arguments["weight"]
    if not isinstance(weight, Tensor) or x.dim() < 2:
        return None
    if weight.dim() == 2:
        return MatrixProduct, ()
    is_batched = x.dim() == weight.dim() == 3 and x.shape[0] == weight.shape[0]
    return (BatchedProduct, ()) if is_batched else None


def _addmm(arguments: Arguments) -> Kind | None:
    is_scaled = arguments.get("alpha", 1) != 1 or arguments.get("beta", 1) != 1
    return None if is_scaled or arguments["bias"].dim() != 1 else (MatrixProduct, ())


_NO_OPTIONS: Arguments = {
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "output_padding": 0,
    "groups": 1,
}


def _convolution(arguments: Arguments, transposed: bool = False) -> Kind | None:
    given = _NO_OPTIONS | arguments
    num_pixels = given["weight"].dim() - 2
    if isinstance(given["padding"], str) or given["x"].dim() != num_pixels + 2:
        return None

    def pixels(name: str) -> list[int]:
        sizes = [given[name]] if isinstance(given[name], int) else [*given[name]]
        return sizes * (num_pixels // len(sizes))

    before = pixels("stride"), pixels("padding"), pixels("dilation")
    return Convolution, (*before, transposed, pixels("output_padding"), given["groups"])


def _transposed_convolution(arguments: Arguments) -> Kind | None:
    return _convolution(arguments, transposed=True)


_INPUT = {"x": "input"}
_LINEAR = Signature(("x", "weight", "bias"), _INPUT, _linear)
_MATMUL = Signature(("x", "weight"), _INPUT | {"weight": "other"}, _product)
_MM = Signature(("x", "weight"), _INPUT | {"weight": "mat2"}, _product)
_ADDMM = Signature(
    ("bias", "x", "weight"), {"bias": "input", "x": "mat1", "weight": "mat2"}, _addmm
)
_CONVOLUTION = Signature(
    ("x", "weight", "bias", "stride", "padding", "dilation", "groups"), _INPUT, _convolution
)
_TRANSPOSED = Signature(
    ("x", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    _INPUT,
    _transposed_convolution,
)
_METHODS: Mapping[str, Signature] = {
    **dict.fromkeys(("matmul", "__matmul__"), _MATMUL),
    **dict.fromkeys(("mm", "bmm"), _MM),
    "addmm": _ADDMM,
}
_FUNCTIONS: Mapping[Any, Signature] = {
    # Private: where torch has the function of a linear layer.
    torch._C._nn.linear: _LINEAR,
    **dict.fromkeys((torch.matmul, operator.matmul), _MATMUL),
    **dict.fromkeys((torch.mm, torch.bmm), _MM),
    torch.addmm: _ADDMM,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _CONVOLUTION),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _TRANSPOSED
    ),
}
