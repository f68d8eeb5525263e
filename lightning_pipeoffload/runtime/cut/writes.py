"""What a step writes: attributes, buffers, parameters, its batch, and arguments of blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipeoffload.runtime import replaced, tensors_in
from lightning_pipeoffload.runtime.cut.argument_writes import ArgumentWatch, ArgumentWrite
from lightning_pipeoffload.runtime.cut.observers import Observer, Operation, RunningTrace
from lightning_pipeoffload.runtime.cut.record_part import RecordPart
from lightning_pipeoffload.runtime.shapes import (
    ShapeOnly,
    shape_only_leaves,
    storage_key,
    written_arguments,
)
from lightning_pipeoffload.runtime.users_code import (
    REGISTRIES,
    Attribute,
    AttributeWatch,
    StepPoint,
    Write,
    is_written,
    running_user_line,
)


class WeightWrite(NamedTuple):
    """A write into a parameter, with its segment and its line of the user's code."""

    name: str
    segment: int
    line: str
    is_new: bool  # whether another parameter is assigned


class AliasHazard(NamedTuple):
    """Two tensors with shared memory, one of which is read after the other was written."""

    made_in: int  # the segment from which on both names exist
    written_in: int
    origins: frozenset[str]  # names of what the value is computed from
    line: str  # of the user's code that reads


@dataclass
class Writes(RecordPart):
    """What a step writes, as a part of its record.

    Attributes:
        attributes: Writes to attributes of modules, in order.
        common_buffers: Names of the buffers that are written from values that every stage has.
        in_place: These buffers, and the attributes whose tensors or containers are changed.
        in_place_and_saved: Buffers and attributes that are written, and read by a backward.
        weights: Writes into parameters.
        aliases: Tensors that are read after they were written under another name.
        arguments: Writes of blocks into tensor arguments that are read after the call.
        inputs: By block, the first line that writes into a shape-only tensor among its arguments.
        changes_batch: Whether the step writes into its batch.
    """

    attributes: list[Write] = field(default_factory=list)
    common_buffers: set[str] = field(default_factory=set)
    in_place: set[Attribute] = field(default_factory=set)
    in_place_and_saved: set[Attribute] = field(default_factory=set)
    weights: list[WeightWrite] = field(default_factory=list)
    aliases: list[AliasHazard] = field(default_factory=list)
    arguments: list[ArgumentWrite] = field(default_factory=list)
    inputs: dict[int, str] = field(default_factory=dict)
    changes_batch: bool = False

    @property
    def cannot_run_again(self) -> bool:
        """Whether the step changes what no snapshot restores."""
        return bool(self.weights or self.changes_batch)

    @property
    def attribute_writing_blocks(self) -> set[int]:
        """The blocks that write attributes."""
        return {write.point.segment for write in self.attributes if write.point.is_in_block}

    @property
    def structure(self) -> tuple[Any, ...]:
        # Without ``attributes``, the first field: variables are compared by identity.
        _, *others = super().structure
        return *others, *((write.variable.key, *write[1:]) for write in self.attributes)


class WriteObserver(Observer[Writes]):
    """Finds what a step writes, in a trace.

    Args:
        trace: The running trace.
        writes: The part of the record.
        segments: The record's own: by name of a parameter or buffer, the segments that use it.
            Those that write a buffer are added after the step.
        compared: Attributes that are compared at each block, though they are long.
    """

    def __init__(
        self,
        trace: RunningTrace,
        writes: Writes,
        segments: defaultdict[str, set[int]],
        compared: Set[Attribute],
    ) -> None:
        super().__init__(trace, writes)
        self._segments = segments
        self._attributes = AttributeWatch(trace.module, compared)
        writes.attributes = self._attributes.writes
        self._arguments = ArgumentWatch(trace.chain, writes.arguments)
        # The written tensors of each memory, with the segments of the writes.
        self._written: defaultdict[int, list[tuple[Any, int]]] = defaultdict(list)
        self._saved: set[int] = set()  # addresses of what autograd has saved
        self._saved_attributes: set[Attribute] = set()
        self._argument_memory: set[int] = set()  # addresses of the block's arguments

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._find_written_buffers)
            stack.enter_context(self._recording_new_weights())
            stack.enter_context(self._attributes.recording())
            yield

    def _recording_new_weights(self) -> AbstractContextManager[None]:
        """Record each parameter that the step replaces with another one."""
        plain = nn.Module.register_parameter

        def register(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            weight = self._trace.stripped.record_assigned_weight(owner, name, parameter)
            if weight is not None:
                self._record_weight_write(weight, is_new=True)
            plain(owner, name, parameter)

        return replaced(nn.Module, "register_parameter", register)

    def recording_saved_tensors(self) -> AbstractContextManager[None]:
        """Record the tensors that autograd saves within the context.

        All traces enter it, since their operations are compared and it detaches. The hooks hold
        only addresses. A graph holds its hooks and their results, and Python's collector cannot
        find a cycle through a graph.
        """
        saved = self._saved

        def record(tensor: Tensor) -> Tensor:
            if isinstance(tensor, ShapeOnly):
                return ShapeOnly(tensor.meta, tensor.device, tensor.origins)
            saved.add(storage_key(tensor))
            return tensor.detach()

        return saved_tensors_hooks(record, lambda packed: packed)

    def enter_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._attributes.record_changes(StepPoint(index, is_in_block=True))
        self._arguments.snapshot_arguments(args, kwargs)
        self._argument_memory = {storage_key(leaf) for leaf in shape_only_leaves((args, kwargs))}

    def leave_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments.compare_arguments(index, self._trace.num_calls, args, kwargs)
        after = self._trace.calls.least_remaining_positions[self._trace.num_calls + 1]
        self._attributes.record_changes(StepPoint(after, is_in_block=False))

    def record_below_autograd(self, operation: Operation) -> None:
        self._arguments.record_write_if_read(operation.args, self._trace.num_calls)

    def record_operation(self, operation: Operation) -> None:
        func, args, _, _, segment = operation
        if not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            for leaf in shape_only_leaves(args):
                if hasattr(leaf, "source"):
                    self._record_alias_hazards(leaf)
        for value in shape_only_leaves([*written_arguments(func, args)]):
            memory, (place, is_in_block) = storage_key(value), self._trace.point
            weight = self._trace.stripped.weight_of_storage(memory)
            if weight is not None:
                self._record_weight_write(weight)
            if hasattr(value, "source"):
                self._written[memory].append((value, segment))
            if is_in_block and memory in self._argument_memory:
                self._part.inputs.setdefault(place, running_user_line())

    def _record_weight_write(self, name: str, is_new: bool = False) -> None:
        write = WeightWrite(name, self._trace.point.segment, running_user_line(), is_new)
        self._part.weights.append(write)

    def _record_alias_hazards(self, tensor: Any) -> None:
        for written, written_in in self._written.get(storage_key(tensor), ()):
            apart_from = _first_separating_position(tensor, written)
            if apart_from is not None and apart_from < written_in:
                alias = AliasHazard(apart_from, written_in, tensor.origins, running_user_line())
                self._part.aliases.append(alias)

    @property
    def blocks_filling_arguments(self) -> set[int]:
        """The blocks that have modified a list, a dict or an object among their arguments."""
        return self._arguments.blocks_filling_arguments

    def finish(self) -> None:
        self._find_saved_attributes()
        self._attributes.record_changes(self._trace.point)
        self._attributes.finish()

    def _find_saved_attributes(self) -> None:
        for part in self._trace.module.modules():
            for name in vars(part).keys() - REGISTRIES:
                tensors = tensors_in(vars(part)[name])
                if any(storage_key(tensor) in self._saved for tensor in tensors):
                    self._saved_attributes.add(Attribute(part, name))

    def _find_written_buffers(self) -> None:
        writes, buffers, segments = self._part, self._trace.stripped.buffers, self._segments
        written = [
            slot
            for slot, tensor, value in buffers
            if slot.tensor is not tensor or is_written(tensor, value)
        ]
        for slot in written:
            if isinstance(slot.tensor, ShapeOnly) and hasattr(slot.tensor, "source"):
                segments[slot.name].add(slot.tensor.source.position)
        common = [slot for slot in written if not segments.get(slot.name)]
        writes.common_buffers = {slot.name for slot in common}
        writes.in_place = {Attribute(slot.module, slot.attribute) for slot in common}
        writes.in_place_and_saved = {
            Attribute(slot.module, slot.attribute)
            for slot, tensor, value in buffers
            if storage_key(tensor) in self._saved
            and (segments.get(slot.name) or is_written(tensor, value))
        }

    def record_in_place_changes(self, changed: set[Attribute]) -> None:
        """Record the attributes that the step has changed in place, which are restored by now."""
        # Without the registries of modules, into which the trace itself put shapes.
        changed = {each for each in changed if each.name not in REGISTRIES}
        self._part.in_place |= changed
        self._part.in_place_and_saved |= changed & self._saved_attributes

    @property
    def long_container_writes(self) -> set[Attribute]:
        """Long containers that the step has changed in place, at a line that is not known."""
        return self._part.in_place & self._attributes.long


def _first_separating_position(left: Any, right: Any) -> int | None:
    """Return the first position after which a cut separates two tensors that share memory.

    After it a stage gets at least one of them as a message, a copy in other memory, so a write to
    one does not reach the other. None: they share memory wherever the chain is cut.
    """
    common = next((source for source in left.lineage if source in right.lineage), None)
    lefts, rights = (_up_to(common, tensor.lineage) for tensor in (left, right))
    pairs = ((a, b) for a in lefts for b in rights if a is not b)
    return min((max(a.maker_position, b.maker_position) for a, b in pairs), default=None)


def _up_to(last: Any, lineage: tuple[Any, ...]) -> tuple[Any, ...]:
    return lineage if last is None else lineage[: lineage.index(last) + 1]
