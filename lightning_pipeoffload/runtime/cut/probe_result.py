"""What a probe shows of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_pipeoffload.runtime.cut.block_calls import BlockCall
from lightning_pipeoffload.runtime.cut.crossings import Flow
from lightning_pipeoffload.runtime.cut.hooked_spans import HookedSpan
from lightning_pipeoffload.runtime.cut.own_backward import OwnBackwards
from lightning_pipeoffload.runtime.cut.value_log import LoggedValue
from lightning_pipeoffload.runtime.cut.value_trace import Alias
from lightning_pipeoffload.runtime.cut.weight_writes import WeightWrite
from lightning_pipeoffload.runtime.users_code.attributes import Write
from lightning_pipeoffload.runtime.users_code.module_snapshot import Attribute


@dataclass
class Probe:
    """What one run of the step without values has shown.

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
        has_run: Whether a batch with such a microbatch was cut to run.
    """

    flow: Flow
    segments: dict[str, set[int]]
    forward_flops: list[int]
    weight_flops: list[int]
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
    has_run: bool = False

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
