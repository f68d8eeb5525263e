"""What one run of a step without values has shown, and what two runs have not in common."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.cut.backwards import HookedSpan, OwnBackwards
from lightning_pipeoffload.runtime.cut.block_chain import BlockCall
from lightning_pipeoffload.runtime.cut.crossings import Flow
from lightning_pipeoffload.runtime.leaves import leaves_of
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.attributes import Write
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
class Probe:
    """What one run of the step without values has shown.

    Args:
        num_segments: The number of the step's segments.

    Attributes:
        flow: What goes from block to block.
        segments: The segments that use each parameter, and each buffer that the step writes, by
            its name.
        forward_flops: Floating-point operations of each segment's forward, for one microbatch.
        weight_flops: The part of them that has a weight gradient of as many operations.
        block_calls: The calls of the blocks, where any part of one is compiled.
        training_flops: Operations of a forward and its backward of the whole step, nothing twice.
        written: Names of buffers that the step writes from values that every stage has.
        written_in_place: These buffers, and other tensors in the modules' attributes that the
            step writes in place.
        saved_and_written: The part of those that a backward reads.
        weight_writes: Writes into parameters.
        aliases: Pairs of values with one memory, between whose segments the step cannot be cut.
        writes: Writes to attributes of the module and its parts.
        briefly_hooked: Blocks with a hook that the step takes away again.
        changes_batch: Whether the step changes its microbatch in place.
        unrepeatable: The first value that a second run did not have; None if it had all.
        trained: Names of the parameters that the loss leads back to, but for those of blocks that
            ask for values; None: it is not known.
        weight_uses: The segments that use each of them, and whether its gradient could wait for W.
        imagined: Blocks that ask for values, which are made up, and the line that does so first.
        own_backwards: What the step differentiates by itself.
        hooked_spans: Calls around blocks of modules with backward hooks.
        hook_line: A line that registers a hook on a tensor; "" if none does.
        sized_in: The last segment in which sizes beside the blocks depend on the batch's values;
            None: there is none.
        sizes: These, and the shapes of the arguments of the block that follows.
        is_known: Whether the pipeline has been cut for it.
        has_run: Whether a batch with such a microbatch was cut to run.
    """

    num_segments: InitVar[int]
    flow: Flow = field(default_factory=Flow)
    segments: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    forward_flops: list[int] = field(init=False)
    weight_flops: list[int] = field(init=False)
    block_calls: list[BlockCall] = field(default_factory=list)
    training_flops: int = 0
    written: set[str] = field(default_factory=set)
    written_in_place: set[Attribute] = field(default_factory=set)
    saved_and_written: set[Attribute] = field(default_factory=set)
    weight_writes: list[WeightWrite] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    briefly_hooked: set[int] = field(default_factory=set)
    changes_batch: bool = False
    unrepeatable: LoggedValue | None = None
    trained: set[str] | None = None
    weight_uses: dict[str, set[tuple[int, bool]]] = field(default_factory=dict)
    imagined: dict[int, str] = field(default_factory=dict)
    own_backwards: OwnBackwards = field(default_factory=OwnBackwards)
    hooked_spans: list[HookedSpan] = field(default_factory=list)
    hook_line: str = ""
    sized_in: int | None = None
    sizes: tuple[Any, ...] = ()
    is_known: bool = False
    has_run: bool = False

    def __post_init__(self, num_segments: int) -> None:
        self.forward_flops, self.weight_flops = [0] * num_segments, [0] * num_segments

    @property
    def leaves_trace(self) -> bool:
        """Whether the step changes what is not kept with what steps write: it cannot run again."""
        return bool(self.weight_writes or self.changes_batch)


class ImaginedError(Exception):
    """A step whose blocks asked for values went wrong, maybe because these are made up.

    Attributes:
        cause: What went wrong.
        found: What was seen until then.
        is_in_block: Whether a block went wrong.
    """

    def __init__(self, cause: Exception, found: Probe, is_in_block: bool) -> None:
        self.cause = cause
        self.found = found
        self.is_in_block = is_in_block
