"""Comes between torch.compile and its backend, so that regions of a step are split.

However a region came to be compiled, ``block.compile()``, ``torch.compile(block)``, a decorator on
a function, by the user or by us: its graph passes here on the way to the backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._dynamo import trace_rules  # private: which code is run as it is written

# Private: by these a compiler begins anew, or leaves a frame as it is; neither is a failure.
from torch._dynamo.exc import RestartAnalysis, SkipFrame

from lightning_pipeoffload.runtime.compiled.ahead import Region, leaving_if_ahead
from lightning_pipeoffload.runtime.compiled.split_graph import split_graph
from lightning_pipeoffload.runtime.compiled.split_region import SplitRegion
from lightning_pipeoffload.runtime.weight_grad.queue import active_queue

log = logging.getLogger(__name__)

Backend = Callable[..., Region]
_FUSED = "a compiled block gets its weight gradients in B, for it does not compile without: "
_CHECKPOINTED = (
    "what a compiled block checkpoints by itself gets its weight gradients in B; leave its own "
    'checkpointing off, and let recompute="full" do it'
)
UNCOMPILED = "a block runs as it is written, for it does not compile: "
# Private, both: what torch.compile makes of its backend.
_KINDS: tuple[type[Any], ...] = (torch._TorchCompileWrapper, torch._TorchCompileInductorWrapper)
_replaced: dict[type[Any], Backend] = {}


def install_split() -> None:
    """Let regions of steps be split from now on; again is harmless."""
    _leave_uncompiled("lightning_pipeoffload.runtime")
    for kind in _KINDS:
        if kind not in _replaced:
            _replaced[kind] = kind.__call__
            kind.__call__ = _splitting(kind.__call__)


def remove_split() -> None:
    """Give torch its own calls back."""
    while _replaced:
        kind, call = _replaced.popitem()
        kind.__call__ = call


@cache
def _leave_uncompiled(package: str) -> None:
    """Keep torch.compile from our own code, to which it comes where it leaves a block's alone."""
    trace_rules.add(package)


def _splitting(call: Backend) -> Backend:
    def compile_graph(self: Any, module: fx.GraphModule, inputs: Any, **options: Any) -> Region:
        def compile_plainly(module: fx.GraphModule, inputs: Any) -> Region:
            return call(self, module, inputs, **options)

        if active_queue() is None or not torch.is_grad_enabled():
            return compile_plainly(module, inputs)
        return _compile_in_step(compile_plainly, module, inputs)

    return compile_graph


def _compile_in_step(compile_plainly: Backend, module: fx.GraphModule, inputs: Any) -> Region:
    """Compile a region with its weight gradients apart if it can be, else whole, else not."""
    if _has_checkpoint(module):
        say(_CHECKPOINTED)
    graph, error = _try(split_graph, module, inputs)
    if graph is not None:
        compiled, error = _try(compile_plainly, graph.module, graph.examples)
        if compiled is not None:
            return SplitRegion(graph, compiled, torch.compile(module, backend=compile_plainly))
    whole, second = _try(compile_plainly, module, inputs)
    if second is not None:
        say(UNCOMPILED + _first_line(second))
        return leaving_if_ahead(_uncompiled(module))
    if error is not None:
        say(_FUSED + _first_line(error))
    assert whole is not None
    return leaving_if_ahead(whole)


def _has_checkpoint(module: fx.GraphModule) -> bool:
    names = (getattr(node.target, "__name__", "") for node in module.graph.nodes)
    return "tag_activation_checkpoint" in names  # private: torch's name of a compiled checkpoint


def _uncompiled(module: fx.GraphModule) -> Region:
    if any(node.op == "get_attr" for node in module.graph.nodes):
        raise SkipFrame("a graph with others inside, as checkpoints have, is for compilers only")
    return module.forward


@cache
def say(line: str) -> None:
    """Log a line, once."""
    log.warning(line)


def _try(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Return what a function returns, or its error."""
    try:
        return function(*args), None
    except (RestartAnalysis, SkipFrame):
        raise
    except Exception as error:
        return None, error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
