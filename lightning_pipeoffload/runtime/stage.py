"""One stage of the user's module: F, B and W of a microbatch.

F calls the user's own step. Blocks before the stage's first are not run, but for the last of them,
which hands on what the previous stage sent; after the stage's last block a private exit leaves the
step with its output. Only the last stage comes to the head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map  # private: see shape_only

from lightning_pipeoffload.runtime.block_chain import BlockChain
from lightning_pipeoffload.runtime.ownership import Ownership
from lightning_pipeoffload.runtime.partition import Stage
from lightning_pipeoffload.runtime.probe import BlockOutput, TensorSpec, users_line
from lightning_pipeoffload.runtime.randomness import mix_seed, seed_all, seed_torch
from lightning_pipeoffload.runtime.saved_memory import SavedMemory
from lightning_pipeoffload.runtime.shape_only import (
    ShapeOnly,
    ValueNeededError,
    describe,
    dropping_writes,
    shape_only_leaves,
)
from lightning_pipeoffload.runtime.weight_grad import WeightGradQueue, deferring


@dataclass
class Microbatch:
    """One slice of the batch, and what the step needs to know of it.

    Attributes:
        index: its place in the batch.
        part: its samples.
        run: calls the user's step on it.
        outputs: what each block hands on, from the probe of its shapes.
        device: of its tensors.
        seed: of all its random numbers.
        weight: its share of the batch's loss, over the batches that accumulate.
        differentiate: starts the backward from the weighted loss.
    """

    index: int
    part: Any
    run: Callable[[], Any]
    outputs: list[BlockOutput]
    device: torch.device
    seed: int = 0
    weight: float = 1.0
    differentiate: Callable[[Tensor], None] = Tensor.backward


class StageExit(BaseException):
    """Leaves the user's step behind the stage's last block."""

    def __init__(self, output: Any) -> None:
        self.output = output


@dataclass
class _Received:
    """What came from the previous stage, and the gradients that go back."""

    specs: list[TensorSpec]
    device: torch.device | None = None
    gradients: tuple[Tensor | None, ...] = ()


@dataclass
class _Alive:
    """What a stage keeps of one microbatch between its F and its W."""

    received: _Received
    queue: WeightGradQueue
    loss: Tensor | None = None
    sent: list[GradientEdge] = field(default_factory=list)


class StageRunner:
    """Runs F, B and W of one stage.

    Args:
        stage: its part of the model.
        num_stages: of the whole model.
        chain: the blocks of the user's module.
        ownership: the rank's parameters.
    """

    def __init__(
        self, stage: Stage, num_stages: int, chain: BlockChain, ownership: Ownership
    ) -> None:
        self.stage = stage
        self.is_first = stage.index == 0
        self.is_last = stage.index == num_stages - 1
        self.chain = chain
        self.ownership = ownership
        self.memory = SavedMemory(ownership)
        self._alive: dict[int, _Alive] = {}

    @property
    def num_alive(self) -> int:
        """Microbatches between the end of their F and the end of their W."""
        return len(self._alive)

    def payload_in(self, microbatch: Microbatch) -> list[TensorSpec]:
        """What the previous stage sends."""
        return [] if self.is_first else microbatch.outputs[self.stage.blocks.start - 1].payload

    def payload_out(self, microbatch: Microbatch) -> list[TensorSpec]:
        """What this stage sends on."""
        return [] if self.is_last else microbatch.outputs[self.stage.blocks.stop - 1].payload

    def forward(self, microbatch: Microbatch, tensors: list[Tensor], keep: bool) -> Any:
        """Run F.

        Args:
            microbatch: what to run.
            tensors: what the previous stage sent.
            keep: a backward follows.

        Returns:
            A list of the tensors for the next stage; on the last stage what the user's step
            returned.
        """
        alive = _Alive(_Received(self.payload_in(microbatch)), WeightGradQueue())
        step = _StagePass(self, microbatch, tensors, alive.received if keep else None)
        with self._recording(alive.queue) if keep else nullcontext():
            output = step.run()
        if keep:
            self._alive[microbatch.index] = alive
        if self.is_last:
            alive.loss = _loss_of(output)
            return tree_map(_detach, output) if keep else output
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._check_payload(leaves, self.payload_out(microbatch))
        # The edge, not the tensor: the output's memory may go as soon as it is sent.
        alive.sent = [get_gradient_edge(leaf) for leaf in leaves if leaf.requires_grad]
        return [leaf.detach() for leaf in leaves]

    def backward(
        self, microbatch: Microbatch, gradients: list[Tensor], fused: bool = False
    ) -> list[Tensor]:
        """Run B, or BW if ``fused``.

        Args:
            microbatch: what to run.
            gradients: of the tensors sent on that require one, in their order; none on the last
            stage.
            fused: compute the weight gradients too.

        Returns:
            The gradients of the tensors received that require one, in their order.
        """
        alive = self._alive[microbatch.index]
        alive.queue.immediate = fused
        with deferring(alive.queue):
            if alive.sent:
                torch.autograd.backward(alive.sent, gradients)
            elif alive.loss is not None and alive.loss.requires_grad:
                microbatch.differentiate(alive.loss * microbatch.weight)
        self.memory.measure_backward(alive.queue)
        received, alive.received = alive.received, _Received([])
        alive.sent, alive.loss = [], None
        if fused:
            self.weight(microbatch)
        return _gradients_to_send(received)

    def weight(self, microbatch: Microbatch) -> None:
        """Run W."""
        self._alive.pop(microbatch.index).queue.run()

    @contextmanager
    def _recording(self, queue: WeightGradQueue) -> Iterator[None]:
        with deferring(queue), self.memory.measuring_forward():
            yield

    def _check_payload(self, leaves: list[Tensor], specs: list[TensorSpec]) -> None:
        found = [TensorSpec(leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves]
        if found != specs and (torch.is_grad_enabled() or not _same_shapes(found, specs)):
            name = self.chain.block_name(self.stage.blocks.stop - 1)
            raise RuntimeError(
                f"{name} returned {found} where {specs} was expected from the shapes of the batch; "
                f"what a block returns must not depend on the values of its input"
            )


class _StagePass:
    """One F: decides what the call of each block does."""

    def __init__(
        self,
        runner: StageRunner,
        microbatch: Microbatch,
        tensors: list[Tensor],
        received: _Received | None,
    ) -> None:
        self._runner = runner
        self._microbatch = microbatch
        self._tensors = tensors
        self._received = received
        self._left = False

    def run(self) -> Any:
        """Call the step; return the last owned block's output, or the step's on the last stage."""
        runner = self._runner
        seed_all(mix_seed(self._microbatch.seed, 0))
        if runner.is_first:
            runner.ownership.show(runner.stage.index)
        else:
            runner.ownership.hide()
        try:
            with runner.chain.running(self):
                result = self._microbatch.run()
        except StageExit as leaving:
            leaving.__traceback__ = (
                None  # it keeps every frame of the step, and so every activation
            )
            return leaving.output
        except ValueNeededError as error:
            raise ValueError(self._explain(error)) from None
        finally:
            runner.ownership.restore()
        return self._check_result(result)

    def call_block(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        """Run an owned block; hand on what was received; else return shapes."""
        blocks = self._runner.stage.blocks
        if index >= blocks.start:
            return self._run_owned(index, call, arguments)
        if index == blocks.start - 1:
            output = self._hand_over(index, call)
            self._runner.ownership.show(self._runner.stage.index)
            self._seed_after(index)
            return output
        return self._shapes_of(index, call)

    def _run_owned(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        for leaf in shape_only_leaves(arguments):
            raise ValueNeededError(self._runner.chain.block_name(index), leaf.origins)
        output = call()
        self._seed_after(index)
        if index == self._runner.stage.blocks.stop - 1 and not self._runner.is_last:
            self._left = True
            raise StageExit(output)
        return output

    def _seed_after(self, index: int) -> None:
        # Not before the block: a checkpoint around its call has saved the generator by then.
        seed_torch(mix_seed(self._microbatch.seed, index + 1))

    def _hand_over(self, index: int, call: Callable[[], Any]) -> Any:
        tensors, self._tensors = self._tensors, []
        entered = iter(tensors if self._received is None else _enter(tensors, self._received))
        return self._fill(index, call, entered)

    def _shapes_of(self, index: int, call: Callable[[], Any]) -> Any:
        origins = frozenset((f"the output of {self._runner.chain.block_name(index)}",))
        device = self._microbatch.device
        shapes = (
            ShapeOnly(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), device, origins)
            for spec in self._microbatch.outputs[index].payload
        )
        return self._fill(index, call, shapes)

    def _fill(self, index: int, call: Callable[[], Any], tensors: Iterator[Tensor]) -> Any:
        output = self._microbatch.outputs[index]
        if not output.is_template:
            with torch.no_grad(), dropping_writes(lambda tensor: True):
                output = BlockOutput.of(call())
        return output.fill(tensors)

    def _check_result(self, result: Any) -> Any:
        if self._left:
            raise RuntimeError(
                "the step caught the signal by which a stage leaves it, so it has an `except:` or "
                "`except BaseException:` around its blocks; use `except Exception:`"
            )
        for leaf in shape_only_leaves(result):
            raise ValueError(self._explain(ValueNeededError("the step's result", leaf.origins)))
        return result

    def _explain(self, error: ValueNeededError) -> str:
        line = users_line(error)
        return (
            f"{error.operation} needs the value of {describe(error.origins)}, which is not on "
            f"stage {self._runner.stage.index}{f' ({line})' if line else ''}; pass it on through "
            f"the blocks, or compute it from the batch"
        )


class _Enter(torch.autograd.Function):
    """Brings what was received into the stage's graph and keeps its gradients.

    The tensors come in beside autograd, which so makes them fresh ones that may be written in
    place.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensors: list[Tensor], received: _Received
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.received = received
        entered = tuple(tensor.detach() for tensor in tensors)
        pairs = zip(entered, received.specs, strict=True)
        ctx.mark_non_differentiable(*(t for t, spec in pairs if not spec.requires_grad))
        return entered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.received.gradients = gradients
        return None, None, None


def _enter(tensors: list[Tensor], received: _Received) -> tuple[Tensor, ...]:
    received.device = tensors[0].device if tensors else None
    anchor = torch.empty(0, requires_grad=True)
    return _Enter.apply(anchor, tensors, received)


def _gradients_to_send(received: _Received) -> list[Tensor]:
    """Return a gradient for each tensor that requires one, zero where nothing used it."""
    gradients = received.gradients or (None,) * len(received.specs)
    return [
        torch.zeros(spec.shape, dtype=spec.dtype, device=received.device) if grad is None else grad
        for spec, grad in zip(received.specs, gradients, strict=True)
        if spec.requires_grad
    ]


def _loss_of(result: Any) -> Tensor | None:
    """Find the loss in what a step returned, as Lightning does."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    return loss if isinstance(loss, Tensor) else None


def _same_shapes(found: list[TensorSpec], specs: list[TensorSpec]) -> bool:
    return [(s.shape, s.dtype) for s in found] == [(s.shape, s.dtype) for s in specs]


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
