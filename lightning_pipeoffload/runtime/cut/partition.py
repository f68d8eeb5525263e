"""Cuts the chain of blocks into stages; estimates their costs; assigns tensors to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise, permutations
from math import inf
from typing import Any

from torch import nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.shapes import num_unpacked_values
from lightning_pipeoffload.runtime.users_code import Slot, StepPoint
from lightning_pipeoffload.schedule import Costs


@dataclass(frozen=True)
class CutSettings:
    """Settings by which a module is cut into stages, and its stages run."""

    stage_ranks: tuple[int, ...]  # the pipeline rank of each stage
    blocks: str | Sequence[str] | None = None  # see block_chain.find_chain
    split: str | Sequence[int] = "auto"  # see cut
    recompute: str = "none"  # see stage_pass.StageContext
    global_ranks: tuple[int, ...] = ()  # of each stage, for errors; (): as ``stage_ranks``
    agree: Callable[[Any], Any] = lambda value: value
    """Called by all replicas: returns the value that replica 0 passed (costs, names of blocks).

    So all replicas cut at the same blocks.
    """
    compile: bool | Mapping[str, Any] = False  # see block_compiler.BlockCompiler
    gradient_accumulation_fusion: bool = False  # see weight_grad.queue.add_product_in_float32
    derive_lengths: bool = True  # see derived_records
    head_weight_grad: str = "W"  # or "B": what computes weight gradients after the blocks
    num_sequence_slices: int = 1  # of a microbatch in training
    slowness: tuple[float, ...] = ()  # of each stage's rank, see cut
    memory: tuple[float, ...] = ()  # of each stage's device in bytes; (): all have as much

    @property
    def ranks_for_errors(self) -> tuple[int, ...]:
        """The rank of each stage, for error messages."""
        return self.global_ranks or self.stage_ranks


# Weight, gradient and Adam's two moments in float32; with masters in mixed precision as many.
_BYTES_OF_PARAMETER = 16


@dataclass(frozen=True)
class StageMemoryLimits:
    """The memory that stages may take.

    Attributes:
        sizes: What each segment takes, as often as its stage keeps it.
        limits: The most of each stage.
        kept: How often each stage keeps that; (): once.
        once: What each segment takes in addition, once; (): nothing.
    """

    sizes: Sequence[float]
    limits: Sequence[float]
    kept: Sequence[int] = ()
    once: Sequence[float] = ()

    @classmethod
    def of_parameters(cls, counts: Sequence[int], memory: Sequence[float]) -> StageMemoryLimits:
        """Return the memory for parameters that train, by the bytes of each stage's device."""
        if not memory:
            return NO_MEMORY_LIMITS
        return cls([_BYTES_OF_PARAMETER * count for count in counts], memory)

    @cached_property
    def _totals(self) -> tuple[list[float], list[float]]:
        once = self.once or [0.0] * len(self.sizes)
        return [0.0, *accumulate(self.sizes)], [0.0, *accumulate(once)]

    def fits(self, stage: int, start: int, end: int) -> bool:
        """Return whether the segments from ``start`` to ``end`` fit a stage.

        The last stage has those after the last block too.
        """
        end = len(self.sizes) if stage == len(self.limits) - 1 else end
        sizes, once = (total[end] - total[start] for total in self._totals)
        return (self.kept[stage] if self.kept else 1) * sizes + once <= self.limits[stage]


NO_MEMORY_LIMITS = StageMemoryLimits((), ())

# The weight of parameters relative to time: decides where times are equal or unknown.
_PARAMETER_SHARE = 1e-3
# The weight of a cut that sends twice as much as the one that sends least, in blocks.
_SENT_SHARE = 0.02
# The share of the heaviest stage that a last stage without blocks has to take from it.
_WORTH_APART = 0.02
_NO_CUT: tuple[float, float, tuple[int, ...]] = inf, inf, ()


@dataclass(frozen=True)
class Stage:
    """A consecutive part of the model."""

    index: int  # global, in model order
    blocks: range  # empty for a last stage that runs only the code after the blocks
    segments: frozenset[int]  # segments of the step that it runs, see :mod:`.trace`

    def runs_through(self, point: StepPoint, record: StepRecord) -> bool:
        """Return whether the stage runs a point of the step, with or without values."""
        if not point.is_in_block:
            return point.segment <= max(self.segments)
        is_called_before_exit = record.calls.is_called_before_exit(point.segment, self.blocks.stop)
        runs_remote = is_called_before_exit and not record.output_shapes_suffice(point.segment)
        return point.segment in self.blocks or runs_remote


@dataclass(frozen=True)
class SegmentCosts:
    """The work of F, B and W of each segment, in units of an average block's F."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    parameters: tuple[int, ...]  # numbers of elements
    unit: float = 0.0  # operations that 1 stands for; 0 where they were not counted
    sent: Mapping[int, int] = field(default_factory=dict)  # bytes over the cut before each segment
    impossible: frozenset[int] = frozenset()  # segments before which the step cannot be cut
    # Blocks that stay on the stage of the previous block, unless there are too many stages.
    inseparable: frozenset[int] = frozenset()

    @property
    def work(self) -> list[float]:
        """Each segment's work in F, B and W."""
        kinds = zip(self.forward, self.backward_input, self.backward_weight, strict=True)
        return [*map(sum, kinds)]


def estimate_costs(
    slots: Sequence[Slot], chain: BlockChain, record: StepRecord, head_weight_grad: str = "W"
) -> SegmentCosts:
    """Estimate each segment's work from its floating-point operations.

    W computes weight gradients of products; B all other gradients, and weight gradients in segments
    whose W is too short, and in the head for ``head_weight_grad="B"``. Frozen weights have none.
    """
    unit = sum(record.work.forward_flops[: len(chain)]) / len(chain) or 1.0
    weight = record.work.weight_flops
    in_b = [
        w if record.work.has_short_weight_grad(segment) else 0 for segment, w in enumerate(weight)
    ]
    if head_weight_grad == "B":
        in_b[-1] = weight[-1]
    forward = tuple(n / unit for n in record.work.forward_flops)
    for_input = tuple((n + w) / unit for n, w in zip(record.work.input_flops, in_b, strict=True))
    for_weight = tuple((n - w) / unit for n, w in zip(weight, in_b, strict=True))
    parameters = _sum_sizes(slots, find_segment_uses(slots, chain, record), chain)
    sent = {
        block: sum(spec.num_bytes for spec in record.message_specs_before(block))
        for block in range(1, len(chain) + 1)
    }
    return SegmentCosts(forward, for_input, for_weight, tuple(parameters), unit, sent)


def costs_by_size(
    slots: Sequence[Slot], chain: BlockChain, segments: Mapping[str, set[int]]
) -> SegmentCosts:
    """Estimate each segment's work before any step has run, from the sizes of its weights.

    An embedding's lookup costs nothing; a tied embedding counts for the head. A frozen weight has
    no W.
    """
    parameters = _sum_sizes(slots, segments, chain)
    multiplied = [s for s in slots if not isinstance(s.module, nn.Embedding | nn.EmbeddingBag)]
    trained = [slot for slot in multiplied if slot.tensor.requires_grad]
    unit = sum(_sum_sizes(multiplied, segments, chain)[: len(chain)]) / len(chain) or 1.0
    work, for_weight = (
        tuple(size / unit for size in _sum_sizes(counted, segments, chain))
        for counted in (multiplied, trained)
    )
    return SegmentCosts(work, work, for_weight, tuple(parameters))


def _sum_sizes(
    slots: Iterable[Slot], segments: Mapping[str, set[int]], chain: BlockChain
) -> list[int]:
    """Return the number of parameters (elements) of each segment."""
    sizes = [0] * (len(chain) + 1)
    for slot in slots:
        if slot.kind == "_parameters":
            sizes[min(segments[slot.name])] += num_unpacked_values(slot.tensor)
    return sizes


def find_segment_uses(
    slots: Iterable[Slot], chain: BlockChain, record: StepRecord
) -> dict[str, set[int]]:
    """Return, by name, the segments that need each parameter and buffer.

    A segment needs the parameters that it uses, and all of its block. A parameter that nothing uses
    belongs to the first segment if it was registered before the blocks, else to the last. A buffer
    belongs to the segments that write it, or that need the parameters of its module. Every segment
    needs the buffers of modules without parameters, such as a table of positions, and of modules
    around the blocks, and buffers that the step writes from values that every stage has.
    """
    needed: dict[str, set[int]] = {}
    default = 0
    for slot in slots:
        block = chain.enclosing_block(slot.name)
        if block is not None:
            default = len(chain)
        uses = set(record.segments.get(slot.name, ()))
        if block is not None:
            uses.add(block)
        elif slot.kind == "_buffers":
            uses = uses or _uses_of_buffer(slot, chain, needed, record)
        needed[slot.name] = uses or {default}
    return needed


def _uses_of_buffer(
    buffer: Slot, chain: BlockChain, needed: dict[str, set[int]], record: StepRecord
) -> set[int]:
    is_around = any(chain.block_name(index).startswith(buffer.path) for index in range(len(chain)))
    is_common = is_around or buffer.name in record.writes.common_buffers
    uses = set() if is_common else _uses_of_parameters(buffer, needed)
    return uses or set(range(len(chain) + 1))


def _uses_of_parameters(buffer: Slot, needed: dict[str, set[int]]) -> set[int]:
    parameters = buffer.module.named_parameters(recurse=False, remove_duplicate=False)
    return set().union(*(needed.get(buffer.path + name, ()) for name, _ in parameters))


def cut(
    chain: BlockChain,
    costs: SegmentCosts,
    stage_ranks: Sequence[int],
    split: str | Sequence[int] = "auto",
    slowness: Sequence[float] = (),
    memory_limits: StageMemoryLimits = NO_MEMORY_LIMITS,
) -> list[Stage]:
    """Cut the chain into stages.

    Args:
        chain: The blocks.
        costs: The costs of each segment, for ``split="auto"``.
        stage_ranks: The rank of each stage.
        split: "auto" minimizes the cost of the most expensive stage, embedding and head included,
            or of the busiest rank where ranks have several stages; where ranks have one stage
            each, the last may have the head alone. "even" gives each stage the same number of
            blocks; or the number of blocks of each stage, of the last perhaps 0.
        slowness: The time of a block on each stage's rank, as a multiple of the fastest rank's;
            (): all ranks are alike.
        memory_limits: The memory of stages, which ``split="auto"`` keeps if any cut does.

    Raises:
        ValueError: There are fewer blocks than stages, the sum of ``split`` is wrong, or ``split``
            separates a block from its frozen copy.
    """
    num_blocks, num_stages = len(chain), len(stage_ranks)
    has_head_alone = not isinstance(split, str) and [*split[-1:]] == [0]
    if num_blocks < num_stages - has_head_alone:
        proposal = chain.propose_blocks(num_stages)
        others = f", or cut more of this one, in the order of its calls: {proposal}"
        raise ValueError(
            f"{chain.name} has {num_blocks} blocks for {num_stages} stages; use fewer devices or "
            f"num_chunks, or a model of at least {num_stages} blocks{others if proposal else ''}"
        )
    ranks = _Ranks(stage_ranks, slowness or [1.0] * num_stages, memory_limits)
    counts = _choose_block_counts(costs, num_blocks, ranks, split)
    together = counts if split == "auto" else _keep_together(counts, costs.inseparable)
    if split != "even" and together != counts:
        start = min({*accumulate(counts)} - {*accumulate(together)})
        raise ValueError(
            f"split={counts} parts {chain.block_name(start)} from {chain.block_name(start - 1)}, "
            f"one of which is a frozen copy of the other that hooks may write from it; use "
            f"split={together}"
        )
    return stages_from_ends(accumulate(together))


@dataclass(frozen=True)
class _Ranks:
    """The rank of each stage, how slow it is, and its memory."""

    of_stages: Sequence[int]
    slowness: Sequence[float]
    memory_limits: StageMemoryLimits

    @property
    def num_stages(self) -> int:
        return len(self.of_stages)

    def fits(self, stage: int, start: int, end: int) -> bool:
        return not self.memory_limits.limits or self.memory_limits.fits(stage, start, end)


def _keep_together(counts: list[int], inseparable: Set[int]) -> list[int]:
    """Return the numbers of blocks after cuts before inseparable blocks have moved forward."""
    ends = [*accumulate(counts)]
    moved = [next(e for e in range(end, -1, -1) if e not in inseparable) for end in ends[:-1]]
    moved = [end - start for start, end in pairwise((0, *moved, ends[-1]))]
    return moved if min(moved) > 0 else counts  # more stages than pairs


def stages_from_ends(ends: Iterable[int]) -> list[Stage]:
    """Return the stages that end before the blocks ``ends``; the last also has the head."""
    bounds = [0, *ends]
    stages = [
        Stage(index, range(start, end), frozenset(range(start, end)))
        for index, (start, end) in enumerate(pairwise(bounds))
    ]
    return [*stages[:-1], replace(stages[-1], segments=stages[-1].segments | {bounds[-1]})]


def stage_indices_running(stages: Iterable[Stage], segments: Set[int]) -> frozenset[int]:
    """Return the indices of the stages that run any of ``segments``."""
    return frozenset(stage.index for stage in stages if stage.segments & segments)


def _choose_block_counts(
    costs: SegmentCosts,
    num_blocks: int,
    ranks: _Ranks,
    split: str | Sequence[int],
) -> list[int]:
    num_stages = ranks.num_stages
    if split == "auto":
        parts, sent = _segment_loads(costs), _weights_of_cuts(costs.sent, num_blocks)
        weights = [*parts[:-2], parts[-2] + parts[-1]]  # what follows the last block is with it
        heaviest, best = _balance(weights, sent, ranks, costs.impossible)
        if not best and ranks.memory_limits.limits:
            return _choose_block_counts(
                costs, num_blocks, replace(ranks, memory_limits=NO_MEMORY_LIMITS), split
            )
        if not best:  # a check says why
            return _balance(weights, sent, ranks, frozenset())[1]
        if len(set(ranks.of_stages)) < num_stages:
            loads = _RankLoads(weights, ranks)
            return _relieve_ranks(best, loads, costs.impossible - {num_blocks})
        lighter, with_head = _balance(parts, sent, ranks, costs.impossible)
        if with_head and with_head[-1] == 1 and lighter < heaviest * (1 - _WORTH_APART):
            return [*with_head[:-1], 0]
        return best
    if split == "even":
        return [num_blocks // num_stages + (i < num_blocks % num_stages) for i in range(num_stages)]
    counts = [int(count) for count in split]
    is_short = min(counts[:-1], default=1) < 1 or counts[-1:] < [1 - (num_stages > 1)]
    if len(counts) != num_stages or sum(counts) != num_blocks or is_short:
        raise ValueError(
            f"split={counts} must have {num_stages} entries of at least 1 (one for each stage; 0 "
            f"for a last one that has the code after the blocks alone) that add up to "
            f"{num_blocks} blocks; its {len(counts)} entries add up to {sum(counts)}"
        )
    return counts


def _segment_loads(costs: SegmentCosts) -> list[float]:
    mean = sum(costs.parameters) / len(costs.parameters) or 1.0
    return [
        work + _PARAMETER_SHARE * (count / mean + 1e-3)
        for work, count in zip(costs.work, costs.parameters, strict=True)
    ]


def _weights_of_cuts(sent: Mapping[int, int], num_blocks: int) -> dict[int, float]:
    least = min((count for i, count in sent.items() if count and i < num_blocks), default=1)
    return {block: _SENT_SHARE * max(0.0, count / least - 1) for block, count in sent.items()}


def _balance(
    weights: list[float],
    sent: Mapping[int, float],
    ranks: _Ranks,
    impossible: Set[int],
) -> tuple[float, list[int]]:
    """Return the least weight of the heaviest stage, and the stages' lengths, as even as possible.

    Weights count as many times as the stage's rank is slow. A cut that sends more than others has
    some weight of its own. No lengths: no cut is possible, or none fits. It takes
    O(stages * blocks^2).
    """
    total, num_stages = [0.0, *accumulate(weights)], ranks.num_stages

    @cache
    def best(end: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        times = ranks.slowness[stages - 1]
        if stages == 1:
            load = times * total[end]
            return (load, load**2, (end,)) if ranks.fits(0, 0, end) else _NO_CUT
        options = []
        for start in range(stages - 1, end):
            if start in impossible or not ranks.fits(stages - 1, start, end):
                continue
            heaviest, squares, counts = best(start, stages - 1)
            if not counts:
                continue
            load = times * (total[end] - total[start] + sent.get(start, 0.0))
            options.append((max(heaviest, load), squares + load**2, (*counts, end - start)))
        return min(options, default=_NO_CUT)

    for stages in range(1, num_stages):  # fills the cache from below: no deep recursion
        for end in range(stages, len(weights) + 1):
            best(end, stages)
    heaviest, _, counts = best(len(weights), num_stages)
    return heaviest, list(counts)


def _relieve_ranks(counts: list[int], loads_of: _RankLoads, impossible: Set[int]) -> list[int]:
    least = loads_of(counts)
    while True:
        moves = (c for c in _single_moves(counts) if impossible.isdisjoint(accumulate(c)))
        moved = min(moves, key=loads_of)
        loads = loads_of(moved)
        if loads >= least:
            return counts
        counts, least = moved, loads


class _RankLoads:
    """Returns, for numbers of blocks, the busiest rank's weight and the sum of squares of all."""

    def __init__(self, weights: list[float], ranks: _Ranks) -> None:
        self._total, self._fits = [0.0, *accumulate(weights)], ranks.fits
        self._stages = [*zip(ranks.of_stages, ranks.slowness, strict=True)]

    def __call__(self, counts: list[int]) -> tuple[float, float]:
        loads = dict.fromkeys((rank for rank, _ in self._stages), 0.0)
        for stage, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            (rank, times), start = self._stages[stage], end - count
            is_full = not self._fits(stage, start, end)
            loads[rank] += inf if is_full else times * (self._total[end] - self._total[start])
        return round(max(loads.values()), 9), round(sum(load**2 for load in loads.values()), 9)


def _single_moves(counts: list[int]) -> Iterator[list[int]]:
    """Yield ``counts``, and each variant with one block moved to another stage."""
    yield counts
    for giver, taker in permutations(range(len(counts)), 2):
        if counts[giver] > 1:
            moved = list(counts)
            moved[giver] -= 1
            moved[taker] += 1
            yield moved


def stage_costs(
    costs: SegmentCosts, stages: Sequence[Stage], slowness: Sequence[float] = ()
) -> Costs:
    """Return the costs of each stage, summed over its segments, in units of an average block.

    A unit is the time on the fastest rank; ``slowness`` is as for :func:`cut`.
    """

    def total(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[segment] for segment in stage.segments) for stage in stages)

    summed = Costs(
        forward=total(costs.forward),
        backward_input=total(costs.backward_input),
        backward_weight=total(costs.backward_weight),
        activation=tuple(float(len(stage.blocks)) for stage in stages),
    )
    return summed.scale_compute_times(slowness) if slowness else summed


@dataclass(frozen=True)
class Cut:
    """The cut of a module into stages; a new cut replaces this object.

    Attributes:
        chain: The blocks.
        stages: All stages, in the order of the model.
        segment_costs: The costs of each segment.
        slowness: As for :func:`cut`.
    """

    chain: BlockChain
    stages: list[Stage]
    segment_costs: SegmentCosts
    slowness: tuple[float, ...] = ()

    @cached_property
    def costs(self) -> Costs:
        """The costs of each stage, in units of a block."""
        return stage_costs(self.segment_costs, self.stages, self.slowness)

    @cached_property
    def num_parameters(self) -> list[int]:
        """The elements of each stage's parameters."""
        of_segments = self.segment_costs.parameters
        return [sum(of_segments[segment] for segment in stage.segments) for stage in self.stages]

    def block_names(self, stage: int) -> list[str]:
        """Return the names of a stage's blocks."""
        return [self.chain.block_name(index) for index in self.stages[stage].blocks]


class SegmentUses:
    """The segments that use each parameter and buffer, over all records so far."""

    def __init__(self, chain: BlockChain, trainable: Collection[str]) -> None:
        self._chain = chain
        self._trainable = trainable
        # Buffers that a step writes from what a stage computes.
        self._computed_buffers: set[str] = set()
        self.segments: dict[str, set[int]] = {}  # by name

    def add_record(self, slots: Iterable[Slot], record: StepRecord) -> bool:
        """Add a record; return whether a segment uses a tensor that it did not use before."""
        new_uses = find_segment_uses(slots, self._chain, record)
        computed = {n for n in new_uses if n not in self._trainable and record.segments[n]}
        for name in computed - self._computed_buffers:
            self.segments[name] = set()  # now only the stages that compute it have it
        self._computed_buffers |= computed
        unused = self._computed_buffers - computed
        learned = {
            name: self.segments.get(name, set()) | (set() if name in unused else uses)
            for name, uses in new_uses.items()
        }
        is_new = learned != self.segments
        self.segments = learned
        return is_new
