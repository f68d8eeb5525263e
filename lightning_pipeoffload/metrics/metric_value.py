"""The value of a metric's call in a step, which is known when the batch's microbatches are there.

``self.log`` gets its value over the batch, also of what the step computes of it alone::

    accuracy = self.accuracy(logits, y)     a MetricValue: nothing is computed
    self.log("error", 1 - accuracy)         its expression; made and logged once for the batch
    if accuracy > 0.9:                      reads it: the microbatch's own value is computed
    loss = loss - accuracy                  so does this, by the loss of a microbatch
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (  # private: see runtime/leaves
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
)

_OF_ANY_VALUE = {
    Tensor.shape.__get__,  # type: ignore[attr-defined] # a property
    Tensor.dtype.__get__,  # type: ignore[attr-defined] # a property
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined] # a property
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.is_floating_point,
}
_WRITERS = {"__set__", "__setitem__", "__delete__", "backward", "register_hook"}

Source = Callable[["Entry"], Any]
"""Returns the value of an entry of what a call returned."""


@dataclass(frozen=True, eq=False)
class Entry:
    """An entry of what a metric's call returns.

    Attributes:
        call: The call in all microbatches of a batch.
        part: The call in one of them.
        path: The place of the entry, ``"['f1']"``; "" if the call returns a tensor.
    """

    call: Any
    part: Any
    path: str

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """The same for the entries of a batch's microbatches."""
        return id(self.call), self.path

    def value(self, source: Source) -> Any:
        """Return the value by a source: the batch's, or the microbatch's own."""
        return source(self)


@dataclass(frozen=True, eq=False)
class MetricExpression:
    """A value that a step computes of entries alone: ``function`` of ``operands``, at ``path``."""

    function: Callable[..., Any]
    operands: tuple[Any, Any]
    path: str

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """The same where microbatches compute the same."""
        keys = tree_map(lambda leaf: leaf.batch_key if is_expression(leaf) else leaf, self.operands)
        return self.function, keys, self.path

    def value(self, source: Source) -> Any:
        """Return the value by a source: the batch's, or the microbatch's own."""
        args, kwargs = tree_map(
            lambda leaf: leaf.value(source) if is_expression(leaf) else leaf, self.operands
        )
        return at_path(self.function(*args, **kwargs), self.path)


Expression = Entry | MetricExpression
"""How a value follows from what metrics return."""


def is_expression(leaf: Any) -> bool:
    return isinstance(leaf, Entry | MetricExpression)


def at_path(tree: Any, path: str) -> Any:
    """Return the leaf at a path; raises a KeyError where the tree has none."""
    return {keystr(place): leaf for place, leaf in tree_flatten_with_path(tree)[0]}[path]


class MetricValue(Tensor):
    """A value that has not been computed; made by :func:`make_metric_values`.

    Attributes:
        expression: How it follows from what metrics return; None once it is the microbatch's own.
    """

    expression: Expression | None
    _own_source: Source
    _created: list[Any]
    _own: Tensor | None

    def microbatch_value(self) -> Tensor:
        """Return the microbatch's own value, which is computed now if it was not before."""
        if self._own is None:
            assert self.expression is not None
            self._own = self.expression.value(self._own_source)
        return self._own

    def resolve_expression(self) -> None:
        """Compute the microbatch's own value, and drop the expression."""
        self.microbatch_value()
        self.expression = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = args, kwargs or {}
        if func is Tensor.__hash__:
            return id(args[0])
        tensors = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():  # private: what Tensor's own method uses
            if func in _OF_ANY_VALUE:
                return func(*args, **operands[1])
            writes = _writes(func, operands[1])
            if not writes and all(map(_is_open, tensors)):
                like = func(*args, **operands[1])
                if any(isinstance(leaf, Tensor) for leaf in tree_leaves(like)):
                    return _expression_value(func, operands, like, tensors[0])
            args, kwargs = tree_map(_own_of, operands)
            result = func(*args, **kwargs)
            if writes and isinstance(tensors[0], MetricValue):
                tensors[0].resolve_expression()
            return result


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = func.__name__
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_assignment = name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    return is_in_place or is_assignment or name in _WRITERS or kwargs.get("out") is not None


def _is_open(tensor: Tensor) -> bool:
    return isinstance(tensor, MetricValue) and tensor.expression is not None


def _expression_of(leaf: Any) -> Any:
    return leaf.expression if isinstance(leaf, MetricValue) else leaf


def _own_of(leaf: Any) -> Any:
    return leaf.microbatch_value() if isinstance(leaf, MetricValue) else leaf


def _expression_value(func: Any, operands: Any, like: Any, first: Any) -> Any:
    expressions = tree_map(_expression_of, operands)
    return make_metric_values(
        like,
        lambda path: MetricExpression(func, expressions, path),
        first._own_source,
        first._created,
    )


def make_metric_values(
    like: Any, expression: Callable[[str], Expression], own: Source, created: list[Any]
) -> Any:
    """Return a tree like another one, with a :class:`MetricValue` for each tensor.

    Args:
        like: A tree of the same structure, dtypes and, mostly, shapes.
        expression: Returns the expression of a path.
        own: Computes a microbatch's own value of an entry.
        created: Gets a weak reference to each value.
    """

    def make(place: Any, leaf: Any) -> Any:
        made = expression(keystr(place))
        if not isinstance(leaf, Tensor):
            return made.value(own) if isinstance(leaf, float | int) else leaf
        value = leaf.detach().as_subclass(MetricValue)
        value.expression, value._own, value._own_source = made, None, own
        value._created = created
        created.append(weakref.ref(value))
        return value

    with torch._C.DisableTorchFunctionSubclass():  # private: as above
        return tree_map_with_path(make, like)


def resolve_metric_values(tree: Any) -> Any:
    """Replace each :class:`MetricValue` in a step's result by the microbatch's own value."""
    return tree_map(_own_of, tree)
