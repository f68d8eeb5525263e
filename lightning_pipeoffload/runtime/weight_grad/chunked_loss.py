"""The loss of a head over chunks of the tokens, so that whole logits are never kept.

F computes the loss of each chunk and drops its logits. B computes them again, chunk by chunk, with
the gradients of the head's input and weights, which it adds up at once. So a microbatch keeps the
head's input from F to B, and nothing for W, for one more forward of the head::

    whole     F   logits                  B   gradient of the logits ........ W   head
    chunked   F   c0  c1  c2  c3          B   c0, head   c1, head   c2, head   c3, head

A checkpoint around each chunk would save nothing where W is apart from B: each chunk's gradient of
the logits would wait for W.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS
from lightning_pipeoffload.runtime.weight_grad.kernels import is_deferrable
from lightning_pipeoffload.runtime.weight_grad.node import ANCHOR, trains_parameters
from lightning_pipeoffload.runtime.weight_grad.queue import WeightGradQueue, active_queue

_NAME = "chunked_loss"


@dataclass(frozen=True)
class ChunkCallbacks:
    """Callbacks of a trace or a measurement for the chunks of an F or a B; see ``ACTIVE_SETTINGS``.

    Attributes:
        context: Returns a context for the chunks.
        record_class_weights: Called where the loss is a mean over the weights of classes.
    """

    context: Callable[[], AbstractContextManager[Any]]
    record_class_weights: Callable[[], None]


def chunked_loss(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    loss: Callable[..., Tensor],
    num_chunks: int,
) -> Tensor:
    """Return ``loss(head(hidden), labels)``, without the whole of ``head(hidden)`` in memory.

    The head's memory falls as ``1 / num_chunks``, for one more forward of the head in the backward.
    Gradients are those of the whole, up to rounding. It works in a pipeline, with any strategy of
    Lightning that runs whole modules, and under ``no_grad``.

    The language model of Hugging Face without its own loss, whose labels are shifted here::

        def training_step(self, batch, batch_idx):
            hidden = self.model.model(batch["input_ids"], use_cache=False).last_hidden_state
            labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            return chunked_loss(self.model.lm_head, hidden, labels, nn.functional.cross_entropy, 8)

    Args:
        head: The module that makes logits ``[tokens, classes]`` of ``[tokens, features]``; with a
            norm in front of it, ``nn.Sequential(self.norm, self.lm_head)``.
        hidden: Its input ``[..., features]``.
        labels: One entry (or row) for each token: ``[...]`` or ``[..., more]``. They are not
            shifted: pass ``hidden[:, :-1]`` and ``labels[:, 1:]``, or all of ``hidden`` and labels
            that are shifted and padded with ``ignore_index``, which copies nothing.
        loss: A function or module of logits and labels that takes ``reduction`` as torch's losses
            do; it is called with "sum" for each chunk. If its own is "mean", the sum is divided by
            the number of labels that are not ``ignore_index``, or by their ``weight``; if it is
            "sum", divide the result yourself.
        num_chunks: The number of chunks, of about as many tokens each.

    Raises:
        ValueError: ``hidden`` and ``labels`` do not fit each other, or ``loss`` is a mean of other
            numbers than labels.
    """
    _check(head, hidden, labels, num_chunks)
    summed, find_divisor = _find_reduction(loss)
    rows = hidden.flatten(0, -2)
    targets = labels.flatten(0, hidden.dim() - 2)
    chunks = _Chunks(head, summed, -(-len(rows) // num_chunks) or 1, hidden.device.type)
    weights = chunks.weights.values()
    if torch.is_grad_enabled() and (rows.requires_grad or weights):
        total = _ChunkedLoss.apply(chunks, rows, targets, ANCHOR, *weights)
    else:
        total = chunks.sum_losses(rows, targets)
    return total if find_divisor is None else total / find_divisor(targets)


def _check(head: Any, hidden: Tensor, labels: Tensor, num_chunks: Any) -> None:
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{_NAME}() needs the head as a module, whose weights it finds, and got a "
            f"{type(head).__name__}; write nn.Linear(..., bias=False) and give it the weight that "
            f"it shares (head.weight = embedding.weight), or a module that calls yours"
        )
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 1:
        raise ValueError(
            f"num_chunks ({num_chunks!r}) of {_NAME}() must be a positive int; use num_chunks=16"
        )
    if hidden.dim() < 2 or labels.shape[: hidden.dim() - 1] != hidden.shape[:-1]:
        raise ValueError(
            f"{_NAME}() needs labels for each token of hidden, {[*hidden.shape[:-1]]} of "
            f"{[*hidden.shape]}, and got {[*labels.shape]}; to predict the next token give "
            f"hidden[:, :-1] and labels[:, 1:]"
        )


# How a loss adds up


def _find_reduction(
    loss: Callable[..., Tensor],
) -> tuple[Callable[..., Tensor], Callable[[Tensor], Any] | None]:
    """Return ``loss`` with reduction="sum", and a function of the labels that returns the divisor.

    The sum is divided by it if ``loss`` is a mean; if ``loss`` is a sum, the function is None.

    Raises:
        ValueError: ``loss`` is neither, or is a mean without an ``ignore_index``.
    """
    options = _options_of(loss)
    reduction = options.get("reduction")
    if reduction not in ("mean", "sum"):
        problem = "has no reduction" if reduction is None else f"has reduction={reduction!r}"
        raise ValueError(
            f"{_NAME}() adds up chunks of the loss, and {_name_of(loss)} {problem}; use "
            f"nn.functional.cross_entropy, or a function of logits and labels with an argument "
            f'reduction="sum", and divide the result by the number of tokens yourself'
        )
    if isinstance(loss, nn.Module):
        summed: Callable[..., Tensor] = copy(loss)
        summed.reduction = "sum"  # type: ignore[attr-defined]
    else:
        summed = partial(loss, reduction="sum")
    if reduction == "sum":
        return summed, None
    if "ignore_index" not in options:
        raise ValueError(
            f"{_NAME}() does not know of how many numbers {_name_of(loss)} is the mean; give it "
            f'reduction="sum", and divide the result yourself'
        )
    return summed, partial(
        _mean_divisor, ignored=options["ignore_index"], weight=options.get("weight")
    )


def _options_of(loss: Any) -> dict[str, Any]:
    """Return the options by which a loss reduces: a module's attributes, a function's defaults."""
    names = "reduction", "ignore_index", "weight"
    if isinstance(loss, nn.Module):
        return {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    parameters = inspect.signature(loss).parameters
    return {name: parameters[name].default for name in names if name in parameters}


def _name_of(loss: Any) -> str:
    inner = loss.func if isinstance(loss, partial) else loss
    return getattr(inner, "__name__", type(inner).__name__)


def _mean_divisor(targets: Tensor, ignored: int, weight: Tensor | None) -> Any:
    """Return the divisor of a mean, as ``nn.functional.cross_entropy`` computes it."""
    if targets.is_floating_point():  # probabilities of the classes
        return len(targets)
    counted = targets != ignored
    if weight is None:
        return counted.sum()
    around = ACTIVE_SETTINGS.latest(ChunkCallbacks)
    if around is not None:
        around.record_class_weights()
    return (weight[targets.where(counted, 0)] * counted).sum()


# The chunks


class _Chunks:
    """Runs the head and its loss on chunks of ``size`` tokens.

    Keeps the autocast settings of its construction, so that B computes the logits as F did.
    """

    def __init__(
        self, head: nn.Module, loss: Callable[..., Tensor], size: int, device_type: str
    ) -> None:
        self.weights = {name: p for name, p in head.named_parameters() if p.requires_grad}
        self._head, self._loss, self._size = head, loss, size
        self._device_type = device_type
        self._is_cast = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    def sum_losses(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all chunks."""
        # The cache might return casts of this run, which have no graph, where they need one.
        with _around_chunks(), self._casting(uses_cache=False):
            losses = [self._loss(self._head(x), y) for x, y in self._split(rows, targets)]
        return torch.stack(losses).sum()

    def keep_generators(self, rows: Tensor) -> None:
        """Keep the state of torch's generators, so that B draws the same numbers (dropout) as F."""
        self._states = torch.get_rng_state(), *get_device_states(rows)

    def recompute_and_backward(
        self, rows: Tensor, targets: Tensor, grad: Tensor, trains_rows: bool
    ) -> list[Tensor | None]:
        """Run the chunks again and their backward; return the gradients of rows and weights.

        In a pipeline's B, products with a weight are added to its ``.grad`` at once, unless other
        code needs the gradient of this use alone; None is returned for such a weight. All other
        gradients are summed over the chunks, and returned to autograd.
        """
        queue = active_queue()
        adds = queue is not None and trains_parameters()
        stand_ins = {
            name: weight.detach().requires_grad_()
            for name, weight in self.weights.items()
            if not (adds and is_deferrable(weight))
        }
        # The cache is the step's, which would keep the casts of stand-ins.
        casting = partial(self._casting, torch.is_autocast_cache_enabled() and not stand_ins)
        inner = WeightGradQueue(True, add_product=queue.add_product) if adds and queue else None
        run = partial(_run_with, self._head, stand_ins) if stand_ins else self._head
        of_rows = []
        with (
            self._restored_rng_state(),
            _around_chunks(),
            inner or nullcontext(),
            torch.enable_grad(),
        ):
            for part, y in self._split(rows, targets):
                x = part.detach().requires_grad_(trains_rows)
                with casting():
                    loss = self._loss(run(x), y)
                torch.autograd.backward(loss, grad.to(loss.dtype))
                of_rows.append(torch.zeros_like(x) if x.grad is None else x.grad)
        return [
            torch.cat(of_rows) if trains_rows else None,
            *(stand_ins[name].grad if name in stand_ins else None for name in self.weights),
        ]

    def _split(self, rows: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(rows.split(self._size), targets.split(self._size), strict=True)

    def _casting(self, uses_cache: bool) -> AbstractContextManager[Any]:
        return torch.autocast(
            self._device_type, self._dtype, enabled=self._is_cast, cache_enabled=uses_cache
        )

    @contextmanager
    def _restored_rng_state(self) -> Iterator[None]:
        of_cpu, devices, states = self._states
        with torch.random.fork_rng(devices, device_type=self._device_type):
            torch.set_rng_state(of_cpu)
            set_device_states(devices, states, device_type=self._device_type)
            yield


def _run_with(head: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    logits: Tensor = functional_call(head, weights, (x,))
    return logits


def _around_chunks() -> AbstractContextManager[Any]:
    around = ACTIVE_SETTINGS.latest(ChunkCallbacks)
    return nullcontext() if around is None else around.context()


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the chunks' losses."""

    @staticmethod
    def forward(
        ctx: Any, chunks: _Chunks, rows: Tensor, targets: Tensor, anchor: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, targets)
        ctx.chunks = chunks
        chunks.keep_generators(rows)
        return chunks.sum_losses(rows, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, targets = ctx.saved_tensors
        gradients = ctx.chunks.recompute_and_backward(rows, targets, grad, ctx.needs_input_grad[1])
        return None, gradients[0], None, None, *gradients[1:]
