"""F, B and W of a stage's blocks, captured as graphs of an accelerator and replayed.

Each of them is one launch for the host. A graph uses the same memory at every replay, so a block
has graphs for each microbatch that is in flight at once; a microbatch uses them from its F to its
W::

    graphs 0   F0     B0 W0 F2     B2 W2
    graphs 1      F1           B1 W1     F3 ...

The user's code between the blocks runs in each step, as do the seeds of the blocks. A block's own
Python code runs when it is captured and not again: attributes that it reads, parameters and buffers
apart, must not change. A block that cannot be captured runs as it is written, and one line says so.

Blocks are captured at the end of a step: their kernels are loaded by then, no microbatch is in
flight, and the device, for which a capture waits, has no message to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.accelerator import is_on
from lightning_pipeoffload.runtime.compiled.block_compiler import warn_once
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.direct_function import DirectFunction
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.payload import BlockOutput, TensorSpec
from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.users_code.snapshot import unchanged
from lightning_pipeoffload.runtime.weight_grad.node import ANCHOR, saving_hooks
from lightning_pipeoffload.runtime.weight_grad.queue import (
    WeightGradQueue,
    active_queue,
    has_hooks,
)
from lightning_pipeoffload.runtime.weight_grad.regrouping import parameters_of

_COMPARED = (TensorSpec, type(None), bool, int, float, str, torch.dtype, torch.device)


class GraphPool(Protocol):
    """Memory that graphs share, which are replayed in the order of their capture."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture ``run`` in a device graph; return a function that replays it."""


class CudaGraphPool:
    """The memory of some ``torch.cuda.CUDAGraph``; nothing is computed during a capture."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may call the driver meanwhile, as NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            run()
        return graph.replay


class _BlockGraphs:
    """The graphs of one block for one microbatch in flight; ``sums`` is shared by all of a stage.

    Raises:
        RuntimeError: The block does something that cannot be captured.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        arguments: BlockOutput,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        sums: dict[Tensor, Tensor],
        pool: GraphPool,
    ) -> None:
        self.is_free = True
        self._inputs = inputs
        self._sums = sums
        self._queue = WeightGradQueue()
        self._capture = pool.capture
        kept = [parameter.grad for parameter in parameters]
        try:
            outputs = self._capture_forward(call, *arguments.fill(inputs))
            self._capture_backward(outputs, parameters)
            self._capture_weight()
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def _capture_forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
        versions = [tensor._version for tensor in self._inputs]
        returned: list[Any] = []
        with torch.enable_grad(), self._queue:
            self._forward = self._capture(lambda: returned.append(call(*args, **kwargs)))
        if [tensor._version for tensor in self._inputs] != versions:
            raise RuntimeError("it writes its input in place")
        self._output = BlockOutput.of(returned[0])
        outputs = tensors_in(returned[0])
        if not any(tensor.requires_grad for tensor in outputs):
            raise RuntimeError("its result needs no gradient")
        self._outputs = [tensor.detach() for tensor in outputs]
        return outputs

    def _capture_backward(self, outputs: list[Tensor], parameters: Sequence[Tensor]) -> None:
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        self._given = [torch.zeros_like(tensor) for tensor in trained]
        for parameter in parameters:
            parameter.grad = None
        with self._queue, torch.autograd.set_multithreading_enabled(False):
            self._backward = self._capture(lambda: torch.autograd.backward(trained, self._given))
        self._returned = [tensor.grad for tensor in self._inputs]
        for tensor in self._inputs:
            tensor.grad = None
        found = [(parameter, parameter.grad) for parameter in parameters]
        self._found = [(p, gradient) for p, gradient in found if gradient is not None]

    def _capture_weight(self) -> None:
        self._waiting = self._queue.take()
        weights = (weight for entry in self._waiting for weight in entry.weights)
        self._weights = tuple(dict.fromkeys(p for w in weights for p in parameters_of(w)))
        for weight in self._weights:
            if weight not in self._sums:
                self._sums[weight] = torch.zeros_like(weight)
            weight.grad = self._sums[weight]
        with torch.no_grad():
            self._weight = self._capture(self._compute)

    def _compute(self) -> None:
        for entry in self._waiting:
            entry.compute()

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run F and return the block's output."""
        self.is_free = False
        return self._output.fill(_Replayed.apply(ANCHOR, self, *tensors))

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Replay F; return the results, and those of them that get no gradient."""
        for own, tensor in zip(self._inputs, tensors, strict=True):
            own.copy_(tensor)
        self._forward()
        # Copies: another stage, or a message, may read them for longer than these graphs are taken.
        results = tuple(tensor.clone() for tensor in self._outputs)
        specs = zip(results, self._output.payload, strict=True)
        return results, [result for result, spec in specs if not spec.requires_grad]

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay B, and leave W to the queue in force; return the gradients of the inputs."""
        specs = zip(gradients, self._output.payload, strict=True)
        needed = (gradient for gradient, spec in specs if spec.requires_grad)
        for own, gradient in zip(self._given, needed, strict=True):
            own.copy_(gradient)
        self._backward()
        for parameter, found in self._found:  # as autograd adds them
            if parameter.grad is None:
                parameter.grad = found.clone()
            else:
                parameter.grad.add_(found)
        queue = active_queue()
        assert queue is not None  # as in F
        queue.put(self.weight, self._weights, self._queue.flops)
        return [None if gradient is None else gradient.clone() for gradient in self._returned]

    def weight(self) -> None:
        """Run W: a replay, unless a weight has no gradient yet.

        Its first one is a product, and a sum with 0 may be rounded in another way.
        """
        if all(weight.grad is self._sums[weight] for weight in self._weights):
            self._weight()
        else:
            self._compute()
            for weight in self._weights:
                assert weight.grad is not None
                weight.grad = self._sums[weight].copy_(weight.grad)
        self.is_free = True


class _Replayed(DirectFunction):
    """The node of a block that is replayed; the anchor stands for its parameters."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, graphs: _BlockGraphs, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        results, untrained = graphs.forward(tensors)
        ctx.mark_non_differentiable(*untrained)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graphs.backward(gradients)


class _Block:
    """A block with graphs for calls with the same signature as its first one."""

    def __init__(self, parameters: Iterable[Tensor], args: Any, kwargs: Any) -> None:
        self.parameters = [*parameters]
        self.graphs: list[_BlockGraphs] = []
        self.is_refused = False
        self.first_call = self.describe(args, kwargs)

    def describe(self, args: Any, kwargs: Any) -> tuple[BlockOutput, list[Any], list[Any]]:
        """Return a key of a call; calls with equal keys can share a graph."""
        strides = [tensor.stride() for tensor in tensors_in((args, kwargs))]
        weights = [(weight.data_ptr(), weight.requires_grad) for weight in self.parameters]
        return BlockOutput.of((args, kwargs)), strides, weights

    def make_inputs(self, device: torch.device) -> list[Tensor]:
        """Return tensors like those of the first call."""
        arguments, strides, _ = self.first_call
        made = []
        for spec, stride in zip(arguments.payload, strides, strict=True):
            meta = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device="meta")
            made.append(torch.zeros_like(meta, device=device).requires_grad_(spec.requires_grad))
        return made


class StageGraphs:
    """The graphs of one stage's blocks.

    Args:
        chain: The blocks of the user's module.
        device: The device of the stage.
        shared: Parameters that another stage of the rank uses too.
        make_pool: Makes the memory for the graphs of a block and a microbatch in flight.
    """

    def __init__(
        self,
        chain: BlockChain,
        device: torch.device,
        shared: Iterable[Tensor],
        make_pool: Callable[[], GraphPool],
    ) -> None:
        self._chain = chain
        self._device = device
        self._shared = {*shared}
        self._make_pool = make_pool
        self._sums: dict[Tensor, Tensor] = {}
        self._blocks: dict[int, _Block] = {}

    def call(self, index: int, args: Any, kwargs: Any, record: StepRecord) -> Any:
        """Run a block's F: a replay, if graphs for such a call are free."""
        run = self._chain.plain_call(index)
        # Hooks on saved tensors offload, measure or recompute; a graph has none to give them.
        if active_queue() is None or saving_hooks() is not None:
            return run(*args, **kwargs)
        block = self._blocks.get(index)
        if block is None:
            parameters = self._chain.blocks[index].parameters()
            block = self._blocks[index] = _Block(parameters, args, kwargs)
            self._refuse(index, self._obstacle(index, tensors_in((args, kwargs)), record))
        free = next((graphs for graphs in block.graphs if graphs.is_free), None)
        if free is None or block.first_call != block.describe(args, kwargs):
            return run(*args, **kwargs)
        return free.run(tensors_in((args, kwargs)))

    def capture(self, count: int) -> None:
        """Capture each block that has run, for ``count`` microbatches in flight; none is now."""
        for index, block in self._blocks.items():
            for graphs in block.graphs:
                graphs.is_free = True  # also those of a step that an error has ended
            while not block.is_refused and len(block.graphs) < count:
                try:
                    block.graphs.append(self._capture(index, block))
                except RuntimeError as error:
                    self._refuse(index, str(error).splitlines()[0])

    def _capture(self, index: int, block: _Block) -> _BlockGraphs:
        with forked_randomness(), unchanged(self._chain.blocks[index]):
            call, inputs = self._chain.plain_call(index), block.make_inputs(self._device)
            own = call, block.first_call[0], inputs, block.parameters
            return _BlockGraphs(*own, self._sums, self._make_pool())

    def _obstacle(self, index: int, tensors: list[Tensor], record: StepRecord) -> str:
        block, points = self._blocks[index], (write.point for write in record.writes)
        if torch.is_autocast_enabled(self._device.type):
            return "autocast is on, whose casts graphs cannot share; use precision='bf16-true'"
        if any(point.is_in_block and point.segment == index for point in points):
            return "it writes attributes"
        if any(map(has_hooks, block.parameters)):
            return "a parameter has hooks"
        if not self._shared.isdisjoint(block.parameters):
            return "another stage of the rank uses a parameter too"
        if not all(isinstance(leaf, _COMPARED) for leaf in block.first_call[0].leaves):
            return "it takes arguments other than tensors, numbers and strings"
        if not all(is_on(tensor, self._device) for tensor in tensors):
            return "it takes a tensor of another device"
        return "it takes a tensor twice" if len({*map(id, tensors)}) < len(tensors) else ""

    def _refuse(self, index: int, obstacle: str) -> None:
        if obstacle:
            self._blocks[index].is_refused = True
            name = self._chain.block_name(index)
            warn_once(f"{name} runs as it is written, for it is not captured: {obstacle}")
