"""Two processes on one device: a step of each schedule; and multiprocessors that are held.

The executor, the transport and the stores are those of a fit; the Trainer and its strategy are left
out, so that a hang is theirs.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.benchmarks.gpu_parts import (
    Model,
    all_offloaded,
    call_step,
    difference,
    gradients,
    offloading_memory,
    schedules,
)
from examples.benchmarks.gpu_process import (
    Function,
    compile_kernel,
    error_of,
    is_accelerated,
    rows_of,
    run_two,
)
from lightning_pipeoffload.runtime import forked_randomness
from lightning_pipeoffload.runtime.batch import batch_size
from lightning_pipeoffload.runtime.comm import ProcessGroupTransport, RankMesh
from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.device import ActionTimer
from lightning_pipeoffload.runtime.run import Executor, Pipeline, split_into_microbatches
from lightning_pipeoffload.runtime.step import set_indices_and_weights
from lightning_pipeoffload.schedule import COPIES, Schedule, build, lower, serialize_microbatches

NUM_MICROBATCHES = 4


def two_ranks(device: torch.device) -> Iterator[str]:
    """Two processes give the gradients of one, by every schedule, over gloo."""
    yield from in_two_processes(be_rank_over_gloo, device)


def be_rank_over_gloo(device: torch.device) -> Iterator[str]:
    """Be one of them."""
    rank = int(os.environ["NODE_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    yield from steps_of_schedules(rank, device, names_for(device))
    dist.destroy_process_group()


def in_two_processes(
    function: Function, device: torch.device, seconds: float = 40, **environment: str
) -> Iterator[str]:
    """Run both ranks; yield how many steps were right, and raise where the last one has stopped."""
    both = run_two(function, device, seconds, environment)
    rows = [rows_of(said) for said in both]
    done = min(sum("differ" in row for row in own) for own in rows)
    yield f"{done} steps over two processes have the gradients of one"
    if any(own[-1:] != [_END] for own in rows):
        ends = [f"{own[-1:]} {error_of(said)}" for own, said in zip(rows, both, strict=True)]
        raise RuntimeError(f"the two ended with {ends}")


_END = "that was all"


BUSIEST = ["zb_v", "interleaved_1f1b", "1f1b"]
"""The schedules with most messages at once."""


def names_for(device: torch.device) -> list[str]:
    """Return all schedules, the busiest first; on the CPU those alone."""
    return [*BUSIEST, *(n for n in schedules() if n not in BUSIEST and is_accelerated(device))]


def steps_of_schedules(
    global_rank: int, device: torch.device, names: Sequence[str]
) -> Iterator[str]:
    """Compare the gradients of a step of each schedule, with and without offload."""
    torch.manual_seed(0)
    model = Model(64, 8, 16).double().to(device)
    batch = model.batch(NUM_MICROBATCHES)
    expected: dict[str, Tensor] = {}
    for name in names:
        schedule = build(name, 2, NUM_MICROBATCHES)
        mesh = RankMesh(schedule, global_rank)
        mesh.device = device
        transport = ProcessGroupTransport(mesh, {(0, 1), (1, 0)}, device)
        says_offload = any(action.kind in COPIES for actions in schedule for action in actions)
        plans = {"as it is": schedule}
        if not says_offload:
            plans["all offloaded"] = all_offloaded(schedule)
        for way, plan in plans.items():
            how = f"{name}, {way}"
            yield f"{how}: begins"
            found = gradients_of_rank(mesh.rank, schedule, plan, transport, model, batch)
            # Afterwards, for the first steps of the process are to find the device cold.
            expected = expected or gradients(model, batch, build("gpipe", 1, NUM_MICROBATCHES))
            error = difference(found, {name: expected[name] for name in found})
            yield f"{how}: gradients differ by {error:.1e}"
            assert error < 1e-9
    yield _END


def gradients_of_rank(
    rank: int,
    schedule: Schedule,
    plan: Schedule,
    transport: ProcessGroupTransport,
    model: nn.Module,
    batch: Tensor,
) -> dict[str, Tensor]:
    """Return a rank's gradients of a plan's step; one of one microbatch at a time comes first."""
    device = batch.device
    pipeline = Pipeline(copy.deepcopy(model), rank, CutSettings(schedule.placement), device)
    memory = offloading_memory(device)
    executor = Executor(rank, pipeline.stages, transport, ActionTimer(device), memory)
    for measures, step in ((True, serialize_microbatches(schedule)), (False, plan)):
        slices = split_into_microbatches(
            pipeline, batch, 1, lambda part, _: call_step(pipeline.module, part), "train", 0
        )
        if not pipeline.committed:
            pipeline.commit()
        executor.stages = pipeline.stages
        pipeline.module.zero_grad()
        memory.set_measure_all(measures)
        with forked_randomness():
            weights = [batch_size(cut.part) / batch_size(batch) for cut in slices]
            executor.run(lower(step), set_indices_and_weights(slices, weights))
    owned = pipeline.tensors.local_tensors().items()
    return {name: t.grad for name, t in owned if t.grad is not None}


_HOLD = """
extern "C" __global__ void hold(volatile int* released) {
    if (threadIdx.x == 0) { while (!*released) { } }
    __syncthreads();
}
"""


def held_multiprocessors(device: torch.device) -> Iterator[str]:
    """How much slower products are while blocks of threads spin, as NCCL's open receives do."""
    size = 4096 if is_accelerated(device) else 64
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    alone = _seconds_of(lambda: left @ left)
    for num_held in (0, 1, 2, 4, 8, 16):
        with _holding(num_held, device):
            slower = _seconds_of(lambda: left @ left) / alone
        yield f"{num_held} blocks of threads spin: products take {slower:.2f} of their time"


def _seconds_of(run: Callable[[], Any], repetitions: int = 20) -> float:
    run()
    _synchronize()
    started = time.perf_counter()
    for _ in range(repetitions):
        run()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    """Wait for the current stream: not for the device, where something may spin."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


@contextmanager
def _holding(num_blocks: int, device: torch.device) -> Iterator[None]:
    """Let so many blocks of 512 threads spin meanwhile."""
    if not num_blocks or not is_accelerated(device):
        yield
        return
    hold = compile_kernel(_HOLD, "hold")
    released = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    stream = torch.Stream(device, priority=-1)
    with stream:
        _spin(hold, num_blocks, released)
    try:
        yield
    finally:
        released.fill_(1)
        stream.synchronize()


def _spin(hold: Any, num_blocks: int, released: Tensor) -> None:
    """Let blocks of 512 threads spin on the current stream until a number on the host is set."""
    # With the shared memory of NCCL's, so that products find no room next to one. As there, few
    # threads poll: if all did, their reads of the host's memory would hold up launches.
    hold((num_blocks, 1, 1), (512, 1, 1), (released,), shared_mem=47 << 10)
