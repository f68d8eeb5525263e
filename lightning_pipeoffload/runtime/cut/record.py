"""The record of a traced step, from which later code reads all properties of the step.

One run without values, for each kind of step and each shape of a microbatch, fills one
:class:`StepRecord`. The checks, the cut, the estimates of work, the stages and the compiler read
it. Only the bytes that autograd saves need another run, since they depend on the cut
(:mod:`lightning_pipeoffload.runtime.measure.shape_memory`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from lightning_pipeoffload.runtime import BlockOutput, TensorSpec, segment_seeder
from lightning_pipeoffload.runtime.cut.batch_flags import BatchFlags
from lightning_pipeoffload.runtime.cut.batch_sizes import DataDependentSizes
from lightning_pipeoffload.runtime.cut.block_arguments import BlockArguments
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.cut.carried_values import CarriedValue
from lightning_pipeoffload.runtime.cut.device_reads import DeviceReads
from lightning_pipeoffload.runtime.cut.draws import Draws
from lightning_pipeoffload.runtime.cut.module_hooks import Hooks
from lightning_pipeoffload.runtime.cut.own_backwards import UserBackwards
from lightning_pipeoffload.runtime.cut.record_part import BY_LENGTHS, OF_TRACE, RecordPart
from lightning_pipeoffload.runtime.cut.sample_uses import SampleUses
from lightning_pipeoffload.runtime.cut.segment_work import SegmentWork
from lightning_pipeoffload.runtime.cut.writes import Writes
from lightning_pipeoffload.runtime.sequence import SequenceDims, SequenceSlice, SliceChecks
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.users_code import StepPoint


class RecordedCall(NamedTuple):
    """One call of a torch function between the blocks."""

    segment: int
    name: str
    arguments: list[float]  # the numbers among its arguments
    results: list[float]  # a few numbers of its results, for comparison
    line: str


@dataclass(frozen=True, eq=False)  # a key by identity, of what a cut knows of it
class StepRecord(RecordPart):
    """What a trace without values finds out about a step, for one shape of a microbatch.

    The trace fills its parts; it is complete once :class:`.StepRecords` returns it, and what a cut
    knows of it is kept there, in the pipeline and in its stages. A segment is a block of the chain
    with the code that runs at its position (:mod:`.call_order`); the last segment is the code after
    the last block.
    """

    calls: CallOrder

    # Values that cross from block to block.
    arguments: BlockArguments = field(default_factory=BlockArguments)
    outputs: list[BlockOutput] = field(default_factory=list, metadata=BY_LENGTHS)
    """The output of each call of a block."""
    carried_values: list[CarriedValue] = field(default_factory=list, metadata=BY_LENGTHS)
    opened: set[int] = field(default_factory=set)
    """Blocks with a value that escapes by a hook, an attribute or a list and is used later.

    Such a block runs without values on the later stages too.
    """
    kernels: set[StepPoint] = field(default_factory=set)
    """Where kernels that take addresses are called; on shape-only tensors they run on zeros."""
    assumed: dict[int, str] = field(default_factory=dict)
    """Blocks that read values, which the trace makes up, and the first line that does so."""
    is_certain: bool = True
    """Whether no value was made up after the last block; it could decide to call blocks again."""
    result_counts: frozenset[int] | None = frozenset()
    """Sample counts for which the result has one row per sample; None: the step returns None."""
    unrepeatable: RecordedCall | None = None
    """The first value that differed in a second run from the same state."""

    # Parameters and buffers, by name.
    segments: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The segments that use each parameter, and each buffer that the step writes."""
    trained: set[str] | None = None
    """Parameters that get a gradient from the loss, except those of blocks that read values."""
    weight_uses: dict[str, set[tuple[int, bool]]] = field(default_factory=dict)
    """By parameter, the segments that use it; True: its gradient there could be deferred to W."""

    work: SegmentWork = field(default_factory=SegmentWork)
    draws: Draws = field(default_factory=Draws)  # random numbers
    writes: Writes = field(default_factory=Writes)
    samples: SampleUses = field(default_factory=SampleUses)
    hooks: Hooks = field(default_factory=Hooks)
    backwards: UserBackwards = field(default_factory=UserBackwards)
    reads: DeviceReads = field(default_factory=DeviceReads)  # of values of the device
    flags: BatchFlags = field(default_factory=BatchFlags)
    sizes: DataDependentSizes = field(default_factory=DataDependentSizes)

    # Where blocks run on slices of the sequence.
    sequence: SequenceDims | None = field(default=None, metadata=OF_TRACE)
    sequence_slice: SequenceSlice | None = field(default=None, metadata=OF_TRACE)
    """The slice that this is the record of, see :meth:`slice_records`."""
    sequence_slices: Sequence[SequenceSlice] = field(default=(), metadata=OF_TRACE)  # all of them
    slice_checks: SliceChecks = field(default_factory=SliceChecks, metadata=OF_TRACE)

    lengths: tuple[int, ...] | None = field(default=None, metadata=OF_TRACE)
    """The lengths that it was derived for, see :mod:`.derived_records`; None: it was traced."""

    @cached_property
    def holds_for_any_values(self) -> bool:
        """Whether the record holds for every microbatch of these shapes, whatever its values."""
        return self.sizes.until is None and not self.flags.flag_values

    @property
    def is_derived(self) -> bool:
        """Whether it was interpolated from the records of other lengths."""
        return self.lengths is not None

    @property
    def most_slices(self) -> int:
        """The most slices into which its sequences can be cut."""
        assert self.sequence is not None
        return self.sequence.most_slices(self.outputs[0].tensor_specs)

    def slice_records(self, num_slices: int) -> list[StepRecord]:
        """Return a record for each slice of the sequence; only the sent tensors differ."""
        assert self.sequence is not None
        parts = self.sequence.slices(self.outputs[0].tensor_specs, num_slices)
        return [replace(self, sequence_slice=part, sequence_slices=parts) for part in parts]

    @property
    def derivation_note(self) -> str:
        """The end of an error message if the record, derived from others, may be wrong; else ""."""
        if self.lengths is None:
            return ""
        return _DERIVED.format([*self.lengths])

    def output_shapes_suffice(self, block: int) -> bool:
        """Return whether later stages need only the shapes of a block's output."""
        return self.is_template(block) and block not in self.opened

    def is_template(self, block: int) -> bool:
        """Return whether a block's output has only tensors, and constants equal for every batch."""
        return all(self.outputs[call].is_template for call in self.calls.calls_of(block))

    def may_call_kernels(self) -> bool:
        """Return whether stages run code that calls :attr:`kernels` without values."""
        before = [point for point in self.kernels if point.segment < self.calls.num_blocks]
        return any(not (p.is_in_block and self.output_shapes_suffice(p.segment)) for p in before)

    def carried_values_before(self, block: int) -> list[CarriedValue]:
        """List the carried values that cross the cut before ``block``, in the order of sending."""
        carried = [(c.port, c) for c in self.carried_values if c.port and c.crosses(block)]
        return [each for _, each in sorted(carried, key=itemgetter(0))]

    def calls_sent_before(self, block: int) -> list[int]:
        """List the calls whose outputs are sent over the cut before ``block``."""
        return [
            call
            for call in self.calls.calls_of(block - 1)
            if self.calls.goes_to_next_position(call)
        ]

    def message_specs_before(self, block: int) -> list[TensorSpec]:
        """Return the specs of all tensors that cross the cut before ``block``."""
        calls = self.calls_sent_before(block)
        outputs = [spec for call in calls for spec in self._output_specs(call)]
        return [
            *outputs,
            *(carried.spec_before(block) for carried in self.carried_values_before(block)),
        ]

    def _output_specs(self, call: int) -> list[TensorSpec]:
        whole, part = self.outputs[call].tensor_specs, self.sequence_slice
        if part is None or self.sequence is None:
            return whole
        dims = self.sequence.outputs[call]
        return [part.cut_spec(spec, dim) for spec, dim in zip(whole, dims, strict=True)]


_DERIVED = (
    "; these shapes were derived from batches of other lengths: if a block treats lengths {} "
    "differently, set derive_lengths=False, which traces all of the step for each length"
)


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
        received_values: The carried values that are received.
        sent_values: The carried values that are sent.
        calls: The block of each call.
        entry: The call at which the stage receives; -1: the first stage does not.
        received_outputs: For each call whose output the previous stage sends, the indices of its
            tensors.
        num_output_tensors: The number of these tensors; carried values follow.
        sent: The calls whose outputs go to the next stage.
        exit: The call after which the stage leaves the step; -1: it runs to the end.
        shape_outputs: For each call of an earlier stage's block, the shape-only tensor that it
            returns and its meta tensor, a cache for all F's. Making one takes as long as the rest
            of what an F does for such a block, and late stages of a deep model have many of them.
        seed_segment: Seeds the global generators that the step draws from.
        may_call_kernels: Whether it may call kernels that take addresses on shape-only tensors.
        output_shapes_suffice: For each call, whether later stages need only its output's shapes.
    """

    def __init__(self, step: StepRecord, blocks: range, is_last: bool) -> None:
        start, stop = blocks.start, blocks.stop
        self.specs_in = step.message_specs_before(start) if start else []
        self.specs_out = [] if is_last else step.message_specs_before(stop)
        self.gradient_specs = [spec for spec in self.specs_out if spec.gets_gradient]
        self.received_values = step.carried_values_before(start) if start else []
        self.sent_values = [] if is_last else step.carried_values_before(stop)
        self.calls = step.calls.blocks
        self.entry = step.calls.entry_call(start) if start else -1
        self.received_outputs: dict[int, slice] = {}
        self.num_output_tensors = 0
        for call in step.calls_sent_before(start) if start else ():
            end = self.num_output_tensors + len(step.outputs[call].tensor_specs)
            self.received_outputs[call] = slice(self.num_output_tensors, end)
            self.num_output_tensors = end
        self.sent = frozenset(() if is_last else step.calls_sent_before(stop))
        self.exit = -1 if is_last else step.calls.last_call_of_earlier_blocks(stop)
        self.shape_outputs: dict[int, tuple[ShapeOnly, Tensor]] = {}
        self.seed_segment = segment_seeder(step.draws.outside_torch)
        self.may_call_kernels = step.may_call_kernels()
        self.output_shapes_suffice = [step.output_shapes_suffice(block) for block in self.calls]
