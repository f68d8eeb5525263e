"""One rank of a longer pipeline, which runs its part of a plan without the others.

Stages, offload and copies are the real ones; what the others would send comes when the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from lightning_pipeoffload.runtime.absent_neighbours import AbsentNeighbours, delays_of
from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.measure.block_costs import StageCosts, measure_costs
from lightning_pipeoffload.runtime.measure.link_speed import CopySpeed
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.rank_memory import ActivationMemory
from lightning_pipeoffload.runtime.step.batch_slice import BatchSlice, make_microbatches
from lightning_pipeoffload.runtime.timing import ActionTimer, finished_at
from lightning_pipeoffload.schedule import Costs, Schedule, lower, one_at_a_time

CutBatch = Callable[[int], Sequence[BatchSlice]]
"""Returns so many microbatches, as the pipeline has cut them."""


class Rehearsal:
    """Steps of one rank.

    Args:
        pipeline: The rank's part of a module; what is on other ranks may be shapes.
        memory: Where its activations are kept.
        cut_batch: Returns microbatches.
    """

    def __init__(self, pipeline: Pipeline, memory: ActivationMemory, cut_batch: CutBatch) -> None:
        self.pipeline = pipeline
        self.memory = memory
        self._cut_batch = cut_batch

    def run(self, plan: Schedule, costs: Costs | None, num_steps: int) -> float:
        """Run steps of a plan after one to warm up; return the median of their seconds.

        Args:
            plan: A lowered plan.
            costs: What the stages of all ranks cost, by which the others are on time; None: they
                are always ahead.
            num_steps: How many steps count.
        """
        pipeline, device = self.pipeline, self.pipeline.device
        delays = delays_of(plan, pipeline.rank, costs) if costs else {}
        transport = AbsentNeighbours(delays, device)
        microbatches = make_microbatches(self._cut_batch(plan.num_microbatches))
        if not pipeline.committed:
            pipeline.commit()
        timer = ActionTimer(device)
        self.executor = Executor(pipeline.rank, pipeline.stages, transport, timer, self.memory)
        seconds = []
        for _ in range(num_steps + 1):
            self.executor.timer = ActionTimer(device)
            started = finished_at()
            transport.start_step()
            self.executor.run(plan, microbatches)
            seconds.append(finished_at() - started)
            pipeline.module.zero_grad(set_to_none=False)
        return median(seconds[1:])

    def measure_stages(self, schedule: Schedule, speed: CopySpeed) -> dict[int, StageCosts]:
        """Return what each stage of this rank costs, from microbatches one after the other.

        Args:
            schedule: A schedule of a few microbatches over the same stages.
            speed: The speed of copies.
        """
        self.run(lower(one_at_a_time(schedule)), None, 1)
        return dict(measure_costs(self.executor, speed).stages)
