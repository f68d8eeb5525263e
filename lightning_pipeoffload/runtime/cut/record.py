"""What one run of a step without values has shown, and what two runs have not in common."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.cut.backwards import HookedSpan, OwnBackwards
from lightning_pipeoffload.runtime.cut.block_chain import BlockCall
from lightning_pipeoffload.runtime.cut.crossings import Crossing
from lightning_pipeoffload.runtime.leaves import leaves_of
from lightning_pipeoffload.runtime.payload import BlockOutput, TensorSpec
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.attributes import Place, Write
from lightning_pipeoffload.runtime.users_code.snapshot import Attribute
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line

_MOST_ELEMENTS = 4096
_CLOSE = 1e-4  # sums on an accelerator may differ by their order


class WeightWrite(NamedTuple):
    """A write into a parameter, with the segment and the line of the user's code that write."""

    name: str
    segment: int
    line: str


@dataclass(frozen=True)
class Alias:
    """Two names of one piece of memory, of which one is read after the other was written.

    Attributes:
        made_in: Segment from which on there are both.
        written_in: Segment that writes.
        origins: What the value is computed from, by name.
        line: The line of the user's code that reads.
    """

    made_in: int
    written_in: int
    origins: frozenset[str]
    line: str


class LoggedValue(NamedTuple):
    """One call of a torch function.

    Attributes:
        segment: The segment of the step.
        name: The name of the function.
        given: The numbers among its arguments.
        made: Numbers that tell its results apart.
        line: The line of the user's code that called it.
    """

    segment: int
    name: str
    given: list[float]
    made: list[float]
    line: str


class ValueLog:
    """What a run of a step computes beside its blocks; shape-only tensors have no value.

    Attributes:
        entries: The calls, in their order.
    """

    def __init__(self) -> None:
        self.entries: list[LoggedValue] = []

    def note(self, segment: int, func: Callable[..., Any], arguments: Any, result: Any) -> None:
        """Note one call of a torch function, if its result is not whatever was in memory."""
        name = getattr(func, "__name__", "")
        if "empty" not in name:
            given = [float(leaf) for leaf in leaves_of(arguments) if isinstance(leaf, (int, float))]
            made = [number for leaf in leaves_of(result) for number in _numbers_of(leaf)]
            self.entries.append(LoggedValue(segment, name, given, made, calling_line()))


def first_difference(before: ValueLog, after: ValueLog) -> LoggedValue | None:
    """Return the first call of two runs that was not the same; None if all were."""
    for old, new in zip(before.entries, after.entries, strict=False):
        is_same = old.name == new.name and old.given == new.given
        if not (is_same and _are_close(old.made, new.made)):
            return new
    return None


def _are_close(old: list[float], new: list[float]) -> bool:
    return len(old) == len(new) and all(
        a == b or math.isclose(a, b, rel_tol=_CLOSE) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(old, new, strict=True)
    )


@torch.no_grad()
def _numbers_of(leaf: Any) -> Iterable[float]:
    if isinstance(leaf, (int, float)):
        return [float(leaf)]
    if not isinstance(leaf, Tensor) or isinstance(leaf, ShapeOnly) or leaf.is_meta:
        return []
    return _sums_of(leaf)


def _sums_of(tensor: Tensor) -> Iterator[float]:
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sample = flat.detach().reshape(-1)
    sample = sample[:: max(1, len(sample) // _MOST_ELEMENTS)].double()
    places = torch.arange(len(sample), dtype=sample.dtype, device=sample.device)
    yield from (sample.sum().item(), (sample @ places).item())


@dataclass
class StepRecord:
    """What the trace of a step has recorded for microbatches of these shapes."""

    num_segments: InitVar[int]

    # What goes from block to block.
    outputs: list[BlockOutput] = field(default_factory=list)  # of each block
    crossings: list[Crossing] = field(default_factory=list)  # values beside them
    # Blocks from which a hook or an attribute keeps a value that is used behind them: such a block
    # runs, without values, on the later stages too.
    opened: set[int] = field(default_factory=set)
    # Whether no value was made up behind the blocks, which might decide to call them again.
    is_certain: bool = True

    # Parameters and buffers, by name.
    segments: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The segments that use each parameter, and each buffer that the step writes."""
    trained: set[str] | None = None
    """Parameters that the loss leads back to, but for those of blocks that ask for values."""
    weight_uses: dict[str, set[tuple[int, bool]]] = field(default_factory=dict)
    """The segments that use each of them, and whether its gradient could wait for W."""

    # Work: floating-point operations for one microbatch.
    forward_flops: list[int] = field(init=False)  # of each segment
    weight_flops: list[int] = field(init=False)  # the part that a weight gradient repeats
    training_flops: int = 0  # of the whole step, forward and backward, nothing twice
    block_calls: list[BlockCall] = field(default_factory=list)  # where any block is compiled

    # Random numbers.
    draws: set[Place] = field(default_factory=set)
    """Where the step draws from torch's generators, global or of modules, in this one run."""
    draws_beside_torch: bool = False
    """Whether it draws from numpy's or Python's global generator."""

    # What the step writes.
    writes: list[Write] = field(default_factory=list)  # to attributes of modules
    written: set[str] = field(default_factory=set)  # buffers, from values that every stage has
    written_in_place: set[Attribute] = field(default_factory=set)  # these, and tensor attributes
    saved_and_written: set[Attribute] = field(default_factory=set)  # and read by a backward
    weight_writes: list[WeightWrite] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    changes_batch: bool = False

    # What makes cuts or plans impossible.
    briefly_hooked: set[int] = field(default_factory=set)
    """Blocks with a hook that the step takes away again."""
    unrepeatable: LoggedValue | None = None
    """The first value that a second run from the same state did not have."""
    imagined: dict[int, str] = field(default_factory=dict)
    """Blocks that ask for values, which are made up, and the first line that does so."""
    own_backwards: OwnBackwards = field(default_factory=OwnBackwards)
    hooked_spans: list[HookedSpan] = field(default_factory=list)
    hook_line: str = ""
    """A line that registers a hook on a tensor; "" if none does."""

    # Sizes beside the blocks that depend on the batch's values.
    sized_in: int | None = None  # the last segment with one
    sizes: tuple[Any, ...] = ()  # these, and the shapes of the arguments of the next block

    is_known: bool = False  # the pipeline has been cut for it
    has_run: bool = False  # a batch with such a microbatch was cut to run

    def __post_init__(self, num_segments: int) -> None:
        self.forward_flops, self.weight_flops = [0] * num_segments, [0] * num_segments
        self._carried: dict[int, list[Crossing]] = {}
        self._payloads: dict[int, list[TensorSpec]] = {}

    @property
    def leaves_trace(self) -> bool:
        """Whether the step changes what no snapshot restores: it cannot run again."""
        return bool(self.weight_writes or self.changes_batch)

    @property
    def writes_anything(self) -> bool:
        """Whether the step writes attributes, common buffers, parameters or its batch."""
        found = (self.writes, self.written_in_place, self.weight_writes)
        return any(found) or self.changes_batch

    @property
    def starts_backward(self) -> bool:
        """Whether the step starts a backward itself, of which nothing may wait for W."""
        return self.own_backwards.any

    def carried_over(self, block: int) -> list[Crossing]:
        """List the carried values that cross the cut before ``block``, in the order they travel."""
        if block not in self._carried:
            found = [(c.port, c) for c in self.crossings if c.port and c.crosses(block)]
            self._carried[block] = [crossing for _, crossing in sorted(found, key=itemgetter(0))]
        return self._carried[block]

    def payload_over(self, block: int) -> list[TensorSpec]:
        """Describe all tensors that cross the cut before ``block``."""
        if block not in self._payloads:
            carried = [crossing.spec_before(block) for crossing in self.carried_over(block)]
            self._payloads[block] = [*self.outputs[block - 1].payload, *carried]
        return self._payloads[block]


class ImaginedError(Exception):
    """A step whose blocks asked for values went wrong, maybe because these are made up.

    Attributes:
        cause: What went wrong.
        found: What was seen until then.
        is_in_block: Whether a block went wrong.
    """

    def __init__(self, cause: Exception, found: StepRecord, is_in_block: bool) -> None:
        self.cause = cause
        self.found = found
        self.is_in_block = is_in_block
