"""Finds products with a weight in the graph of a compiled region, and their parameters.

The graph is dynamo's: it contains the model's calls of torch's functions and methods, and has
parameters among its inputs. The region's backward computes the gradients of other weights, in B.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS
from lightning_pipeoffload.runtime.weight_grad import (
    BatchedProduct,
    Convolution,
    DeferredCall,
    Linear,
    MatrixProduct,
    is_deferrable,
)

_VIEW_METHODS = {"t", "transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "to"}
_VIEW_FUNCTIONS = {torch.t, torch.transpose, torch.permute, operator.getitem, getattr}
_VIEW_ATTRIBUTES = {"T", "mT"}
_LONGEST_VIEW = 8


class SharedCasts:
    """The casts of one step's weights."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}

    def cast_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = id(weight), dtype
        cast = self._casts.get(key)
        if cast is None or cast[1] != weight._version:  # private: a step may write its weights
            cast = self._casts[key] = weight, weight._version, weight.to(dtype)
        return cast[2]


@contextmanager
def sharing_compiled_casts() -> Iterator[None]:
    """Share the casts of weights between the microbatches within the context."""
    with ACTIVE_SETTINGS.during(SharedCasts()):
        yield


@dataclass(frozen=True)
class WeightSource:
    """A weight that the region makes of its input ``index``, a parameter, by a cast and views.

    It is computed outside of the region instead. ``dtype`` is autocast's; None: there is no cast.
    """

    index: int
    views: tuple[Callable[[Any], Any], ...] = ()
    dtype: torch.dtype | None = None

    def compute_weight(self, inputs: Sequence[Any]) -> Tensor:
        """Compute the weight from the region's inputs, in autograd's graph."""
        weight: Tensor = inputs[self.index]
        if self.dtype is not None:
            casts = ACTIVE_SETTINGS.latest(SharedCasts)
            weight = weight.to(self.dtype) if casts is None else casts.cast_of(weight, self.dtype)
        for view in self.views:
            weight = view(weight)
        return weight


class WeightFinder:
    """Finds the sources of weights in a graph; ``placeholders`` are the nodes of its inputs."""

    def __init__(self, placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> None:
        self._inputs = inputs
        self._indices = {node: index for index, node in enumerate(placeholders)}

    def find(self, node: Any, dtype: torch.dtype) -> WeightSource | None:
        """Return the source of ``node``; None if it is no view or cast of a deferred weight."""
        views: list[Callable[[Any], Any]] = []
        while isinstance(node, fx.Node) and len(views) <= _LONGEST_VIEW:
            if node in self._indices:
                return self._of_input(self._indices[node], tuple(reversed(views)), dtype)
            view = _view_function(node)
            if view is None:
                return None
            views.append(view)
            node = node.args[0]
        return None

    def _of_input(
        self, index: int, views: tuple[Callable[[Any], Any], ...], dtype: torch.dtype
    ) -> WeightSource | None:
        parameter = self._inputs[index]
        if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
            return None
        if not is_deferrable(parameter):
            return None
        casts = parameter.dtype != dtype and not any(map(_is_cast, views))
        return WeightSource(index, views, dtype if casts else None)


def _view_function(node: fx.Node) -> partial[Any] | None:
    """Return the view or cast that a node applies to its first argument, as a function."""
    rest = node.args[1:]
    others: list[fx.Node] = []
    fx.map_arg((rest, node.kwargs), others.append)
    is_method = node.op == "call_method" and node.target in _VIEW_METHODS
    is_function = node.op == "call_function" and node.target in _VIEW_FUNCTIONS
    if others or not is_method and not is_function:
        return None
    if node.target is getattr and rest[0] not in _VIEW_ATTRIBUTES:
        return None
    return partial(_apply, node.target, rest, node.kwargs)


def _apply(target: Any, rest: Any, kwargs: Any, tensor: Any) -> Any:
    if isinstance(target, str):
        return getattr(tensor, target)(*rest, **kwargs)
    return target(tensor, *rest, **kwargs)


def _is_cast(view: Callable[[Any], Any]) -> bool:
    return isinstance(view, partial) and view.args[0] == "to"


Options = tuple[Any, ...]
Arguments = dict[str, Any]
Kind = tuple[type[DeferredCall], Options]


@dataclass(frozen=True)
class Signature:
    """The arguments of an operation.

    Attributes:
        order: The arguments' names in order: "x", "weight" and "bias", others as in torch.
        names: Torch's names of x, weight and bias.
        kind: Returns the class and options that compute the gradients of a call, from the example
            values of its arguments; None if none can.
    """

    order: tuple[str, ...]
    names: Mapping[str, str]
    kind: Callable[[Arguments], Kind | None]

    def arguments(self, node: fx.Node) -> Arguments:
        ours = {name: torchs for torchs, name in self.names.items()}
        named = {ours.get(name, name): value for name, value in node.kwargs.items()}
        return {**dict(zip(self.order, node.args, strict=False)), **named}

    def set_argument(self, node: fx.Node, name: str, value: fx.Node) -> None:
        if self.names.get(name, name) in node.kwargs:
            node.update_kwarg(self.names.get(name, name), value)
        else:
            node.update_arg(self.order.index(name), value)


@dataclass(frozen=True)
class DeferrableProduct:
    """A call whose weight gradient may wait for W; ``bias`` is None without a trained bias."""

    node: fx.Node
    signature: Signature
    weight: WeightSource
    bias: WeightSource | None
    kind: Kind

    @property
    def example(self) -> Tensor:
        """Dynamo's fake result, which has the shape, dtype and device."""
        example: Tensor = self.node.meta["example_value"]
        return example


def match_deferrable_product(node: fx.Node, finder: WeightFinder) -> DeferrableProduct | None:
    """Return the node's call if its weight gradient may wait for W, else None."""
    signature = None
    if node.op == "call_function":
        signature = _FUNCTIONS.get(node.target)
    elif node.op == "call_method":
        signature = _METHODS.get(str(node.target))
    if signature is None or not _trains(node):
        return None
    arguments = signature.arguments(node)
    kind = signature.kind({name: _example(value) for name, value in arguments.items()})
    if kind is None:
        return None
    bias, dtype = arguments.get("bias"), node.meta["example_value"].dtype
    weight = finder.find(arguments["weight"], dtype)
    bias_source = finder.find(bias, dtype) if _trains(bias) else None
    if weight is None or _trains(bias) and bias_source is None:
        return None
    return DeferrableProduct(node, signature, weight, bias_source, kind)


def _trains(value: Any) -> bool:
    example = _example(value) if isinstance(value, fx.Node) else None
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
    options = _NO_OPTIONS | arguments
    num_pixels = options["weight"].dim() - 2
    if isinstance(options["padding"], str) or options["x"].dim() != num_pixels + 2:
        return None

    def pixels(name: str) -> list[int]:
        sizes = [options[name]] if isinstance(options[name], int) else [*options[name]]
        return sizes * (num_pixels // len(sizes))

    before = pixels("stride"), pixels("padding"), pixels("dilation")
    return Convolution, (*before, transposed, pixels("output_padding"), options["groups"])


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
    partial(_convolution, transposed=True),
)
_METHODS: Mapping[str, Signature] = {
    **dict.fromkeys(("matmul", "__matmul__"), _MATMUL),
    **dict.fromkeys(("mm", "bmm"), _MM),
    "addmm": _ADDMM,
}
_FUNCTIONS: Mapping[Any, Signature] = {
    # Private: torch's function of a linear layer.
    torch._C._nn.linear: _LINEAR,
    **dict.fromkeys((torch.matmul, operator.matmul), _MATMUL),
    **dict.fromkeys((torch.mm, torch.bmm), _MM),
    torch.addmm: _ADDMM,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _CONVOLUTION),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _TRANSPOSED
    ),
}
