"""How long a message takes from one rank to the next, measured with the messages of a step.

The rank that holds a stage sends what the stage sends on, and the next rank sends it back; half of
that time is the hop. Edge after edge, so that no message shares its way with another one.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.timing import finished_at
from lightning_pipeoffload.runtime.transport import Transport
from lightning_pipeoffload.schedule import Action, Kind, Schedule

_REPETITIONS = 3


def measure_hops(executor: Executor, schedule: Schedule, device: torch.device) -> dict[int, float]:
    """Return the seconds from each stage of this rank to a next one on another rank.

    All ranks call it, between two steps.

    Args:
        executor: The executor of this rank, after a step.
        schedule: Which rank has which stage.
        device: The device of the messages.
    """
    seconds = {}
    for stage in filter(schedule.crosses_ranks, range(schedule.num_stages - 1)):
        sender, receiver = schedule.rank_of(stage), schedule.rank_of(stage + 1)
        if executor.rank == sender:
            specs = executor.stages[stage].payload_out(executor.last_microbatch)
            tensors = [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in specs]
            seconds[stage] = time_hop(executor.transport, stage, receiver, tensors)
        elif executor.rank == receiver:
            specs = executor.stages[stage + 1].payload_in(executor.last_microbatch)
            answer_hop(executor.transport, stage + 1, sender, specs)
    return seconds


def time_hop(transport: Transport, stage: int, peer: int, tensors: list[Tensor]) -> float:
    """Return the seconds of a hop from ``stage`` to the next one, whose rank must answer.

    Args:
        transport: The messages to the other ranks.
        stage: The stage of this rank.
        peer: The rank of the next stage.
        tensors: Tensors as the stage sends them on.
    """
    specs = [TensorSpec(tensor.shape, tensor.dtype, False) for tensor in tensors]
    seconds = []
    for repetition in range(1 + _REPETITIONS):
        receive = Action(Kind.RECV_B, stage, repetition)
        # Before the post: NCCL receives in a kernel, for whose end this would wait, too.
        started = finished_at()
        transport.post(receive, peer, specs)
        transport.send(Action(Kind.SEND_F, stage, repetition), peer, tensors)
        transport.wait(receive)
        seconds.append(finished_at() - started)
    transport.finish_step()
    return median(seconds[1:]) / 2  # the first one waits until the peer has come here


def answer_hop(transport: Transport, stage: int, peer: int, specs: list[TensorSpec]) -> None:
    """Send back what comes from the stage before ``stage``, whose rank measures its hop.

    Args:
        transport: The messages to the other ranks.
        stage: The stage of this rank.
        peer: The rank of the stage before.
        specs: Shapes and dtypes of what that stage sends on.
    """
    for repetition in range(1 + _REPETITIONS):
        receive = Action(Kind.RECV_F, stage, repetition)
        transport.post(receive, peer, specs)
        tensors = transport.wait(receive)
        transport.send(Action(Kind.SEND_B, stage, repetition), peer, tensors)
    transport.finish_step()
