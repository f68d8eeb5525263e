"""The autograd node of an operation whose weight gradient waits for W, and the input that it saves.

That input is read by W; B needs its shape only. Hooks that put saved tensors elsewhere ask here
whether what they are given is such an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from lightning_pipeoffload.runtime.weight_grad.calls import DeferredCall
from lightning_pipeoffload.runtime.weight_grad.queue import active_queue

# Private: the one way to run an operation without our own kernel, which would only pass it on.
_below_autograd = torch._C._AutoDispatchBelowAutograd

# Stands for the weights among the inputs to autograd. The first layer's own input may need no
# gradient, and then something must ask for one.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
_ANCHORS_NODE = get_gradient_edge(_ANCHOR).node

# Process-wide on purpose: autograd runs backward in threads of its own; see queue.py.
_saving = False
_reading = False
_promised: Callable[[], Tensor] | None = None


def is_saving_weight_input() -> bool:
    """Whether what autograd saves now is the input of a deferred operation: only W reads it."""
    return _saving


def is_reading_weight_input() -> bool:
    """Whether what is read now is such an input, by its operation's B, which hands it on to W."""
    return _reading


def promise(fetch: Callable[[], Tensor]) -> None:
    """Say, from the hook that unpacks the input, how W gets it; its shape is enough for B."""
    global _promised
    _promised = fetch


@contextmanager
def for_backward() -> Iterator[None]:
    """Let what a hook itself saves or reads inside be for B, whatever it does that for."""
    global _saving, _reading
    outer = _saving, _reading
    _saving = _reading = False
    try:
        yield
    finally:
        _saving, _reading = outer


def apply_deferred(call: DeferredCall, x: Tensor) -> Tensor:
    """Run an operation on x whose backward leaves the weight's gradient for W."""
    if not x.requires_grad:
        with _saving_input():
            return _Deferred.apply(x, _ANCHOR, None, call)
    if not _is_saving_hooked():
        return _Deferred.apply(x, _ANCHOR, None, call)
    # A Function saves after its forward has run; a checkpoint's recomputation, which stops at the
    # last tensor saved, would so run the block's last operation in vain.
    with _saving_input():
        kept = _Keep.apply(x)
    return _Deferred.apply(kept, _ANCHOR, kept.grad_fn, call)


@contextmanager
def _saving_input() -> Iterator[None]:
    global _saving
    _saving = True
    try:
        yield
    finally:
        _saving = False


def _is_saving_hooked() -> bool:
    """Whether what autograd saves goes through hooks, as inside a checkpoint."""
    # Private: nothing public tells, and without hooks the second node would be paid for nothing.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Keep(torch.autograd.Function):
    """The identity; saves x before the operation that follows has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


class _Deferred(torch.autograd.Function):
    """An operation whose inputs to autograd are x and the anchor; the weight is kept by reference.

    ``keeper`` is the node that has saved x; None: this one does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, keeper: Any, call: DeferredCall) -> Tensor:
        ctx.set_materialize_grads(False)
        if keeper is None:
            ctx.save_for_backward(x)
        ctx.keeper = keeper
        ctx.call = call
        with _below_autograd():
            return call.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if grad is None:  # as where a function of the user's returns no gradient
            return None, None, None, None
        call: DeferredCall = ctx.call
        call.check_unchanged()
        x, fetch = _read_input(ctx.keeper or ctx)
        if _is_for_weights():
            _queue_or_run(call, x, fetch, grad)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        with _below_autograd():
            return call.input_gradient(x, grad), None, None, None


def _is_for_weights() -> bool:
    """Whether the backward that runs is for the gradients of all that trains.

    One for certain tensors, as ``torch.autograd.grad(y, x)`` in a step is, comes by no anchor.
    """
    # Private: nothing public tells what a backward is for.
    return torch._C._will_engine_execute_node(_ANCHORS_NODE)


def _read_input(node: Any) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """Return what ``node`` saved, and how W gets it if this is a stand-in."""
    global _reading, _promised
    _reading, _promised = True, None
    try:
        (x,) = node.saved_tensors
        return x.detach(), _promised
    finally:
        _reading, _promised = False, None


def _queue_or_run(
    call: DeferredCall, x: Tensor, fetch: Callable[[], Tensor] | None, grad: Tensor
) -> None:
    queue = active_queue()
    if queue is None:
        call.accumulate(fetch() if fetch else x, grad)
        return
    fetch_x = fetch or queue.keep(x)
    fetch_grad = queue.keep(grad)
    queue.put(lambda: call.accumulate(fetch_x(), fetch_grad()), call.flops(x, grad))
