"""Attributes that steps write: values per stage of a rank (rules 4 and 5, docs/contract_rules.md).

A step is called once for each microbatch and stage, and exits at the end of the stage. While a
stage runs, an attribute that is written only after that exit is a placeholder, whose use raises an
error. So is, in a backward, an attribute that forwards of other microbatches have written since.

Each stage of a rank runs the beginning of the step on the same module. If it increments
``self.count``, several stages would count each microbatch several times. So each stage has its own
values of the attributes that it writes. Between forwards, a module holds the values of its *home*
stage: for a block the stage that runs it, else the last stage of the rank. During an F of another
stage, that stage's values are swapped in. When all stages have run the same number of microbatches,
the values of the other stages are dropped, so that all see what hooks write between steps. A flag
or a cache that the first F creates for all later ones is not kept per stage.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from operator import eq, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import NOTHING, combine_contexts, tensors_in
from lightning_pipeoffload.runtime.cut import BlockChain, SplitModule, Stage, StepRecord
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.users_code import (
    GONE,
    REGISTRIES,
    Attribute,
    Fingerprint,
    NamedAttribute,
    RemoteValue,
    Slot,
    StepPoint,
    StepState,
    Write,
    fingerprint,
    fingerprint_if_small,
    in_brackets,
    is_iterator,
    is_random_generator,
    is_unchanged,
    private_copy,
)

_Values = dict[str, Any]
_SpaceOf = tuple[nn.Module, bool]  # attributes of a module, or its buffers
_Written = tuple[_SpaceOf, str, Any, Any]  # in what, the name, the new value and the old one
_Key = tuple[int, str]  # of a variable
_MOST = 64  # values of an attribute that are compared; of more, each forward counts as a write


class WrittenByForward(NamedTuple):
    """Fingerprints of the attributes that steps write, at the end of a forward.

    None instead of a fingerprint: the value is too large to compare.
    """

    forward: int  # its number among the rank's
    values: list[tuple[NamedAttribute, Fingerprint | None]]


_CONTAINERS = (list, dict, set, deque)
_FILLS = {"add", "append", "appendleft", "extend", "extendleft", "insert", "update"}
_COUNTS = (int, float, complex, Tensor)


class StepWrites:
    """The values, per stage of a rank, of attributes and buffers that steps write.

    Attributes:
        is_by_users: Whether the user's training steps write any state.
        may_write_tensors: Whether any step writes a tensor in place that a backward may read.
        num_forwards: The number of forwards that have begun, of all stages of the rank.
    """

    def __init__(self, module: nn.Module, chain: BlockChain, tensors: SplitModule) -> None:
        self._chain, self._tensors = chain, tensors
        stages = tensors.local_stages
        self._last_stages = {rank: stage for stage, rank in enumerate(tensors.stage_ranks)}
        inside = {id(child) for block in chain.blocks for child in block.modules()}
        self._modules = {id(c): c for c in module.modules() if id(c) not in inside}
        self._block_stages: dict[int, int] = {}  # by id of the blocks' modules
        self._num_passes = dict.fromkeys(stages, 0)
        self._values_of: dict[int, list[_Written]] = {}
        self._in_place: set[Attribute] = set()
        self._written: dict[_Key, NamedAttribute] = {}
        self._by_users: dict[_Key, NamedAttribute] = {}  # in training
        self._of_blocks: set[_Key] = set()  # written in a block
        self._missing: dict[int, dict[_Key, tuple[NamedAttribute, str]]] = {s: {} for s in stages}
        self._missing_outside: dict[int, set[_Key]] = {s: set() for s in stages}  # of blocks
        self._have_run: set[int] = set()  # stages
        self._reached: dict[int, set[_Key]] = {stage: set() for stage in self._missing}
        self._made_once: dict[_Key, tuple[_SpaceOf, Any]] = {}
        self._spaces: dict[int, list[_SpaceOf]] = {}  # of other homes than a stage's
        self._weights: set[str] = set()  # names of parameters that are written in place
        self._saved: set[Attribute] = set()  # written in place, and saved for backwards
        self.is_by_users = False
        self.may_write_tensors = False
        self.num_forwards = 0

    @property
    def last_local_stage(self) -> int:
        """The last stage of the rank."""
        return max(self._num_passes)

    def add_traced_writes(self, record: StepRecord, stages: Sequence[Stage]) -> None:
        """Add the writes of a traced step, for the stages of a cut."""
        self._spaces.clear()
        self._weights.update(write.name for write in record.writes.weights)
        self._saved.update(record.writes.in_place_and_saved)
        self._in_place.update(record.writes.in_place)
        trains = torch.is_grad_enabled()
        for stage in stages:
            for block in stage.blocks:
                modules = self._chain.blocks[block].modules()
                self._block_stages.update(dict.fromkeys(map(id, modules), stage.index))
        self._refuse_shared(record)
        self._modules.update((id(child), child) for child, _ in record.writes.in_place)
        for write in record.writes.attributes:
            self._written[write.variable.key] = write.variable
            self._modules[id(write.variable.part)] = write.variable.part
            if write.is_users:
                if trains:
                    self._by_users[write.variable.key] = write.variable
                if write.point.is_in_block:
                    self._of_blocks.add(write.variable.key)
                for index, missing in self._missing.items():
                    if stages[index].runs_through(write.point, record):
                        self._reached[index].add(write.variable.key)
                    else:
                        message = self._message(write, index)
                        missing[write.variable.key] = write.variable, message
                        if not write.point.is_in_block:
                            self._missing_outside[index].add(write.variable.key)
        self.is_by_users = bool(self._by_users)
        self.may_write_tensors = bool(self._weights or self._saved)

    def _refuse_shared(self, record: StepRecord) -> None:
        """Refuse a container that several stages of a rank have: each would get its own copy."""
        first: dict[int, NamedAttribute] = {}
        for variable in [write.variable for write in record.writes.attributes]:
            is_in_place = variable.attribute in record.writes.in_place
            if not (is_in_place and isinstance(variable.value, _CONTAINERS)):
                continue
            other = first.setdefault(id(variable.value), variable)
            if self._homes_of(other.part) != self._homes_of(variable.part):
                raise ValueError(
                    f"{variable.label} and {other.label} are one {type(other.value).__name__}, "
                    f"which the step writes, and a rank with several stages has a copy of it for "
                    f"each: give it to the blocks as an argument, or use num_chunks=1 with a "
                    f"schedule of one stage per rank"
                )

    def _message(self, write: Write, stage: int) -> str:
        return (
            f"{write.variable.label} is written {self._describe_point(write.point)}"
            f"{in_brackets(write.line)}, which stage {stage} does not run, and stage {stage} uses "
            f"what an earlier microbatch has written there: read it after that line too, pass it "
            f"on as a tensor, keep what is of one block in that block, or write it in a hook, from "
            f"values that every rank has"
        )

    def _describe_point(self, point: StepPoint) -> str:
        if point.is_in_block:
            return f"in {self._chain.block_name(point.segment)}"
        if point.segment == len(self._chain):
            return "after the blocks"
        if point.segment == 0:
            return "before the blocks"
        return f"before {self._chain.block_name(point.segment)}"

    def written_tensors_of(self, stage: int) -> list[Tensor]:
        """List the tensors that ``stage`` writes in place and that its backwards may read."""
        if not self.may_write_tensors:
            return []
        weights = [
            slot.tensor
            for slot in self._tensors.slots
            if slot.name in self._weights and stage in self._tensors.owners[slot.name]
        ]
        # The other stages of the rank have their own buffers and attributes in each F.
        saved = [(m, name) for m, name in self._saved if self._home_of(m) == stage]
        values = [vars(m).get(name, m._buffers.get(name)) for m, name in saved]
        by_id = {id(tensor): tensor for tensor in (*weights, *tensors_in(values))}
        return [tensor for tensor in by_id.values() if not isinstance(tensor, ShapeOnly)]

    def with_values_of_stage(self, stage: Stage) -> AbstractContextManager[Any]:
        """Return the context of an F that begins: attributes have the values that ``stage`` wrote.

        If the step itself writes weights of blocks, such blocks of the rank's other stages have
        shapes meanwhile. Else each stage of the rank would repeat the write.
        """
        self.num_forwards += 1
        missing = self._missing[stage.index]
        # In the first microbatch an attribute that the step makes is absent on one device too.
        made = self._missing_outside[stage.index] if stage.index in self._have_run else set()
        self._have_run.add(stage.index)
        if len(self._num_passes) == 1:
            return _placing_placeholders(missing, made) if missing else NOTHING
        return combine_contexts(
            _StageValues(self, stage.index),
            _placing_placeholders(missing, made, self._make_other_home_filter(stage.index))
            if missing
            else NOTHING,
            self._hiding(stage) if self._weights else NOTHING,
        )

    def _hiding(self, stage: Stage) -> AbstractContextManager[Any]:
        local = [name for name in self._weights if self._tensors.is_local(name)]
        blocks = {
            block for name in local if (block := self._chain.enclosing_block(name)) is not None
        }
        others = sorted(blocks - {*stage.blocks})
        return self._tensors.hiding(*map(self._chain.block_name, others))

    def written_by_forward(self) -> WrittenByForward:
        """Return fingerprints of the attributes that the user's steps write, after a forward."""
        written = self._by_users.values()
        return WrittenByForward(
            self.num_forwards, [(v, fingerprint_if_small(v.value, _MOST)) for v in written]
        )

    def hiding_later_writes(
        self, stage: int, written: WrittenByForward | None
    ) -> AbstractContextManager[Any]:
        """Make attributes that later forwards have written raise on use in a backward."""
        if written is None:
            return NOTHING
        missing = self._missing[stage]
        may_differ = written.forward != self.num_forwards
        changed = [
            v
            for v, was in written.values
            if v.key in missing or (may_differ and _has_changed(v, was))
        ]
        if not changed:
            return NOTHING
        return _placing_placeholders({v.key: (v, _late_read_message(v)) for v in changed})

    def keep(self) -> Callable[[], None]:
        """Save the attributes that steps write, and all buffers of this rank, before a step runs.

        Returns:
            A function that restores them, as if no stage had run a microbatch since.
        """
        # All buffers: the trace does not see what a kernel writes, statistics of a norm say.
        state = self._state(self._own_buffers())

        def restore() -> None:
            self._values_of.clear()
            self._num_passes = dict.fromkeys(self._num_passes, 0)
            state.restore()

        return restore

    @contextmanager
    def undoing_writes(self) -> Iterator[None]:
        """Restore the attributes at the end of the context; the writes of the last slice remain."""
        state = self._state(())
        yield
        state.restore()

    def _own_buffers(self) -> list[Slot]:
        buffers = [slot for slot in self._tensors.slots if slot.kind == "_buffers"]
        return [slot for slot in buffers if self._tensors.is_local(slot.name)]

    def statistics(self) -> list[tuple[str, Tensor]]:
        """List the buffers of modules with one that is no whole number, with the name of that one.

        A second write of a counter is as good later; one of an average is not.
        """
        own = self._own_buffers()
        names = {id(slot.module): slot.name for slot in own if slot.tensor.is_floating_point()}
        return [(names[id(slot.module)], slot.tensor) for slot in own if id(slot.module) in names]

    def _state(self, buffers: Sequence[Slot]) -> StepState:
        variables = self._written.values()
        held = [v.value for v in variables if v.attribute in self._in_place]
        tensors = [value for value in held if type(value) is Tensor]
        # A buffer may be written in place, or be another tensor afterwards.
        holders = [*(child for child, _ in self._in_place), *(slot.module for slot in buffers)]
        places = {(child, "_buffers"): None for child in holders}
        attributes = *(v.attribute for v in variables), *self._in_place
        return StepState([*attributes, *places], [*tensors, *(slot.tensor for slot in buffers)])

    def is_block(self, function: Any) -> bool:
        """Return whether a function is a block or a method of one."""
        owner = getattr(function, "__self__", function)
        return any(owner is block for block in self._chain.blocks)

    @contextmanager
    def undoing_recompute_writes(self, is_in_block: bool) -> Iterator[None]:
        """Undo, after the context, the attribute writes of a function that a backward recomputes.

        ``is_in_block``: whether only code of a block runs.
        """
        written = [v for k, v in self._by_users.items() if not is_in_block or k in self._of_blocks]
        values = [(v, v.value) for v in written]
        for variable, value in values:
            if isinstance(value, RemoteValue):
                variable.put(value.local_value)
        state = StepState((v.attribute for v in written), ())
        for variable, value in values:
            if variable.key not in self._of_blocks:
                variable.put(value)
        try:
            yield
        finally:
            state.restore()
            for variable, value in values:
                variable.put(value)

    def _home_of(self, child: nn.Module) -> int:
        stage = self._block_stages.get(id(child))
        return stage if stage in self._num_passes else self.last_local_stage

    def _homes_of(self, child: nn.Module) -> list[int]:
        """Return the home of a module on each rank, so that all ranks decide alike."""
        stage = self._block_stages.get(id(child))
        rank_of_block = None if stage is None else self._tensors.stage_ranks[stage]
        return [
            last if stage is None or rank != rank_of_block else stage
            for rank, last in self._last_stages.items()
        ]

    def _has_copy(self, stage: int, child: nn.Module, name: str) -> bool:
        """Return whether a stage has its own copy of an attribute that is written in place."""
        key = id(child), name
        is_missing = key in self._missing[stage] and key not in self._reached[stage]
        return self._home_of(child) != stage and not is_missing

    def _make_other_home_filter(self, stage: int) -> Callable[[nn.Module], bool]:
        return lambda child: self._home_of(child) != stage

    def _spaces_of_other_homes(self, stage: int) -> list[_SpaceOf]:
        """List the attributes, and the buffers that are written in place, of other homes."""
        if stage not in self._spaces:
            in_place = {id(child) for child, _ in self._in_place}
            others = [(k, c) for k, c in self._modules.items() if self._home_of(c) != stage]
            buffers = [(child, True) for key, child in others if key in in_place]
            self._spaces[stage] = [*((child, False) for _, child in others), *buffers]
        return self._spaces[stage]

    def _writes_since(
        self, child: nn.Module, is_buffers: bool, before: _Values
    ) -> Iterator[_Written]:
        """Yield the writes that belong to the pass's stage."""
        space = _space(child, is_buffers)
        for name in (before.keys() | space.keys()) - REGISTRIES:
            value, old = space.get(name, GONE), before.get(name, GONE)
            if value is old or (is_buffers and Attribute(child, name) not in self._in_place):
                continue
            if name in before or not _is_flag_or_cache(value):
                yield (child, is_buffers), name, value, old
            else:
                self._made_once[id(child), name] = (child, is_buffers), value

    def _fingerprint_made_once(self) -> list[tuple[str, Any, Fingerprint]]:
        """Record the values that a pass has made for all later ones; forget those that are gone."""
        entries = self._made_once.items()
        self._made_once = {k: v for k, v in entries if _space(*v[0]).get(k[1], GONE) is v[1]}
        kept = [(name, value) for (_, name), (_, value) in self._made_once.items()]
        return [(name, value, fingerprint(value)) for name, value in kept]


class _StageValues:
    """One F of a stage, in which modules have the values that this stage has written."""

    def __init__(self, writes: StepWrites, stage: int) -> None:
        self._writes, self._stage = writes, stage

    def __enter__(self) -> None:
        writes, stage = self._writes, self._stage
        self._before = [
            (child, is_buffers, (child.__dict__["_buffers"] if is_buffers else vars(child)).copy())
            for child, is_buffers in writes._spaces_of_other_homes(stage)
        ]
        self._made_once = writes._fingerprint_made_once() if writes._made_once else []
        for place, name, value, _ in writes._values_of.get(stage, ()):
            _put(place, name, value)
        for child, name in writes._in_place:
            for space in (child.__dict__, child.__dict__["_buffers"]):
                if name in space and writes._has_copy(stage, child, name):
                    space[name] = private_copy(space[name])

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        writes = self._writes
        written: list[_Written] = []
        for child, is_buffers, before in self._before:
            space = child.__dict__["_buffers"] if is_buffers else vars(child)
            # Most modules are unchanged: no line of Python for each attribute.
            if (
                len(before) != len(space)
                or not all(map(eq, before, space))
                or not all(map(is_, before.values(), space.values()))
            ):
                written += writes._writes_since(child, is_buffers, before)
        for place, name, _, old in written:
            _put(place, name, old)
        writes._values_of[self._stage] = written
        if error is None:
            if self._made_once:
                self._check_made_once()
            writes._num_passes[self._stage] += 1
            if len(set(writes._num_passes.values())) == 1:
                writes._values_of.clear()

    def _check_made_once(self) -> None:
        for name, value, was in self._made_once:
            if not is_unchanged(was, fingerprint(value)):
                raise ValueError(
                    f"the first step makes self.{name}, and later ones change it before the last "
                    f"stage of a rank: each stage of the rank would; make it in __init__"
                )


# autograd's error for a saved tensor that was written since: its shape, and its version now.
_WRITTEN = re.compile(r"modified by an inplace operation: .*\[([\d, ]*)\]\].*is at version (\d+)")


def reraise_as_late_write(error: RuntimeError, tensors: SplitModule) -> None:
    """Raise ``RuntimeError`` with the buffer's name if one was written before a backward reads it.

    The first run of the step, which would have shown it, did not write it.
    """
    match = _WRITTEN.search(str(error))
    for slot in tensors.slots if match else ():
        tensor = slot.tensor
        if slot.kind != "_buffers" or isinstance(tensor, ShapeOnly):
            continue
        if match and match.groups() == (str([*tensor.shape])[1:-1], str(tensor._version)):
            raise RuntimeError(
                f"the step writes the buffer {slot.name} in place, which it did not when it was "
                f"first run, so other microbatches' backwards do not find what their forwards "
                f"used; write it in every step, the first one too, or assign a new tensor "
                f"(self.{slot.attribute} = self.{slot.attribute} * factor)"
            ) from error


class _RemoteWrittenValue(RemoteValue):
    """Placeholder for an attribute that another stage writes.

    Adding elements to a container (``append``, ``update``, ``d[k] = v``, ``+=``) acts on the real
    container, or on a copy that is made then if ``copies``; every other use raises.
    """

    __slots__ = ("_copies", "_variable")

    def __init__(self, message: str, variable: NamedAttribute, copies: bool) -> None:
        super().__init__(message, variable.value)
        self._variable = variable
        self._copies = copies

    def _container(self) -> Any:
        if self._copies:
            self.local_value, self._copies = private_copy(self.local_value), False
        return self.local_value

    def __getattr__(self, name: str) -> Any:
        if name in _FILLS and isinstance(self.local_value, _CONTAINERS):
            return getattr(self._container(), name)
        return super().__getattr__(name)

    def __setitem__(self, key: Any, value: Any) -> None:  # type: ignore[override]
        self._container()[key] = value

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        if not isinstance(self.local_value, _CONTAINERS):
            self._raise()
        self.local_value = self._container()
        self.local_value += other
        return self

    def clear(self) -> None:
        self._container().clear()
        self._variable.put(self.local_value)


def _has_changed(variable: NamedAttribute, was: Fingerprint | None) -> bool:
    now = None if was is None else fingerprint_if_small(variable.value, _MOST)
    return was is None or now is None or not is_unchanged(was, now)


@contextmanager
def _placing_placeholders(
    missing: Mapping[_Key, tuple[NamedAttribute, str]],
    made: Set[_Key] = frozenset(),
    copies: Callable[[nn.Module], bool] = lambda _: False,
) -> Iterator[None]:
    """Put placeholders; attributes that are absent get one if they are among ``made``."""
    placed = []
    for key, (variable, message) in missing.items():
        is_there = variable.value is not GONE or hasattr(type(variable.part), variable.name)
        if is_there or key in made:
            placed.append((variable, _RemoteWrittenValue(message, variable, copies(variable.part))))
            variable.put(placed[-1][1])
    try:
        yield
    finally:
        for variable, placeholder in placed:
            if variable.value is placeholder:
                variable.put(placeholder.local_value)


def _late_read_message(variable: NamedAttribute) -> str:
    return (
        f"{variable.label}, which the step writes, is read in a backward, after other "
        f"microbatches' forwards have written it: give a block that runs again what it reads as "
        f"an argument, an autograd function its ctx, or bind the value when a hook is made"
    )


def _is_flag_or_cache(value: Any) -> bool:
    """Whether a new attribute serves all later passes: a flag that hooks are registered, a cache.

    Each stage would make it again, and register the hooks again. A new number or tensor may be a
    count, and each stage has to draw from a generator.
    """
    return isinstance(value, bool) or not _is_counter_or_generator(value)


def _is_counter_or_generator(value: Any) -> bool:
    return isinstance(value, _COUNTS) or is_iterator(value) or is_random_generator(value)


def _space(child: nn.Module, is_buffers: bool) -> _Values:
    """Return a module's attributes, or its buffers; each stage has its own dict of these."""
    space = child.__dict__
    return space["_buffers"] if is_buffers else space


def _put(place: _SpaceOf, name: str, value: Any) -> None:
    if value is GONE:
        _space(*place).pop(name, None)
    else:
        _space(*place)[name] = value
