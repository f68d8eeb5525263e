"""Weight gradients apart from input gradients: the W of a zero-bubble schedule.

Kernels at the dispatcher's autograd keys (``kernels.py``) see each linear layer, matrix product and
convolution, however the model calls it. Where the weight is marked, the backward returns the input
gradient only and puts (input, output gradient) into the queue of that stage and microbatch, which W
empties; nothing else of the graph stays alive. ``torch.distributed.pipelining`` walks the autograd
graph instead and keeps all of it until W.

Parameters that a stage also uses in other operations (norms, embeddings, scales) get their gradient
in B. For one layer, ``y = x @ weight.T``::

    F   x --------> [ layer ] ------> y      keeps x
    B   grad x <--- [ layer ] <-- grad y     grad x is sent to the stage before, at once
                        |
                  (x, grad y) waits in the queue
                        v
    W   weight.grad += grad y.T @ x          when the plan has room for it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS
from lightning_pipeoffload.runtime.shapes import storage_key

_AT_ONCE = "_pipeoffload_at_once"

# Private: the only way to run an operation without our own kernel, which would only forward it. Not
# _AutoDispatchBelowAutograd: a view that the operation makes inside, as linear does, would count as
# a view made by a Function, which must not be written in place.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView

AddProduct = Callable[[Tensor, Tensor, Tensor], None]
Fetch = Callable[[], Tensor]


class WeightGradCall(Protocol):
    """An operation whose weight gradient waits for W, as ``DeferredCall`` in ``calls.py``."""

    trained_weights: tuple[Tensor, ...]

    def accumulate_weight_grad(self, x: Tensor, grad: Tensor, add_product: AddProduct) -> None:
        """Compute the gradients of the weights, and add them to ``.grad``."""

    def flops(self, x: Tensor, grad: Tensor) -> int:
        """Return the floating-point operations of :meth:`accumulate_weight_grad`'s product."""


class WeightGrad(NamedTuple):
    """A gradient that waits for W; ``weights`` are parameters, or their views and casts."""

    compute: Callable[[], None]
    weights: tuple[Tensor, ...]


class OperandKeeper(Protocol):
    def keep_until_w(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor until W; return the function by which W gets it."""


class WeightGradQueue:
    """Weight gradients of one stage and microbatch, from its B to its W.

    Used as a context manager it gets the gradients of marked weights. It is in force around F too,
    whose graph depends on it, unless the step runs backwards of its own, which have no W.

    Args:
        immediate: Whether to compute each gradient at once, for a fused backward.
        keeper: Keeps the tensors that wait; None: they stay as they are.
        add_product: Adds the product of two matrices to a weight's gradient.
        has_at_once: Whether the gradients of weights marked by :func:`mark_computed_in_b` do not
            wait.

    Attributes:
        has_at_once: As given.
        flops: Floating-point operations of the gradients that were put here while they are counted.
        operands: The memory that their computation reads, if that is known.
    """

    def __init__(
        self,
        immediate: bool = False,
        keeper: OperandKeeper | None = None,
        add_product: AddProduct | None = None,
        has_at_once: bool = False,
    ) -> None:
        self.immediate = immediate
        self.has_at_once = has_at_once
        self.keeper = keeper
        self.add_product = add_product or add_product_to_grad
        self.flops = 0
        self.counts_flops = True
        self.operands: set[int] | None = None
        self._entries: list[WeightGrad] = []

    def start_recording_operands(self) -> None:
        """Record the memory that deferred gradients read, from now on."""
        self.operands = set()

    def configure_backward(self, is_immediate: bool, counts_flops: bool) -> None:
        """Set whether the next gradients are computed where they are put here, not in W."""
        self.immediate = is_immediate
        self.counts_flops = counts_flops

    def __enter__(self) -> None:
        QUEUES.append(self)

    def __exit__(self, *error: object) -> None:
        QUEUES.pop()

    def put(self, compute: Callable[[], None], weights: tuple[Tensor, ...]) -> None:
        """Add a function that computes the gradients of ``weights`` and adds them to ``.grad``."""
        self.operands = None
        if self.immediate:
            compute()
        else:
            self._entries.append(WeightGrad(compute, weights))

    def defer(self, call: WeightGradCall, x: Tensor, fetch: Fetch | None, grad: Tensor) -> None:
        """Queue the weight gradient of a product for W, or compute it now if it must not wait.

        Args:
            call: The product.
            x: The product's input, or a stand-in.
            fetch: Returns the input, if x is a stand-in.
            grad: The gradient of the product's result.
        """
        if self.has_at_once and self.is_computed_in_b(call.trained_weights):
            call.accumulate_weight_grad(fetch() if fetch else x, grad, self.add_product)
            return
        if self.counts_flops:
            self.flops += call.flops(x, grad)
        if fetch is None and self.keeper is None:
            compute: Callable[[], None] = partial(
                call.accumulate_weight_grad, x, grad, self.add_product
            )
            if self.operands is not None:
                self.operands.add(storage_key(x))
        else:
            self.operands = None  # the input may be computed again
            compute = partial(
                _accumulate_kept, call, fetch or self.keep(x), self.keep(grad), self.add_product
            )
        if self.immediate:
            compute()
        else:
            self._entries.append(WeightGrad(compute, call.trained_weights))

    def is_computed_in_b(self, weights: Iterable[Tensor]) -> bool:
        """Return whether the gradient of weights, or of their views and casts, must not wait."""
        return self.has_at_once and any(
            getattr(parameter, _AT_ONCE, False)
            for weight in weights
            for parameter in parameters_of(weight)
        )

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor until W; return the function by which W gets it."""
        if self.keeper is None or self.immediate:
            return lambda: tensor
        return self.keeper.keep_until_w(tensor)

    def run(self) -> None:
        """Compute and accumulate all, in the order of the backward; each frees its tensors."""
        entries, self._entries = self._entries[::-1], []
        with torch.set_grad_enabled(False):  # half the calls of no_grad()
            while entries:
                entries.pop().compute()

    @property
    def pending(self) -> list[WeightGrad]:
        """The gradients that wait, in the order of the backward."""
        return self._entries

    def may_read(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether the gradients that wait, or hooks on them, may read one of ``tensors``."""
        if self.operands is None or any(has_hooks(w) for each in self._entries for w in each[1]):
            return True
        return any(isinstance(t, Parameter) or storage_key(t) in self.operands for t in tensors)

    def pop_all(self) -> list[WeightGrad]:
        """Remove and return the gradients that wait, for the caller to compute."""
        entries, self._entries = self._entries, []
        return entries


def _accumulate_kept(
    call: WeightGradCall, fetch_x: Fetch, fetch_grad: Fetch, add_product: AddProduct
) -> None:
    call.accumulate_weight_grad(fetch_x(), fetch_grad(), add_product)


QUEUES = ACTIVE_SETTINGS.stack(WeightGradQueue)
"""The queue in force is the last; empty outside of F and B. Read directly once a product."""


def active_queue() -> WeightGradQueue | None:
    """Return the queue that is in force; None outside of F and B."""
    return QUEUES[-1] if QUEUES else None


def mark_computed_in_b(parameter: Tensor, is_computed_in_b: bool = True) -> None:
    """Set whether B, not W, adds the gradient, in queues with ``has_at_once``."""
    setattr(parameter, _AT_ONCE, is_computed_in_b)


def defer_weight_grad(parameter: Tensor, compute: Callable[[], Tensor]) -> None:
    """Defer the gradient of ``parameter`` to the W of this stage and microbatch.

    For custom kernels: call it inside ``autograd.Function.backward`` and return None for the
    parameter.

    Args:
        parameter: A parameter of the model.
        compute: A function that returns the gradient, shaped like ``parameter``; called once, at W,
            or at once where no W runs.
    """

    def add() -> None:
        add_to_grad(parameter, compute())

    queue = active_queue()
    if queue is not None and not (queue.immediate or queue.is_computed_in_b((parameter,))):
        queue.put(add, (parameter,))
    else:
        with torch.no_grad():
            add()


def parameters_of(weight: Tensor) -> Iterable[Tensor]:
    """Return the parameters that a weight was computed from; a parameter itself."""
    if weight.grad_fn is None:
        return [weight]
    parameters, nodes = [], [weight.grad_fn]
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            parameters.append(variable)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return parameters


def add_to_grad(parameter: Tensor | None, gradient: Tensor) -> None:
    """Add a gradient to ``.grad`` as autograd does, hooks included."""
    assert parameter is not None
    leaf = parameter if parameter.is_leaf else _parameter_of_cast(parameter)
    if (
        leaf is None
        or leaf._backward_hooks  # as has_hooks() reads them, without a call for each gradient
        or getattr(leaf, "_post_accumulate_grad_hooks", None)
    ):
        torch.autograd.backward(parameter, gradient)
    elif leaf.grad is None:
        dtype = leaf.grad_dtype  # None: any
        leaf.grad = gradient if dtype is None else gradient.to(dtype)
    else:
        leaf.grad.add_(gradient)


def add_product_to_grad(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``.grad``, without a temporary where that is possible."""
    grad = parameter.grad if parameter.is_leaf else None
    if (
        grad is None
        or parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
        or not grad.dtype == left.dtype == right.dtype
    ):
        with below_autograd():
            product = left.mm(right)
        add_to_grad(parameter, product)
    else:
        grad.addmm_(left, right)


def add_product_in_float32(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``.grad``; bfloat16 or float16 to a float32 gradient in one kernel.

    That rounds once; :func:`add_product_to_grad` rounds the product to 16 bits before it adds.
    """
    leaf = parameter if parameter.is_leaf else _parameter_of_cast(parameter)
    if leaf is None or has_hooks(leaf) or not _adds_to_float32(leaf, left, right):
        add_product_to_grad(parameter, left, right)
    elif leaf.grad is None:
        leaf.grad = torch.mm(left, right, out_dtype=torch.float32)
    else:
        torch.addmm(leaf.grad, left, right, out_dtype=torch.float32, out=leaf.grad)


def _adds_to_float32(leaf: Tensor, left: Tensor, right: Tensor) -> bool:
    dtype = (leaf.grad_dtype or left.dtype) if leaf.grad is None else leaf.grad.dtype
    is_narrow = left.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and left.dtype == right.dtype and dtype == torch.float32


def supports_float32_accumulation(device: torch.device) -> bool:
    """Return whether a device multiplies matrices of bfloat16 and adds the product to float32."""
    total = torch.zeros(8, 8, device=device)
    factor = total.bfloat16()
    try:
        torch.mm(factor, factor, out_dtype=torch.float32)
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def _parameter_of_cast(cast: Tensor) -> Tensor | None:
    """Return the parameter that ``cast`` was cast from; None if ``cast`` has hooks or is wider.

    The gradient of ``cast`` is exact in the parameter's dtype, so it can be added directly, which
    costs less than a run of autograd's engine. Under bf16-mixed each weight is such a cast.
    """
    node: Any = cast.grad_fn
    if node.name() != "ToCopyBackward0" or cast._backward_hooks or cast.retains_grad:
        return None
    leaf: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    if leaf is None or leaf.device != cast.device or leaf.is_complex() != cast.is_complex():
        return None
    return leaf if torch.promote_types(leaf.dtype, cast.dtype) == leaf.dtype else None


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    # Private, both: nothing public tells.
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
