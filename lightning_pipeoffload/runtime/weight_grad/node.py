"""The autograd node of an operation whose weight gradient waits for W, and the input that it saves.

W reads that input; B needs its shape only. Saved-tensors hooks that treat such inputs differently
are the methods of a :class:`WeightInputKeeper`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lightning_pipeoffload.runtime.weight_grad.calls import DeferredCall
from lightning_pipeoffload.runtime.weight_grad.queue import QUEUES, Fetch, below_autograd

# Replaces the weights among the inputs to autograd. If the first layer's input needs no gradient,
# another input must require one.
ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
# Private: no public API shows the inputs of a backward.
trains_parameters: Callable[[], bool] = partial(
    torch._C._will_engine_execute_node, get_gradient_edge(ANCHOR).node
)
"""Whether the running backward computes the gradients of all parameters.

A backward for given inputs, such as ``torch.autograd.grad(y, x)``, does not reach the anchor.
"""
_NO_GRADIENTS = (None,) * 5

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class WeightInputKeeper:
    """Base of classes with saved-tensors hooks as methods that save W's inputs separately."""

    def pack_weight_input(self, x: Tensor) -> Any:
        """Save the input of an operation whose weight gradient waits for W."""
        raise NotImplementedError

    def unpack_for_b(self, packed: Any) -> tuple[Tensor, Fetch | None]:
        """Return to B what :meth:`pack_weight_input` saved: the input and None, if B may have it.

        Else return a stand-in with its shape, and a function that returns the input to W.
        """
        raise NotImplementedError

    def unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor to any other reader."""
        raise NotImplementedError


# Private: no public API returns them. Without hooks, a deferred operation needs no second node,
# which costs time.
saving_hooks: Callable[[], Hooks | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
"""Returns the active saved-tensors hooks, such as a checkpoint's; None if there are none."""

# Detached: a node that holds its own output is never freed.
NO_HOOKS: Hooks = Tensor.detach, lambda tensor: tensor
"""Hooks that save tensors as they are."""


def keeper_of(hooks: Hooks) -> WeightInputKeeper | None:
    """Return the owner of hooks, if it is a :class:`WeightInputKeeper`."""
    owner = getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, WeightInputKeeper) else None


class _WeightInput:
    """The input of one operation, saved by ``keeper``; the operation's node holds this object."""

    def __init__(self, keeper: WeightInputKeeper) -> None:
        self._keeper = keeper
        self._is_read_by_b = False
        self._fetch: Fetch | None = None

    def saving(self) -> saved_tensors_hooks:
        """Return hooks that save the input; no other tensor may be saved under them."""
        return saved_tensors_hooks(self._keeper.pack_weight_input, self._unpack)

    def read(self, node: Any) -> tuple[Tensor, Fetch | None]:
        """Return what :meth:`WeightInputKeeper.unpack_for_b` returns, for the input of ``node``."""
        self._is_read_by_b = True
        try:
            (x,) = node.saved_tensors
            return x.detach(), self._fetch
        finally:
            self._is_read_by_b, self._fetch = False, None

    def _unpack(self, packed: Any) -> Tensor:
        if not self._is_read_by_b:  # by code that inspects the graph
            return self._keeper.unpack(packed)
        # Autograd returns another object than this tensor, without its attributes.
        x, self._fetch = self._keeper.unpack_for_b(packed)
        return x


def apply_with_hooks(x: Tensor, call: DeferredCall, hooks: Hooks) -> Tensor:
    """Run an operation on x as :data:`apply_directly` does; ``hooks`` save x for W."""
    # At once: B reads the input.
    is_computed_in_b = bool(QUEUES) and QUEUES[-1].is_computed_in_b(call.trained_weights)
    keeper = None if is_computed_in_b else keeper_of(hooks)
    saved = None if keeper is None else _WeightInput(keeper)
    with nullcontext() if saved is None else saved.saving():
        if not x.requires_grad:
            return _DeferredOperation.apply(x, ANCHOR, call, None, saved)
        # A Function saves after its forward; a checkpoint's recomputation, which stops at the last
        # saved tensor, would needlessly run the block's last operation.
        kept = _SaveInput.apply(x)
    return _DeferredOperation.apply(kept, ANCHOR, call, kept.grad_fn, saved)


class _SaveInput(torch.autograd.Function):
    """The identity; saves x before the operation that follows has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


ReadInput = Callable[[], tuple[Tensor, Fetch | None]]
"""Returns an input and None; or a stand-in, and a function that returns the input to W."""


def save_input_outside_graph(x: Tensor) -> ReadInput:
    """Save an operation's input outside of its graph, through the hooks in force."""
    hooks = saving_hooks()
    keeper = None if hooks is None else keeper_of(hooks)
    saved = None if keeper is None else _WeightInput(keeper)
    with nullcontext() if saved is None else saved.saving():
        # Detached: the graph of x would lead back to the owner of the returned function.
        result = _SaveOutsideGraph.apply(ANCHOR, x.detach())
    # The result: before torch 2.13 a node alone does not outlive its results.
    if saved is None:
        return lambda: (result.grad_fn.saved_tensors[0].detach(), None)
    return lambda: saved.read(result.grad_fn)


class _SaveOutsideGraph(torch.autograd.Function):
    """Saves x outside of any graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _DeferredOperation(torch.autograd.Function):
    """An operation whose inputs to autograd are x and the anchor; the weight is kept by reference.

    ``saver`` is the node that has saved x; None: this node saves it. ``saved`` is None if the
    active hooks are no keeper's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        call: DeferredCall,
        saver: Any = None,
        saved: _WeightInput | None = None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        if saver is None:
            ctx.save_for_backward(x)
        ctx.deferred = call, saver, saved
        with (
            below_autograd() if call.is_kernel else nullcontext(),
            torch._C.DisableTorchFunction(),
        ):
            return call.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph, which this refuses
            return once_differentiable(_DeferredOperation.backward)(ctx, grad)
        if grad is None:  # of a custom function that returns None
            return _NO_GRADIENTS
        call, saver, saved = ctx.deferred
        if call.weight._version != call.version:
            call.refuse_change()
        node = saver or ctx
        x, fetch = (node.saved_tensors[0].detach(), None) if saved is None else saved.read(node)
        if trains_parameters():
            if QUEUES:
                QUEUES[-1].defer(call, x, fetch, grad)
            else:
                call.accumulate_weight_grad(fetch() if fetch else x, grad)
        if not ctx.needs_input_grad[0]:
            return _NO_GRADIENTS
        with below_autograd():
            return call.input_gradient(x, grad), None, None, None, None


# Without the checks of Function.apply, which take a fifth of a small layer's forward. They are for
# transforms of torch.func, of which none is active in a kernel.
apply_directly: Callable[[Tensor, Tensor, DeferredCall], Tensor] = super(
    torch.autograd.Function, _DeferredOperation
).apply
"""Runs an operation on x; its backward puts the weight's gradient into the queue for W.

Gets x, the anchor and the operation. No saved-tensors hooks may be in force.
"""
