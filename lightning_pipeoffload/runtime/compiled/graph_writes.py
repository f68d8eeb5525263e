"""Whether a graph writes tensors in place."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx

_IN_PLACE = {
    operator.setitem,
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.imatmul,
}  # fmt: skip


def writes_in_place(graph: fx.Graph) -> bool:
    """Whether any call in a graph may write one of its arguments."""
    return any(_writes(node) for node in graph.nodes)


def _writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return _is_in_place(str(node.target))
    return node.op == "call_function" and _function_writes(node)


def _function_writes(node: fx.Node) -> bool:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    named = target in _IN_PLACE or _is_in_place(getattr(target, "__name__", ""))
    return named or node.kwargs.get("out") is not None or _is_inplace_call(node)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") or name == "__setitem__"


def _is_inplace_call(node: fx.Node) -> bool:
    """Whether a function has an argument ``inplace``, and it is true."""
    target: Any = node.target
    if not inspect.isfunction(target):
        return bool(node.kwargs.get("inplace"))
    parameters = inspect.signature(target).parameters
    if "inplace" not in parameters:
        return False
    place = [*parameters].index("inplace")
    return bool(node.kwargs.get("inplace") or node.args[place : place + 1] == (True,))
