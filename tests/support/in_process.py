"""All ranks of a pipeline in one process, taking turns, each with a copy of the module.

Benchmarks on a single GPU use it too, on which NCCL refuses two ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import forked_randomness
from lightning_pipeoffload.runtime.batch import batch_size
from lightning_pipeoffload.runtime.comm import Transport
from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.device import ActionTimer
from lightning_pipeoffload.runtime.run import (
    ActivationMemory,
    Executor,
    Pipeline,
    split_into_microbatches,
)
from lightning_pipeoffload.runtime.step import (
    Microbatch,
    set_indices_and_weights,
    split_into_slices,
)
from lightning_pipeoffload.runtime.users_code import StepCall, copy_batch
from lightning_pipeoffload.schedule import (
    RECVS,
    Action,
    Schedule,
    keep_microbatches,
    lower,
    recv_of,
)


class InProcessTransport(Transport):
    """Between ranks that are in one process."""

    def __init__(self) -> None:
        self._arrived: defaultdict[Action, deque[list[Tensor]]] = defaultdict(deque)

    def has_arrived(self, receive: Action) -> bool:
        return bool(self._arrived[receive])

    def wait(self, receive: Action) -> list[Tensor]:
        if not self._arrived[receive]:
            raise RuntimeError(f"{receive} is not there yet; run the rank that sends it first")
        return self._arrived[receive].popleft()

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        self._arrived[recv_of(send)].append(tensors)


class InProcessPipeline:
    """Runs whole steps of a schedule.

    Args:
        module: The user's module; it is copied for each rank.
        schedule: The schedule of compute actions.
        step: Calls the user's step: ``step(module, microbatch)`` returns the loss.
        memory: Makes the activation memory of a rank on a device.
        device: The device of all ranks; None: the module's device.
        options: ``blocks``, ``split`` and ``recompute`` of :class:`.pipeline.CutSettings`.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        step: Callable[[nn.Module, Any], Any],
        memory: Callable[[torch.device], ActivationMemory] = ActivationMemory.for_device,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        self._schedule, self.plan = schedule, lower(schedule)
        options["num_sequence_slices"] = schedule.num_sequence_slices
        self._step = step
        device = next(module.parameters()).device if device is None else device
        self.ranks = [
            Pipeline(
                copy.deepcopy(module), rank, CutSettings(schedule.placement, **options), device
            )
            for rank in range(schedule.num_ranks)
        ]
        self._transport = InProcessTransport()
        self.executors = [
            Executor(rank, {}, self._transport, ActionTimer(device), memory(device))
            for rank in range(schedule.num_ranks)
        ]

    def run(self, batch: Any, size: int, seed: int = 0) -> list[Any]:
        """Run one step, accumulate gradients, and sum those of shared parameters over the ranks.

        The loss of each microbatch is weighted by its share of the samples.

        Args:
            batch: Any pytree.
            size: Samples of a microbatch.
            seed: The seed of the batch's random numbers.

        Returns:
            The return value of the step for each microbatch.
        """
        runs = []
        for pipeline, executor in zip(self.ranks, self.executors, strict=True):
            batch_of_rank = batch if pipeline is self.ranks[0] else copy_batch(batch)
            step = partial(_call, self._step, pipeline.module)
            slices = split_into_microbatches(pipeline, batch_of_rank, size, step, "train", seed)
            weights = [cut.num_samples / batch_size(batch) for cut in slices]
            microbatches = split_into_slices(set_indices_and_weights(slices, weights))
            plan = self.plan
            if slices[0].num_slices < plan.num_sequence_slices:  # of short sequences
                plan = lower(keep_microbatches(self._schedule, len(slices), slices[0].num_slices))
            executor.stages = pipeline.stages
            runs.append(_actions(executor, plan, microbatches))
        for pipeline in self.ranks:
            if not pipeline.committed:
                pipeline.commit()
        with forked_randomness():
            _run_in_turns(runs, self._transport)
        self._sum_shared_gradients()
        return next(e.results for e in self.executors if e.results)

    def named_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of all ranks by parameter name."""
        return {
            name: tensor.grad
            for pipeline in self.ranks
            for name, tensor in pipeline.tensors.local_tensors().items()
            if isinstance(tensor, nn.Parameter)
        }

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of all ranks by name."""
        return {
            name: tensor
            for pipeline in self.ranks
            for name, tensor in pipeline.tensors.local_tensors().items()
            if not isinstance(tensor, nn.Parameter)
        }

    def _sum_shared_gradients(self) -> None:
        for pipeline in self.ranks:
            pipeline.sum_stage_gradients()
        shared = [pipeline.tensors.shared_parameters() for pipeline in self.ranks]
        keys = sorted({(key, tuple(ranks)) for entries in shared for key, _, ranks in entries})
        for key, _ in keys:
            parameters = [p for entries in shared for k, p, _ in entries if k == key]
            gradients = [p.grad for p in parameters if p.grad is not None]
            for parameter in parameters if gradients else []:
                parameter.grad = torch.stack(gradients).sum(0)


def _call(
    step: Callable[[nn.Module, Any], Any], module: nn.Module, part: Any, call: StepCall
) -> Any:
    return step(module, part)


def _actions(
    executor: Executor, plan: Schedule, microbatches: Sequence[Microbatch]
) -> Iterator[Action]:
    """Execute action by action; yield each before it runs."""
    executor.start(plan, microbatches)
    executor.expect_messages(plan[executor.rank])
    for action in plan[executor.rank]:
        yield action
        executor.execute(action)
    executor.end()


def _run_in_turns(ranks: Sequence[Iterator[Action]], transport: InProcessTransport) -> None:
    """Run the ranks in turns, each until it has to wait for a message.

    Args:
        ranks: The actions of each rank.
        transport: The transport of all of them.

    Raises:
        RuntimeError: All ranks wait for messages, which a valid plan excludes.
    """
    waiting = [next(actions, None) for actions in ranks]
    while any(waiting):
        before = waiting
        pairs = zip(ranks, waiting, strict=True)
        waiting = [_advance(transport, actions, action) for actions, action in pairs]
        if waiting == before:
            raise RuntimeError(f"no rank can go on from {', '.join(map(str, before))}")


def _advance(
    transport: InProcessTransport, actions: Iterator[Action], action: Action | None
) -> Action | None:
    """Run from ``action`` on; return the action that has to wait, None at the end."""
    while action is not None:
        if action.kind in RECVS and not transport.has_arrived(action):
            break
        action = next(actions, None)
    return action
