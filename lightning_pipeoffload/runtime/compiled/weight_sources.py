"""Where the weight of a product in a compiled region comes from: a parameter, viewed or cast."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_pipeoffload.runtime.compiled.shared_casts import cast_weight
from lightning_pipeoffload.runtime.weight_grad.kernels import may_wait

_VIEW_METHODS = {"t", "transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "to"}
_VIEW_FUNCTIONS = {torch.t, torch.transpose, torch.permute, operator.getitem, getattr}
_VIEW_ATTRIBUTES = {"T", "mT"}
_LONGEST_VIEW = 8


@dataclass(frozen=True)
class WeightSource:
    """A tensor that the region makes of one parameter, and that is made outside of it instead.

    Attributes:
        index: Which of the region's inputs the parameter is.
        views: What is made of it, one after another.
        dtype: What autocast casts it to; None: nothing.
    """

    index: int
    views: tuple[Callable[[Any], Any], ...] = ()
    dtype: torch.dtype | None = None

    def of(self, inputs: Sequence[Any]) -> Tensor:
        """Make it, in autograd's eyes too."""
        found: Tensor = inputs[self.index]
        if self.dtype is not None:
            found = cast_weight(found, self.dtype)
        for view in self.views:
            found = view(found)
        return found


class WeightFinder:
    """Finds the sources of weights in one graph.

    Args:
        placeholders: The graph's inputs.
        inputs: The tensors that it is compiled with.
    """

    def __init__(self, placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> None:
        self._inputs = inputs
        self._indices = {node: index for index, node in enumerate(placeholders)}

    def find(self, node: Any, dtype: torch.dtype) -> WeightSource | None:
        """Return what ``node`` is made of; None: of nothing whose gradient may wait.

        Args:
            node: A value in the graph.
            dtype: The dtype that the product computes in.
        """
        views: list[Callable[[Any], Any]] = []
        while isinstance(node, fx.Node) and len(views) <= _LONGEST_VIEW:
            if node in self._indices:
                return self._of_input(self._indices[node], tuple(reversed(views)), dtype)
            view = _view_of(node)
            if view is None:
                return None
            views.append(view)
            node = node.args[0]
        return None

    def is_trained(self, node: Any) -> bool:
        """Whether a value gets a gradient."""
        return isinstance(node, fx.Node) and bool(
            getattr(node.meta.get("example_value"), "requires_grad", False)
        )

    def _of_input(
        self, index: int, views: tuple[Callable[[Any], Any], ...], dtype: torch.dtype
    ) -> WeightSource | None:
        parameter = self._inputs[index]
        if not isinstance(parameter, nn.Parameter) or not may_wait(parameter):
            return None
        if not parameter.requires_grad:
            return None
        casts = parameter.dtype != dtype and not any(map(_is_cast, views))
        return WeightSource(index, views, dtype if casts else None)


def _view_of(node: fx.Node) -> Callable[[Any], Any] | None:
    """Return what a node makes of its first argument, if that is a view or a cast."""
    rest = node.args[1:]
    if _has_nodes((rest, node.kwargs)):
        return None
    if node.op == "call_method" and node.target in _VIEW_METHODS:
        return partial(_call_method, str(node.target), rest, node.kwargs)
    if node.op == "call_function" and node.target in _VIEW_FUNCTIONS:
        if node.target is getattr and rest[0] not in _VIEW_ATTRIBUTES:
            return None
        return partial(_call_function, node.target, rest, node.kwargs)
    return None


def _is_cast(view: Callable[[Any], Any]) -> bool:
    return isinstance(view, partial) and view.args[0] == "to"


def _has_nodes(arguments: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return bool(found)


def _call_method(name: str, rest: Any, kwargs: Any, tensor: Any) -> Any:
    return getattr(tensor, name)(*rest, **kwargs)


def _call_function(function: Any, rest: Any, kwargs: Any, tensor: Any) -> Any:
    return function(tensor, *rest, **kwargs)
