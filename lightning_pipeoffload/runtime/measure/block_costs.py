"""Costs of every block, measured before the first step on microbatches without side effects.

Every rank runs the user's step on the blocks that it has in a first cut, one microbatch at a time,
with real values and messages. Of blocks that are alike (see :mod:`.block_classes`) each rank
measures the first one as a stage of its own; the others between two samples are one stage. The
code after the blocks, the head and the loss, is a stage too if the step can be cut there. The
comparison of samples and sums gives the overhead of an action, and the mean
costs of alike blocks. A stage of any other cut costs the sum of its blocks plus one overhead.
Where few blocks are alike, the stages of the first cut are measured too, for the overhead::

    samples        [ F | block 0 ] [ F | block 1 ] [ F | block 2 | block 3 | block 4 | block 5 ]
    the first cut  [ F | block 0 | block 1 | block 2 ]       [ F | block 3 | block 4 | block 5 ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_pipeoffload.runtime.comm import Transport
from lightning_pipeoffload.runtime.cut import (
    NO_MEMORY_LIMITS,
    CutSettings,
    Stage,
    StageMemoryLimits,
    StepRecord,
    cut,
)
from lightning_pipeoffload.runtime.device import ActionTimer, Devices
from lightning_pipeoffload.runtime.measure.device_speed import fit_slowness
from lightning_pipeoffload.runtime.measure.link_speed import CopySpeed, measure_latencies
from lightning_pipeoffload.runtime.memory import BytesForLaterSlices, SavedMemory
from lightning_pipeoffload.runtime.run import ActivationMemory, Executor, Pipeline
from lightning_pipeoffload.runtime.step import (
    Microbatch,
    forget_casts,
    set_indices_and_weights,
    sharing_casts,
)
from lightning_pipeoffload.runtime.users_code import TRACE, restoring_module
from lightning_pipeoffload.schedule import (
    COMPUTE_TIMES,
    Action,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    Slices,
    compute_seconds,
    device_indices,
    lower,
    serialize_microbatches,
    stages_on,
)

_ONE_BYTE_A_SECOND = CopySpeed(1.0, 1.0, 1.0)
_NUM_MEASURED = 3  # microbatches, of which the median counts

ActionOverhead = Mapping[str, float]
"""Seconds of an action in addition to its blocks, by the field of :class:`.Costs` they are in."""


class StageCosts(NamedTuple):
    """Costs of one stage and one microbatch; the fields of :class:`.Costs` in seconds and bytes."""

    forward: float
    backward_input: float
    backward_weight: float
    activation: int
    weight_input: int
    weight_residue: int
    offload: float
    reload: float

    @classmethod
    def of(cls, slices: Sequence[SliceCosts]) -> StageCosts:
        """Return the costs of a whole microbatch, from those of its slices."""
        return cls(*map(sum, zip(*(part.costs for part in slices), strict=True)))


class SliceCosts(NamedTuple):
    """Costs of a microbatch's slice at a stage, and the memory kept for later slices."""

    costs: StageCosts
    for_later: BytesForLaterSlices


@dataclass(frozen=True)
class RankCosts:
    """One rank's measurements.

    Attributes:
        slices: The costs of each slice of a microbatch at this rank's stages, by their index; where
            sequences are whole there is one.
        copy_lanes: The number of copies that its device makes at a time.
        latencies: P2P latency in seconds, by index of each stage whose next stage is on another
            rank.
        step: Seconds of the optimizer's step on the host, for all stages.
    """

    slices: Mapping[int, Sequence[SliceCosts]]
    copy_lanes: int
    latencies: Mapping[int, float]
    step: float = 0.0

    @property
    def stages(self) -> dict[int, StageCosts]:
        """The costs of this rank's stages, by index."""
        return {index: StageCosts.of(parts) for index, parts in self.slices.items()}


def median_costs(
    executor: Executor,
    speed: CopySpeed,
    latencies: Mapping[int, float] = MappingProxyType({}),
    num_slices: int = 1,
) -> RankCosts:
    """Return the median costs of a microbatch over an executor's steps so far.

    Args:
        executor: Has run training steps; its last plan may be that of an evaluation.
        speed: Of copies.
        latencies: P2P latency in seconds, as in :class:`RankCosts`.
        num_slices: Slices of each microbatch in these steps.
    """
    seconds: Mapping[Any, float] = executor.timer.action_seconds()
    if num_slices > 1:
        seconds = executor.timer.slice_seconds(num_slices)
    slices = {
        index: [
            costs_of_slice(
                stage.memories[place], speed, seconds, (index, place)[: 1 + (num_slices > 1)]
            )
            for place in range(num_slices)
        ]
        for index, stage in executor.stages.items()
    }
    return RankCosts(slices, speed.num_lanes, latencies)


def costs_of_slice(
    memory: SavedMemory,
    speed: CopySpeed = _ONE_BYTE_A_SECOND,
    seconds: Mapping[Any, float] = MappingProxyType({}),
    key: tuple[int, ...] = (),
) -> SliceCosts:
    """Return the costs of one slice of a microbatch at a stage.

    Args:
        memory: The measured bytes.
        speed: Of copies; offload and reload take bytes divided by it.
        seconds: The time of an action, by ``(kind, *key)``; 0 if it is missing.
        key: What follows the kind in the keys of ``seconds``.
    """
    moved = memory.activation_bytes or 0
    # A fused backward is one measurement; no plan depends on how it divides into B and W.
    half = seconds.get((Kind.BW, *key), 0.0) / 2
    costs = StageCosts(
        forward=seconds.get((Kind.F, *key), 0.0),
        backward_input=seconds.get((Kind.B, *key), half),
        backward_weight=seconds.get((Kind.W, *key), half),
        activation=memory.all_bytes,
        weight_input=memory.weight_input_bytes or 0,
        weight_residue=memory.residue_bytes or 0,
        offload=moved / speed.to_host * speed.copy_slowdown,
        reload=moved / speed.to_device * speed.copy_slowdown,
    )
    return SliceCosts(costs, memory.for_later)


def costs_of_pipelines(pipelines: Iterable[Iterable[RankCosts]]) -> Costs:
    """Return the costs of all stages: all pipelines run one plan, as fast as the slowest of them.

    Args:
        pipelines: The measurements of the ranks of each pipeline, of all replicas and tensor ranks.
    """
    return join_costs(map(slowest_costs, zip(*pipelines, strict=True)))


def slowest_costs(counterparts: Sequence[RankCosts]) -> RankCosts:
    """Return the maximum of each cost over one rank's counterparts in all pipelines."""
    first = counterparts[0]
    slices = {
        index: [
            *map(_max_slice_costs, zip(*(each.slices[index] for each in counterparts), strict=True))
        ]
        for index in first.slices
    }
    latencies = {
        index: max(each.latencies[index] for each in counterparts) for index in first.latencies
    }
    lanes = min(each.copy_lanes for each in counterparts)
    return RankCosts(slices, lanes, latencies, max(each.step for each in counterparts))


def _max_slice_costs(counterparts: Sequence[SliceCosts]) -> SliceCosts:
    costs, for_later = zip(*counterparts, strict=True)
    return SliceCosts(
        StageCosts(*map(max, zip(*costs, strict=True))),
        BytesForLaterSlices(*map(max, zip(*for_later, strict=True))),
    )


def join_costs(of_ranks: Iterable[RankCosts]) -> Costs:
    """Return the costs of all ranks' stages, in the order of the model."""
    ranks = list(of_ranks)
    by_index = {index: stage for rank in ranks for index, stage in rank.stages.items()}
    stages = [by_index[index] for index in sorted(by_index)]
    latencies = {index: seconds for rank in ranks for index, seconds in rank.latencies.items()}
    steps = {index: rank.step / len(rank.stages) for rank in ranks for index in rank.stages}
    costs: dict[str, Any] = dict(
        zip(StageCosts.__annotations__, zip(*stages, strict=True), strict=True),
        communication=[latencies.get(index, 0.0) for index in sorted(by_index)],
        step=[steps[index] for index in sorted(by_index)],
    )
    slices = {index: parts for rank in ranks for index, parts in rank.slices.items()}
    if any(len(parts) > 1 for parts in slices.values()):
        costs["slices"] = shares_of_slices([slices[index] for index in sorted(slices)])
    return Costs(**costs, copy_lanes=min(rank.copy_lanes for rank in ranks))


def shares_of_slices(stages: Sequence[Sequence[SliceCosts]]) -> Slices:
    """Return how the costs of each stage are shared out to its slices, as measured.

    Times that are not measured are equal, for slices have equal work.
    """
    by_name: dict[str, Any] = {
        name: [[part.costs[place] for part in parts] for parts in stages]
        for place, name in enumerate(StageCosts._fields)
    }
    wholes = {name: [sum(parts) for parts in of_stages] for name, of_stages in by_name.items()}
    for name, field in (("key_values", "num_bytes"), ("key_value_gradients", "gradient_bytes")):
        by_name[name] = [[getattr(part.for_later, field) for part in parts] for parts in stages]
        wholes[name] = wholes["activation"]
    units = {
        name: tuple(
            part / whole if whole else 1 / len(parts)
            for parts, whole in zip(of_stages, wholes[name], strict=True)
            for part in parts
        )
        for name, of_stages in by_name.items()
    }
    sizes = tuple(part.for_later.num_tokens for part in stages[0])
    return Slices(sizes if all(sizes) else (), units=tuple(units.items()))


@dataclass(frozen=True)
class SampledCut:
    """The stages of which costs are measured, so that each rank measures each class of its blocks.

    Attributes:
        stages: The blocks of each stage.
        sample_of: For each block the stage that is measured for it.
        ranks: The rank of each block.

    The last block may stand for the code after the blocks.
    """

    stages: Sequence[range]
    sample_of: Sequence[int]
    ranks: Sequence[int]

    @classmethod
    def of(cls, classes: Sequence[int], ranks: Sequence[int]) -> SampledCut:
        """Choose the samples: the first block of each class on each rank.

        Args:
            classes: The class of each block.
            ranks: The rank of each block.
        """
        keys = [*zip(ranks, classes, strict=True)]
        first = {key: block for block, key in reversed([*enumerate(keys)])}
        samples, starts = {*first.values()}, []
        for block, rank in enumerate(ranks):
            is_apart = not block or block in samples or block - 1 in samples
            if is_apart or ranks[block - 1] != rank:
                starts.append(block)
        stages = [range(*ends) for ends in zip(starts, [*starts[1:], len(ranks)], strict=True)]
        single = {blocks[0]: stage for stage, blocks in enumerate(stages) if len(blocks) == 1}
        sample_of = [single.get(block, single[first[key]]) for block, key in enumerate(keys)]
        return cls(stages, sample_of, ranks)

    @property
    def has_few_stages(self) -> bool:
        """Whether its stages are few enough to infer an action's overhead."""
        return 2 * len(self.stages) <= len(self.sample_of)


class BlockMeasurement:
    """Measures the blocks that this rank has in the first cut; all ranks measure at once.

    Afterwards the pipeline has that cut again.

    Args:
        pipeline: This rank's pipeline.
        transport: Its messages.
        classes: The class of each block, the same on all ranks.

    Attributes:
        bytes_without_activations: The peak bytes on this rank's device apart from activations.
        num_classes: The number of classes.
        devices: The devices, once they are compared by blocks; costs are those of the fastest.
    """

    bytes_without_activations = 0
    devices: Devices | None = None

    def __init__(self, pipeline: Pipeline, transport: Transport, classes: Sequence[int]) -> None:
        self.num_classes = len({*classes})
        self._pipeline = pipeline
        self._transport = transport
        self._first_cut = pipeline.settings
        stages = [stage.index for stage in pipeline.cut.stages for _ in stage.segments]
        # A part of the step for each block, and one for the head if that can be apart.
        self._has_head = len(pipeline.chain) not in pipeline.cut.segment_costs.impossible
        classes = [*classes, max(classes) + 1] if self._has_head else classes
        ranks = [self._first_cut.stage_ranks[stage] for stage in stages[: len(classes)]]
        self._sampled, self._classes = SampledCut.of(classes, ranks), classes
        self._cut = self._cut_into_samples(stages)
        records = pipeline.records.by_key.values()
        self._warm: list[StepRecord] = []
        self._written = {write.name for record in records for write in record.writes.weights}

    def _cut_into_samples(self, stages: Sequence[int]) -> CutSettings:
        cut, starts = self._first_cut, [blocks.start for blocks in self._sampled.stages]
        places = [cut.ranks_for_errors[stages[start]] for start in starts]
        split = [len(parts) for parts in self._sampled.stages]
        split[-1] -= self._has_head
        return replace(
            cut,
            stage_ranks=tuple(self._sampled.ranks[start] for start in starts),
            split=split,
            global_ranks=tuple(places) if cut.global_ranks else (),
        )

    def measure(
        self, cut_batch: Callable[[], Sequence[Microbatch]], recompute: str, speed: CopySpeed
    ) -> tuple[RankCosts, RankCosts]:
        """Return the costs of the sampled stages, and those of stages to compare with them.

        Raises:
            ScheduleError: The step cannot be cut so.
        """
        pipeline = self._pipeline
        try:
            # As in a step; the first pass casts, so that later ones take what most microbatches do.
            casts = sharing_casts(pipeline.device)
            with restoring_module(pipeline.module, self._written), casts:
                samples = self._measure(self._cut, cut_batch, recompute, speed)
                if self._samples_suffice:
                    return samples, samples
                return samples, self._measure(self._first_cut, cut_batch, recompute, speed)
        finally:
            forget_casts()
            pipeline.prepare_new_cut(pipeline.rank, self._first_cut)

    @property
    def _samples_suffice(self) -> bool:
        is_same = self._cut.stage_ranks == self._first_cut.stage_ranks
        return is_same or self._sampled.has_few_stages

    def costs_of_blocks(self, samples: Costs, stages: Costs) -> tuple[Costs, ActionOverhead]:
        """Return the costs of each segment, and the overhead of an action.

        Args:
            samples: The measured costs of the sampled stages, of all ranks.
            stages: The costs of whole stages; the overhead is their excess over their blocks.
        """
        compared = self._reference_cut
        samples = self._scaled_to_fastest(samples, self._cut)
        stages = self._scaled_to_fastest(stages, compared)
        num_stages = len(compared.stage_ranks)
        costs, overhead = costs_of_blocks(self._sampled, samples, stages, num_stages)
        return (costs if self._has_head else _append_head_segment(costs, overhead)), overhead

    def compare_devices(self, devices: Devices, samples: Costs, stages: Costs) -> Devices:
        """Return the devices with their ratios by blocks of the same class, as far as there are.

        Args:
            devices: The devices as they are known so far.
            samples: As for :meth:`costs_of_blocks`.
            stages: As there.
        """
        num_stages, num_blocks = len(self._reference_cut.stage_ranks), len(self._classes)
        blocks, _ = costs_of_blocks(self._sampled, samples, stages, num_stages)
        work = compute_seconds(blocks, num_blocks)
        keys = zip(self._classes, self._sampled.ranks, strict=True)
        places = device_indices(self._first_cut.stage_ranks)
        expected = [devices.slowness[place] for place in places]
        fitted = fit_slowness(dict(zip(keys, work, strict=True)), expected)
        return devices.with_slowness_from([fitted[rank] for rank in places])

    @property
    def _reference_cut(self) -> CutSettings:
        return self._cut if self._samples_suffice else self._first_cut

    def _scaled_to_fastest(self, costs: Costs, cut: CutSettings) -> Costs:
        slowness = () if self.devices is None else self.devices.slowness_per_stage(cut.stage_ranks)
        return costs.scale_compute_times([1 / times for times in slowness]) if slowness else costs

    def _measure(
        self,
        cut_settings: CutSettings,
        cut_batch: Callable[[], Sequence[Microbatch]],
        recompute: str,
        speed: CopySpeed,
    ) -> RankCosts:
        pipeline, device = self._pipeline, self._pipeline.device
        pipeline.prepare_new_cut(pipeline.rank, replace(cut_settings, recompute=recompute))
        try:
            parts = islice(cycle(cut_batch()), _NUM_MEASURED)
            slices = [
                _without_logging(part) for part in parts
            ]  # one object for each place in the plan
        except ValueError as error:
            raise ScheduleError(str(error)) from error
        placement = cut_settings.stage_ranks
        memory = ActivationMemory.for_device(device)
        executor = Executor(
            pipeline.rank, pipeline.stages, self._transport, ActionTimer(device), memory
        )
        for count in self._microbatches_per_pass(slices[0]):
            executor.set_timer(ActionTimer(device))
            memory.reset_peaks()
            plan = lower(_serial_schedule(placement, max(placement) + 1, count))
            executor.run(plan, set_indices_and_weights(slices[:count]))
        self.bytes_without_activations = max(
            self.bytes_without_activations, memory.peak_without_activations
        )
        return median_costs(executor, speed, measure_latencies(executor, plan, device))

    def _microbatches_per_pass(self, first: Microbatch) -> Iterator[int]:
        """Yield the microbatches of each pass, the last of which counts."""
        if not any(record is first.record for record in self._warm):
            self._warm.append(first.record)  # whose shapes run for the first time
            yield 1
        yield _NUM_MEASURED


def _append_head_segment(blocks: Costs, overhead: ActionOverhead) -> Costs:
    """Return the costs of all segments where the code after the blocks is in the last one."""
    costs: dict[str, Any] = {
        name: (*getattr(blocks, name), overhead.get(name, 0.0))
        for name in (*StageCosts.__annotations__, "communication")
    }
    return replace(blocks, **costs)


def move_head_w_to_b(segments: Costs, num_segments: int) -> Costs:
    """Return the costs of segments where B computes the last one's weight gradients."""
    names = "backward_input", "backward_weight", "weight_input", "weight_residue"
    costs: dict[str, Any] = {name: [*segments.per_stage(name, num_segments)] for name in names}
    costs["backward_input"][-1] += costs["backward_weight"][-1]
    for name in names[1:]:
        costs[name][-1] = 0.0
    return replace(segments, **costs)


def _without_logging(part: Microbatch) -> Microbatch:
    run = part.run  # as in a trace, so that prints and logs go nowhere
    return replace(part, run=lambda call: run(TRACE))


def _serial_schedule(
    stage_ranks: tuple[int, ...], num_ranks: int, num_microbatches: int
) -> Schedule:
    kinds = (Kind.F, Kind.B, Kind.W)
    ranks = [
        [
            Action(*each)
            for each in product(kinds, stages_on(stage_ranks, rank), range(num_microbatches))
        ]
        for rank in range(num_ranks)
    ]
    return serialize_microbatches(Schedule.of(ranks, "a measurement"))


def costs_of_blocks(
    sampled: SampledCut, samples: Costs, stages: Costs, num_stages: int
) -> tuple[Costs, ActionOverhead]:
    """Return the costs of all blocks, and the overhead of an action.

    A rank's blocks are scaled so that its sampled stages take their measured time: one block may
    have been measured while something else ran; sums of many blocks average that out.

    Args:
        sampled: The sampled stages.
        samples: Their costs.
        stages: The costs of the stages that they are compared with.
        num_stages: The number of these stages.
    """
    blocks = _block_costs_from_samples(samples, sampled)
    overhead = overhead_of_actions(blocks, len(sampled.ranks), stages, num_stages)
    scaled: dict[str, Any] = {
        name: _scaled(sampled, samples, blocks, name, overhead[name]) for name in COMPUTE_TIMES
    }
    return replace(blocks, **scaled), overhead


def _block_costs_from_samples(samples: Costs, sampled: SampledCut) -> Costs:
    num_stages, latencies = len(sampled.stages), [0.0] * len(sampled.ranks)
    costs: dict[str, Any] = {
        name: [samples.per_stage(name, num_stages)[stage] for stage in sampled.sample_of]
        for name in StageCosts.__annotations__
    }
    after_stages = samples.per_stage("communication", num_stages)
    for blocks, seconds in zip(sampled.stages, after_stages, strict=True):
        latencies[blocks[-1]] = seconds
    return replace(samples, communication=latencies, step=0.0, **costs)


def _scaled(
    sampled: SampledCut, samples: Costs, blocks: Costs, name: str, once: float
) -> list[float]:
    seconds = samples.per_stage(name, len(sampled.stages))
    scaled = [*blocks.per_stage(name, len(sampled.ranks))]
    for rank in {*sampled.ranks}:
        inside = [block for block, other in enumerate(sampled.ranks) if other == rank]
        stages = [s for s, stage in enumerate(sampled.stages) if sampled.ranks[stage[0]] == rank]
        estimate = sum(scaled[block] - once for block in inside)
        if estimate > 0 and len(stages) < len(inside):
            factor = max(0.0, sum(seconds[stage] - once for stage in stages) / estimate)
            for block in inside:
                scaled[block] = once + factor * (scaled[block] - once)
    return scaled


def cut_by_costs(
    pipeline: Pipeline,
    segments: Costs,
    placement: Sequence[int],
    split: str | Sequence[int],
    slowness: Sequence[float] = (),
    memory_limits: StageMemoryLimits = NO_MEMORY_LIMITS,
) -> list[Stage]:
    """Cut the chain so that the measured times of its segments are balanced.

    ``slowness`` and ``memory_limits`` are as for :func:`.cut`.

    Raises:
        ScheduleError: There are too few blocks, or ``split`` has another number of stages.
    """
    num_segments = len(pipeline.chain) + 1
    times = [*segments.seconds_by_kind(num_segments).values()]
    unit = sum(map(sum, times)) / num_segments or 1.0
    forward, for_input, for_weight = ((*(t / unit for t in kind),) for kind in times)
    costs = replace(
        pipeline.cut.segment_costs,
        forward=forward,
        backward_input=for_input,
        backward_weight=for_weight,
        parameters=(0,) * num_segments,
    )
    try:
        return cut(pipeline.chain, costs, placement, split, slowness, memory_limits)
    except ValueError as error:
        raise ScheduleError(str(error)) from None


def overhead_of_actions(
    blocks: Costs, num_blocks: int, stages: Costs, num_stages: int
) -> ActionOverhead:
    """Return the seconds of an F, B and W that do not depend on how many blocks the stage has.

    Args:
        blocks: The costs of each block as a stage of its own.
        num_blocks: The number of blocks.
        stages: The costs of the stages of a cut with fewer, longer stages; else the result is 0.
        num_stages: The number of these stages.
    """
    overheads = dict.fromkeys(COMPUTE_TIMES, 0.0)
    if num_blocks > num_stages:
        for name in COMPUTE_TIMES:
            of_blocks = blocks.per_stage(name, num_blocks)
            more = sum(of_blocks) - sum(stages.per_stage(name, num_stages))
            overheads[name] = min(max(0.0, more / (num_blocks - num_stages)), *of_blocks)
    return overheads


def costs_of_stages(
    segments: Costs, stages: Sequence[Stage], overhead: ActionOverhead = MappingProxyType({})
) -> Costs:
    """Return the costs of the stages of a cut.

    Args:
        segments: The costs of each segment; P2P latencies are those between ranks of the first cut.
        stages: The stages.
        overhead: The overhead in a segment's costs that counts once per stage; see
            :func:`overhead_of_actions`.
    """
    count = sum(len(stage.segments) for stage in stages)
    summed: dict[str, Any] = {}
    for name in StageCosts.__annotations__:
        values, once = segments.per_stage(name, count), overhead.get(name, 0.0)
        summed[name] = [
            sum(values[segment] for segment in sorted(stage.segments))
            - once * (len(stage.segments) - 1)
            for stage in stages
        ]
    latencies = [seconds for seconds in segments.per_stage("communication", count) if seconds]
    # No optimizer has stepped when blocks are measured.
    return replace(segments, communication=mean(latencies or [0.0]), step=0.0, **summed)
