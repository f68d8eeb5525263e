"""What the stages cost on this machine, from the first steps: seconds, bytes, and copies.

Each rank measures its own stages; together they are the costs that a plan for this machine is made
with, so that k = (offload + reload) / (F + B + W) is measured too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType

from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.measure.copy_speed import CopySpeed
from lightning_pipeoffload.schedule import Costs, Kind


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage and one microbatch; the fields of :class:`.Costs` in seconds and bytes."""

    forward: float
    backward_input: float
    backward_weight: float
    activation: int
    weight_input: int
    weight_residue: int
    offload: float
    reload: float


@dataclass(frozen=True)
class RankCosts:
    """What one rank measured.

    Attributes:
        stages: The stages of this rank, by index.
        copy_lanes: Copies that its device makes at a time.
        hops: Seconds from a stage to the next one on another rank, by index; others are not known.
    """

    stages: Mapping[int, StageCosts]
    copy_lanes: int
    hops: Mapping[int, float]


def measure_costs(
    executor: Executor, speed: CopySpeed, hops: Mapping[int, float] = MappingProxyType({})
) -> RankCosts:
    """Take the medians of the steps so far.

    Args:
        executor: The executor of this rank, after a step or more.
        speed: The speed of its copies.
        hops: Seconds from its stages to those on other ranks.
    """
    seconds = executor.timer.action_seconds()
    stages = {index: _costs_of(executor, index, seconds, speed) for index in executor.stages}
    return RankCosts(stages, speed.num_lanes, hops)


def _costs_of(
    executor: Executor, index: int, seconds: Mapping[tuple[Kind, int], float], speed: CopySpeed
) -> StageCosts:
    memory = executor.stages[index].memory
    activation = memory.activation_bytes or 0
    # A fused backward is one measurement; where in it B ends and W begins changes no plan.
    half = seconds.get((Kind.BW, index), 0.0) / 2
    return StageCosts(
        forward=seconds.get((Kind.F, index), 0.0),
        backward_input=seconds.get((Kind.B, index), half),
        backward_weight=seconds.get((Kind.W, index), half),
        activation=activation,
        weight_input=memory.weight_input_bytes or 0,
        weight_residue=memory.residue_bytes or 0,
        offload=activation / speed.to_host * speed.slowed_by,
        reload=activation / speed.to_device * speed.slowed_by,
    )


def slowest_costs(of_replicas: Sequence[RankCosts]) -> RankCosts:
    """Return the most that one rank's counterparts in all replicas have measured of each cost."""
    first, stages = of_replicas[0], {}
    for index in first.stages:
        found = (astuple(replica.stages[index]) for replica in of_replicas)
        stages[index] = StageCosts(*map(max, zip(*found, strict=True)))
    hops = {index: max(replica.hops[index] for replica in of_replicas) for index in first.hops}
    return RankCosts(stages, min(replica.copy_lanes for replica in of_replicas), hops)


def join_costs(of_ranks: Iterable[RankCosts]) -> Costs:
    """Put the ranks' stages together, in the order of the model."""
    ranks = list(of_ranks)
    by_index = {index: stage for rank in ranks for index, stage in rank.stages.items()}
    stages = [by_index[index] for index in sorted(by_index)]
    hops = {index: seconds for rank in ranks for index, seconds in rank.hops.items()}
    return Costs(
        forward=[stage.forward for stage in stages],
        backward_input=[stage.backward_input for stage in stages],
        backward_weight=[stage.backward_weight for stage in stages],
        communication=[hops.get(index, 0.0) for index in sorted(by_index)],
        activation=[stage.activation for stage in stages],
        weight_input=[stage.weight_input for stage in stages],
        weight_residue=[stage.weight_residue for stage in stages],
        offload=[stage.offload for stage in stages],
        reload=[stage.reload for stage in stages],
        copy_lanes=min(rank.copy_lanes for rank in ranks),
    )
