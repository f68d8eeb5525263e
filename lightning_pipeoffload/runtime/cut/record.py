"""The record of a traced step, from which later code reads all properties of the step.

One run without values, for each kind of step and each shape of a microbatch, fills one
:class:`StepRecord`. The checks, the cut, the estimates of work, the stages and the compiler read
it. Only the bytes that autograd saves need another run, since they depend on the cut
(:mod:`lightning_pipeoffload.runtime.measure.shape_memory`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import FrozenInstanceError, InitVar, dataclass, field, fields
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime.cut.batch_flags import BatchFlags
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.cut.carried_values import Crossing
from lightning_pipeoffload.runtime.cut.device_reads import DeviceReads
from lightning_pipeoffload.runtime.cut.draws import Draws
from lightning_pipeoffload.runtime.cut.sample_uses import SampleUses
from lightning_pipeoffload.runtime.cut.writes import Writes
from lightning_pipeoffload.runtime.payload import BlockOutput, TensorSpec
from lightning_pipeoffload.runtime.randomness import segment_seeder
from lightning_pipeoffload.runtime.sequence.slice_checks import SliceChecks
from lightning_pipeoffload.runtime.sequence.slices import SequenceDims, SequenceSlice
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.attributes import StepPoint


class StartedBackward(NamedTuple):
    """A backward that the step starts itself, between its blocks."""

    segment: int
    goals: frozenset[int]  # segments that made its inputs; -1: a weight, the batch, or no inputs
    line: str


class HookedSpan(NamedTuple):
    """A call of a module with backward hooks that begins and returns in different segments."""

    name: str
    first: int
    last: int


_SHORT = 0.1  # of F's operations


class SegmentDigest(NamedTuple):
    """A digest of a segment's operations that is equal in all processes."""

    form: str  # a digest of all but numbers
    sizes: int  # a weighted sum of the whole numbers
    others: str  # a digest of the other numbers


class LoggedValue(NamedTuple):
    """One call of a torch function between the blocks."""

    segment: int
    name: str
    arguments: list[float]  # the numbers among its arguments
    results: list[float]  # a few numbers of its results, for comparison
    line: str


@dataclass(eq=False)  # a key by identity, of what a cut knows of it
class StepRecord:
    """What a trace without values finds out about a step, for one shape of a microbatch.

    It is complete once :class:`.StepRecords` returns it; what a cut knows of it is kept there, in
    the pipeline and in its stages. A segment is a block of the chain with the code that runs at its
    position (:mod:`.call_order`); the last segment is the code after the last block.

    Args:
        num_segments: The number of blocks, and 1 more.
        device_type: The type of the device that the step runs on.
    """

    num_segments: InitVar[int]
    device_type: InitVar[str] = "cpu"
    calls: CallOrder = None  # type: ignore[assignment]  # None: each block is called once

    # Values that cross from block to block.
    argument_shapes: list[list[torch.Size | None]] = field(default_factory=list)
    """For each call of a block, the shapes of its arguments' leaves; None for a non-tensor."""
    outputs: list[BlockOutput] = field(default_factory=list)  # of each call of a block
    crossings: list[Crossing] = field(default_factory=list)  # carried values
    opened: set[int] = field(default_factory=set)
    """Blocks with a value that escapes by a hook, an attribute or a list and is used later.

    Such a block runs without values on the later stages too.
    """
    kernels: set[StepPoint] = field(default_factory=set)
    """Where kernels that take addresses are called; on shape-only tensors they run on zeros."""
    is_certain: bool = True
    """Whether no value was made up after the last block; it could decide to call blocks again."""

    # Parameters and buffers, by name.
    segments: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The segments that use each parameter, and each buffer that the step writes."""
    trained: set[str] | None = None
    """Parameters that get a gradient from the loss, except those of blocks that read values."""
    weight_uses: dict[str, set[tuple[int, bool]]] = field(default_factory=dict)
    """By parameter, the segments that use it; True: its gradient there could be deferred to W."""

    # Work: floating-point operations for one microbatch.
    forward_flops: list[int] = field(init=False)  # of each segment
    input_flops: list[int] = field(init=False)  # of each segment's B
    weight_flops: list[int] = field(init=False)  # of each segment's weight gradients
    training_flops: int = 0  # of the whole step, forward and backward
    block_calls: list[BlockCall] = field(default_factory=list)  # each, if any block is compiled
    work: list[SegmentDigest] = field(default_factory=list)
    """For each segment, a digest of its operations and their arguments."""
    between: SegmentDigest = SegmentDigest("", 0, "")
    """A digest of the operations outside of the blocks."""
    draws: Draws = field(default_factory=Draws)  # random numbers

    writes: Writes = field(default_factory=Writes)

    samples: SampleUses = field(default_factory=SampleUses)
    """What the step does with the number of samples."""

    # Properties that make cuts impossible.
    unrepeatable: LoggedValue | None = None
    """The first value that differed in a second run from the same state."""
    imagined: dict[int, str] = field(default_factory=dict)
    """Blocks that read values, which the trace makes up, and the first line that does so."""
    briefly_hooked: set[int] = field(default_factory=set)
    """Blocks with a hook that the step itself registers and removes."""
    starts_backward: bool = False
    """Whether the step starts a backward itself; then no weight gradient is deferred to W."""
    started: list[StartedBackward] = field(default_factory=list)  # those between the blocks
    reached_backward: set[int] = field(default_factory=set)  # blocks that such a backward reaches
    hooked_spans: list[HookedSpan] = field(default_factory=list)
    hook_line: str = ""  # a line that registers a hook on a tensor
    recompute_obstacles: dict[int, str] = field(default_factory=dict)
    """By block, why it cannot be recomputed in the backward, as the end of an error message."""

    # Values of the device that the host waits for.
    reads: DeviceReads = field(init=False)

    # What depends on the batch's values between the blocks: booleans, and sizes.
    flags: BatchFlags = field(default_factory=BatchFlags)
    sized_in: int | None = None  # the first call after the last such size
    sizes: tuple[Any, ...] = ()  # these sizes and the shapes of that call's arguments

    result_counts: frozenset[int] | None = frozenset()
    """Sample counts for which the result has one row per sample; None: the step returns None."""

    # Where blocks run on slices of the sequence.
    sequence: SequenceDims | None = None
    sequence_slice: SequenceSlice | None = None
    """The slice that this is the record of, see :meth:`in_slices`."""
    sequence_slices: Sequence[SequenceSlice] = ()  # all of them
    slice_checks: SliceChecks = field(default_factory=SliceChecks)

    lengths: tuple[int, ...] | None = None  # that it was derived for, see derived_records

    def __post_init__(self, num_segments: int, device_type: str) -> None:
        if self.calls is None:
            self.calls = CallOrder.of_once(num_segments - 1)
        self.reads = DeviceReads(device_type)
        self.forward_flops, self.weight_flops = [0] * num_segments, [0] * num_segments
        self.input_flops = [0] * num_segments

    def freeze(self) -> None:
        """Refuse to set attributes from now on."""
        vars(self)["_is_frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_frozen" in vars(self):
            raise FrozenInstanceError(f"cannot set {name} of the record of a step, it is complete")
        super().__setattr__(name, value)

    @cached_property
    def holds_for_shapes(self) -> bool:
        """Whether the record holds for every microbatch of these shapes, whatever its values."""
        return self.sized_in is None and not self.flags.answers

    @property
    def sized(self) -> tuple[Any, ...]:
        """All fields that depend on the lengths of the microbatch."""
        values = (getattr(self, name) for name in _SIZED)
        return *values, self.flags.calls, self.flags.constants

    @property
    def is_derived(self) -> bool:
        """Whether it was interpolated from the records of other lengths, see derived_records."""
        return self.lengths is not None

    def with_sized(
        self, sized: tuple[Any, ...], lengths: tuple[int, ...] | None = None
    ) -> StepRecord:
        """Return the record for other lengths, given the values of :attr:`sized` for these.

        Args:
            sized: The values.
            lengths: The lengths, if the values are interpolated; None: they are traced.
        """
        *values, calls, constants = sized
        flags = self.flags.with_sized(calls, constants)
        return self._with(lengths=lengths, flags=flags, **dict(zip(_SIZED, values, strict=True)))

    def _with(self, **values: Any) -> StepRecord:
        other = copy(self)
        vars(other).update(values)
        return other

    @property
    def most_slices(self) -> int:
        """The most slices into which its sequences can be cut."""
        assert self.sequence is not None
        return self.sequence.most_slices(self.outputs[0].payload)

    def in_slices(self, num_slices: int) -> list[StepRecord]:
        """Return a record for each slice of the sequence; only the sent tensors differ."""
        assert self.sequence is not None
        parts = self.sequence.slices(self.outputs[0].payload, num_slices)
        return [self._with(sequence_slice=part, sequence_slices=parts) for part in parts]

    @property
    def derivation(self) -> str:
        """The end of an error message if the record, derived from others, may be wrong; else ""."""
        if self.lengths is None:
            return ""
        return _DERIVED.format([*self.lengths])

    @property
    def structure(self) -> tuple[Any, ...]:
        """All fields that do not depend on the lengths of the microbatch, for comparison."""
        values = [getattr(self, part.name) for part in fields(self) if part.name not in _APART]
        segments = {name: frozenset(uses) for name, uses in self.segments.items() if uses}
        return (
            *(*values, segments, self.reads.lines, self.reads.common),
            *(self.draws.structure, self.samples.structure, self.writes.structure),
        )

    def has_short_weight(self, segment: int) -> bool:
        """Return whether W of a segment is too short to be worth the memory of deferring it."""
        return 0 < self.weight_flops[segment] < _SHORT * self.forward_flops[segment]

    def shapes_suffice(self, block: int) -> bool:
        """Return whether later stages need only the shapes of a block's output."""
        return self.is_template(block) and block not in self.opened

    def is_template(self, block: int) -> bool:
        """Return whether a block's output has only tensors, and constants equal for every batch."""
        return all(self.outputs[call].is_template for call in self.calls.calls_of(block))

    def meets_kernels(self) -> bool:
        """Return whether stages run code that calls :attr:`kernels` without values."""
        before = [point for point in self.kernels if point.segment < self.calls.num_blocks]
        return any(not (p.is_in_block and self.shapes_suffice(p.segment)) for p in before)

    def carried_over(self, block: int) -> list[Crossing]:
        """List the carried values that cross the cut before ``block``, in the order of sending."""
        crossing = [(c.port, c) for c in self.crossings if c.port and c.crosses(block)]
        return [each for _, each in sorted(crossing, key=itemgetter(0))]

    def handed_over(self, block: int) -> list[int]:
        """List the calls whose outputs are sent over the cut before ``block``."""
        return [call for call in self.calls.calls_of(block - 1) if self.calls.leaves_position(call)]

    def payload_over(self, block: int) -> list[TensorSpec]:
        """Return the specs of all tensors that cross the cut before ``block``."""
        outputs = [spec for call in self.handed_over(block) for spec in self._payload_of(call)]
        return [*outputs, *(crossing.spec_before(block) for crossing in self.carried_over(block))]

    def _payload_of(self, call: int) -> list[TensorSpec]:
        whole, part = self.outputs[call].payload, self.sequence_slice
        if part is None or self.sequence is None:
            return whole
        dims = self.sequence.outputs[call]
        return [part.cut_spec(spec, dim) for spec, dim in zip(whole, dims, strict=True)]


_DERIVED = (
    "; these shapes were derived from batches of other lengths: if a block treats lengths {} "
    "differently, set derive_lengths=False, which traces all of the step for each length"
)
_SIZED = (
    *("outputs", "crossings", "work", "between"),
    *("forward_flops", "input_flops", "weight_flops", "training_flops"),
)
_APART = {
    *(*_SIZED, "segments", "reads", "flags", "sizes"),
    *("lengths", "sequence", "sequence_slice", "sequence_slices", "slice_checks"),
    *("draws", "samples", "writes"),  # which say it themselves
    "argument_shapes",  # read where the step was traced
    "block_calls",  # blocks are compiled ahead for a length that was traced
}


class StageRecord:
    """The part of a step's record that concerns one stage, looked up once.

    Args:
        step: The record.
        blocks: The blocks of the stage.
        is_last: Whether the step ends there.

    It does not hold that record, by which a stage keeps it.

    Attributes:
        specs_in: Specs of the tensors that the previous stage sends.
        specs_out: Specs of the tensors that are sent to the next stage.
        gradient_specs: Specs of the sent tensors whose gradients come back.
        coming: The carried values that are received.
        going: The carried values that are sent.
        calls: The block of each call.
        entry: The call at which the stage receives; -1: the first stage does not.
        handed_on: For each call whose output the previous stage sends, the indices of its tensors.
        num_handed_on: The number of these tensors; carried values follow.
        sent: The calls whose outputs go to the next stage.
        exit: The call after which the stage leaves the step; -1: it runs to the end.
        shape_outputs: For each call of an earlier stage's block, the shape-only tensor that it
            returns and its meta tensor, a cache for all F's. Making one takes as long as the rest
            of what an F does for such a block, and late stages of a deep model have many of them.
        seed_segment: Seeds the global generators that the step draws from.
        meets_kernels: Whether it may call kernels that take addresses on shape-only tensors.
        shapes_suffice: For each call, whether later stages need only the shapes of its output.
    """

    def __init__(self, step: StepRecord, blocks: range, is_last: bool) -> None:
        start, stop = blocks.start, blocks.stop
        self.specs_in = step.payload_over(start) if start else []
        self.specs_out = [] if is_last else step.payload_over(stop)
        self.gradient_specs = [spec for spec in self.specs_out if spec.gets_gradient]
        self.coming = step.carried_over(start) if start else []
        self.going = [] if is_last else step.carried_over(stop)
        self.calls = step.calls.blocks
        self.entry = step.calls.entry(start) if start else -1
        self.handed_on: dict[int, slice] = {}
        self.num_handed_on = 0
        for call in step.handed_over(start) if start else ():
            end = self.num_handed_on + len(step.outputs[call].payload)
            self.handed_on[call] = slice(self.num_handed_on, end)
            self.num_handed_on = end
        self.sent = frozenset(() if is_last else step.handed_over(stop))
        self.exit = -1 if is_last else step.calls.last_before(stop)
        self.shape_outputs: dict[int, tuple[ShapeOnly, Tensor]] = {}
        self.seed_segment = segment_seeder(step.draws.beside_torch)
        self.meets_kernels = step.meets_kernels()
        self.shapes_suffice = [step.shapes_suffice(block) for block in self.calls]


@dataclass(frozen=True)
class BlockCall:
    """One call of a block in training, without the values of its arguments."""

    arguments: Any
    autocast: torch.dtype | None  # None: autocast is off
    device_type: str

    @classmethod
    def of(cls, arguments: Any, device_type: str) -> BlockCall:
        """Record the current call with its modes, such as autocast."""
        is_on = torch.is_autocast_enabled(device_type)
        autocast = torch.get_autocast_dtype(device_type) if is_on else None
        return cls(tree_map(_describe, arguments), autocast, device_type)

    @contextmanager
    def with_zeros(self) -> Iterator[Any]:
        """Yield the arguments with zeros for values, under the autocast of the call."""
        with torch.autocast(self.device_type, self.autocast, enabled=self.autocast is not None):
            yield tree_map(_make_zeros, self.arguments)


@dataclass(frozen=True)  # no tuple, which would be a pytree
class _Argument:
    meta: Tensor
    device: torch.device
    requires_grad: bool


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, ShapeOnly):
        return leaf
    return _Argument(leaf.meta.detach(), leaf.device, leaf.requires_grad)


def _make_zeros(leaf: Any) -> Any:
    if not isinstance(leaf, _Argument):
        return leaf
    zeros = torch.zeros_like(leaf.meta, device=leaf.device)
    return zeros.requires_grad_(leaf.requires_grad)
