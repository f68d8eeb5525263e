"""Compiled regions whose weight gradients wait for W, and compilation before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS
from lightning_pipeoffload.runtime.compiled.products import WeightSource
from lightning_pipeoffload.runtime.compiled.split_graph import (
    ProductInput,
    SplitGraph,
    SplitProduct,
)
from lightning_pipeoffload.runtime.weight_grad import (
    ANCHOR,
    DeferredCall,
    ReadInput,
    WeightGradQueue,
    active_queue,
    is_deferrable,
    save_input_outside_graph,
    trains_parameters,
)

Region = Callable[..., Any]


class _CompilingAhead:
    """The setting while regions are compiled but not run."""


class _RegionReached(BaseException):
    """Ends the run of a block whose first region has been compiled."""


def stop_if_compiling_ahead() -> None:
    if ACTIVE_SETTINGS.latest(_CompilingAhead) is not None:
        raise _RegionReached


def wrap_compiled_ahead(region: Region) -> Region:
    """Return a region that ends the block's run instead of running, if compiled ahead."""
    if ACTIVE_SETTINGS.latest(_CompilingAhead) is None:
        return region

    @wraps(region)
    def run(*inputs: Any) -> Any:
        stop_if_compiling_ahead()
        return region(*inputs)

    return run


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the first region called within the context, as in training, and skip the rest."""
    try:
        with ACTIVE_SETTINGS.during(_CompilingAhead()), WeightGradQueue(), torch.enable_grad():
            yield
    except _RegionReached:
        pass


class _Run:
    """One run of a region, from its F to its B; ``kept`` are the products' inputs."""

    def __init__(
        self, calls: Sequence[tuple[DeferredCall, ProductInput]], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self.calls = calls
        self.shapes = shapes
        self.kept: dict[ProductInput, ReadInput] = {}
        self._sharing: list[tuple[Tensor, int]] = []

    def keep(self, tensors: Mapping[ProductInput, Tensor], sharing: Iterable[Tensor]) -> None:
        for product_input, tensor in tensors.items():
            self.kept[product_input] = save_input_outside_graph(tensor)
        self._sharing = [(tensor.detach(), tensor._version) for tensor in sharing]

    def defer_weight_grads(self, gradients: Sequence[Tensor | None]) -> None:
        """Queue the weight gradients for W, the last product's first."""
        for tensor, version in self._sharing:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that a compiled region has returned "
                    f"was written in place before the backward that needs it; write a copy of it"
                )
        queue = active_queue()
        inputs = {product_input: read() for product_input, read in self.kept.items()}
        for (call, product_input), gradient in reversed([*zip(self.calls, gradients, strict=True)]):
            if gradient is not None:
                if call.weight._version != call.version:
                    call.refuse_change()
                x, fetch = inputs[product_input]
                if queue is not None:
                    queue.defer(call, x, fetch, gradient)
                else:
                    call.accumulate_weight_grad(fetch() if fetch else x, gradient)


class SplitRegion:
    """A region that runs a compiled split graph; ``whole`` is the compiled original."""

    def __init__(self, graph: SplitGraph, compiled: Region, whole: Region) -> None:
        self._graph = graph
        self._compiled = compiled
        self._whole = whole
        examples = [product.original.example for product in graph.products]
        self._zeros = [torch.zeros((), dtype=e.dtype, device=e.device) for e in examples]
        self._indices = sorted({source.index for source in graph.sources})
        self._product_inputs = [*dict.fromkeys(product.product_input for product in graph.products)]
        self._sharing: list[ProductInput] | None = None

    def __call__(self, *inputs: Any) -> Any:
        stop_if_compiling_ahead()
        if active_queue() is None or not all(
            is_deferrable(inputs[index]) for index in self._indices
        ):
            return self._whole(*inputs)
        graph = self._graph
        weights = {source: source.compute_weight(inputs) for source in graph.sources}
        calls = [
            (_make_call(product, weights), product.product_input) for product in graph.products
        ]
        run = _Run(calls, [product.shape(inputs) for product in graph.products])
        zeros = _Zeros.apply(ANCHOR, run, self._zeros)
        kept = (inputs[index] for index in graph.kept)
        detached = (weight.detach() for weight in weights.values())
        outputs = self._compiled(*kept, *detached, *zeros)
        self._keep(run, inputs, outputs)
        return outputs[: graph.num_outputs]

    def _keep(self, run: _Run, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        places = {"input": inputs, "output": outputs}

        def tensors_of(found: Iterable[ProductInput]) -> dict[ProductInput, Tensor]:
            return {each: places[each.place][each.index] for each in found}

        kept = tensors_of(self._product_inputs)
        if self._sharing is None:  # which memory is shared is decided with the code
            self._sharing = self._find_aliases(kept, inputs, outputs)
        run.keep(kept, tensors_of(self._sharing).values())

    def _find_aliases(
        self, kept: Mapping[ProductInput, Tensor], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> list[ProductInput]:
        shared = {_memory_of(tensor) for each, tensor in kept.items() if each.place == "output"}
        others = {ProductInput("input", index): tensor for index, tensor in enumerate(inputs)}
        for index, tensor in enumerate(outputs[: self._graph.num_outputs]):
            others[ProductInput("output", index)] = tensor
        return [
            place
            for place, tensor in others.items()
            if isinstance(tensor, Tensor) and _memory_of(tensor) in shared
        ]


class _Zeros(torch.autograd.Function):
    """The zeros that are added to a region's products, to get the gradients of the results."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: _Run, zeros: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(zero.expand(shape) for zero, shape in zip(zeros, run.shapes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if trains_parameters():
            ctx.run.defer_weight_grads(gradients)
        # Private: no public API shows it. Inputs that W has used must not stay until B's end.
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.run.kept.clear()
        return None, None, None


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _make_call(product: SplitProduct, weights: Mapping[WeightSource, Tensor]) -> DeferredCall:
    bias = product.original.bias
    call, options = product.original.kind
    return call(weights[product.original.weight], None if bias is None else weights[bias], *options)
