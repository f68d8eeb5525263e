"""What steps write to attributes, and which stage finds it where.

A step is called once for each microbatch and stage, and a line behind the cut runs on a later stage
only. So an attribute that a stage lacks stands as a placeholder while the stage runs, which raises
when it is used; and in a backward so does what other microbatches' forwards have written since.

Each stage of a rank runs the step's beginning on the one module that the rank has, and so would
count every microbatch once more. So each stage has values of its own of what it has written, as if
it were alone on a rank. The module has those of the rank's last stage, which comes farthest in the
step; another stage's stand in their place while that stage runs. When all stages have run as many
microbatches, the last one's are all that is left, so that what hooks write in between steps counts
for every stage. What the first pass makes for all later ones, a flag or a cache, is made once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import eq, is_
from typing import Any

from torch import Tensor, nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.ownership import Ownership
from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.cut.record import Probe
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.attributes import (
    GONE,
    REGISTRIES,
    Place,
    Snapshot,
    Variable,
    Write,
)
from lightning_pipeoffload.runtime.users_code.elsewhere import Elsewhere
from lightning_pipeoffload.runtime.users_code.snapshot import (
    Attribute,
    Look,
    is_same_look,
    look_at,
    private_copy,
)
from lightning_pipeoffload.runtime.users_code.sources import is_generator, is_iterator
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets

_Values = dict[str, Any]
_SpaceOf = tuple[nn.Module, bool]  # attributes of a module, or its buffers
_Key = tuple[int, str]
Left = list[tuple[Variable, Look]]
"""What a forward has left of the attributes that steps write."""

_NOTHING = nullcontext()
_CONTAINERS = (list, dict, set, deque)
_FILLS = {"add", "append", "appendleft", "extend", "extendleft", "insert", "update"}
_COUNTS = (int, float, complex, Tensor)


class StepWrites:
    """Attributes and buffers outside of the blocks, as each stage of a rank has written them."""

    def __init__(self, module: nn.Module, chain: BlockChain, stages: Iterable[int]) -> None:
        self._chain = chain
        inside = {id(child) for block in chain.blocks for child in block.modules()}
        self._modules = dict.fromkeys(c for c in module.modules() if id(c) not in inside)
        self._num_passes = dict.fromkeys(stages, 0)
        self._own: dict[int, list[tuple[_SpaceOf, str, Any, Any]]] = {}
        self._in_place: set[Attribute] = set()
        self._written: dict[_Key, Variable] = {}
        self._by_users: dict[_Key, Variable] = {}
        self._of_blocks: set[_Key] = set()  # which a block writes itself
        self._missing: dict[int, dict[_Key, tuple[Variable, str]]] = {s: {} for s in stages}
        self._made_once: dict[int, tuple[str, Any]] = {}
        self._weights: set[str] = set()  # that are written in place, by name
        self._saved: set[Attribute] = set()  # of what is written in place, what backwards read

    @property
    def is_by_users(self) -> bool:
        """Whether the user's steps write anything."""
        return bool(self._by_users)

    @property
    def last_stage(self) -> int:
        """The rank's stage that comes farthest in the step."""
        return max(self._num_passes)

    def expect(self, probe: Probe, stages: Sequence[Stage]) -> None:
        """Learn what a step writes."""
        self._weights.update(write.name for write in probe.weight_writes)
        self._saved.update(probe.saved_and_written)
        # A copy of a registry would come in its place, for good, with copies of all its buffers.
        in_place = {place for place in probe.written_in_place if place[1] not in REGISTRIES}
        self._in_place.update(in_place)
        for write in probe.writes:
            self._written[write.variable.key] = write.variable
            if write.is_users:
                self._by_users[write.variable.key] = write.variable
                if write.place.is_in_block:
                    self._of_blocks.add(write.variable.key)
                for index, missing in self._missing.items():
                    if not comes_to(stages[index], write.place, probe, stages):
                        message = self._message(write, index)
                        missing[write.variable.key] = write.variable, message

    def _message(self, write: Write, stage: int) -> str:
        return (
            f"{write.variable.label} is written {self._where(write.place)}"
            f"{in_brackets(write.line)}, where stage {stage} does not come, and stage {stage} uses "
            f"what an earlier microbatch has left there: read it behind that line too, hand it on "
            f"as a tensor, or write it in a hook, from what every rank has"
        )

    def _where(self, place: Place) -> str:
        if place.is_in_block:
            return f"in {self._chain.block_name(place.segment)}"
        if place.segment == len(self._chain):
            return "behind the blocks"
        if place.segment == 0:
            return "before the blocks"
        return f"before {self._chain.block_name(place.segment)}"

    def tensors_of(self, stage: int, ownership: Ownership) -> list[Tensor]:
        """List the tensors that a stage writes in place, and that its backwards may read."""
        if not self._weights and not self._saved:
            return []
        weights = [
            slot.tensor
            for slot in ownership.slots
            if slot.name in self._weights and stage in ownership.owners[slot.name]
        ]
        # The other stages of the rank have their own buffers and attributes in each F.
        others = self._saved if stage == self.last_stage else ()
        held = [vars(m).get(name, m._buffers.get(name)) for m, name in others]
        found = {id(tensor): tensor for tensor in (*weights, *tensors_in(held))}
        return [tensor for tensor in found.values() if not isinstance(tensor, ShapeOnly)]

    def of_stage(self, stage: int) -> AbstractContextManager[None]:
        """Let the module have what ``stage`` has written, while it runs one microbatch."""
        if len(self._num_passes) > 1:
            return self._taking_turns(stage)
        missing = self._missing[stage]
        return _standing_for(missing.values()) if missing else _NOTHING

    def look(self) -> Left:
        """Look at what a forward leaves of what the user's steps write."""
        return [(variable, look_at(variable.value)) for variable in self._by_users.values()]

    def in_backward(self, stage: int, left: Left) -> AbstractContextManager[None]:
        """Let what other forwards have written since raise while a backward runs."""
        missing = self._missing[stage]
        changed = [
            v for v, look in left if v.key in missing or not is_same_look(look, look_at(v.value))
        ]
        if not changed:
            return _NOTHING
        return _standing_for([(v, _read_in_backward(v)) for v in changed])

    def keep(self, buffers: Iterable[Tensor]) -> Callable[[], None]:
        """Keep what there is when all stages have run as many microbatches, and some buffers.

        Returns:
            A function that puts it back, as if none of them had run another one since.
        """
        held = [v.value for v in self._written.values() if (v.part, v.name) in self._in_place]
        tensors = [value for value in held if type(value) is Tensor]
        kept = Snapshot(self._written.values(), [*tensors, *buffers])
        places = [
            (space, name, space[name])
            for child, name in self._in_place
            for space in (child.__dict__, child.__dict__["_buffers"])
            if name in space
        ]

        def put_back() -> None:
            for space, name, value in places:  # stages have had copies in their place
                space[name] = value
            self._own.clear()
            self._num_passes = dict.fromkeys(self._num_passes, 0)
            kept.put_back()

        return put_back

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """Let a block that runs again in a backward write what it writes; it leaves no trace."""
        found = [(v, v.value) for v in self._by_users.values()]
        for variable, value in found:
            if isinstance(value, Elsewhere) and variable.key in self._of_blocks:
                variable.put(value.own)
        kept = Snapshot(self._by_users.values())
        try:
            yield
        finally:
            kept.put_back()
            for variable, value in found:
                variable.put(value)

    @contextmanager
    def _taking_turns(self, stage: int) -> Iterator[None]:
        missing = _standing_for(self._missing[stage].values())
        with _NOTHING if stage == self.last_stage else self._exchanged(stage), missing:
            yield
        self._num_passes[stage] += 1
        if len(set(self._num_passes.values())) == 1:
            self._own.clear()

    @contextmanager
    def _exchanged(self, stage: int) -> Iterator[None]:
        before = [(*place, _space(*place).copy()) for place in self._spaces()]
        made = [(name, value, look_at(value)) for name, value in self._made_once.values()]
        for place, name, value, _ in self._own.get(stage, ()):
            _put(place, name, value)
        for child, name in self._in_place:
            for space in (child.__dict__, child.__dict__["_buffers"]):
                if name in space:
                    space[name] = private_copy(space[name])
        try:
            yield
        finally:
            written = [each for found in before for each in self._written_in(*found)]
            for place, name, _, old in written:
                _put(place, name, old)
            self._own[stage] = written
        for name, value, look in made:
            if not is_same_look(look, look_at(value)):
                raise ValueError(
                    f"the first step makes self.{name}, and later ones change it before the last "
                    f"stage of a rank: each stage of the rank would; make it in __init__"
                )

    def _spaces(self) -> Iterator[_SpaceOf]:
        """Yield attributes, and the buffers where more than one stage writes some."""
        for child in self._modules:
            yield child, False
        for child in {child for child, _ in self._in_place}:
            if child in self._modules:  # those of a block are its stage's alone
                yield child, True

    def _written_in(
        self, child: nn.Module, is_buffers: bool, before: _Values
    ) -> Iterator[tuple[_SpaceOf, str, Any, Any]]:
        """Yield what a pass has written for its own stage alone: where, the value, the old one."""
        space = _space(child, is_buffers)
        # By far most modules: not a line of Python for each of their attributes.
        if (
            len(before) == len(space)
            and all(map(eq, before, space))
            and all(map(is_, before.values(), space.values()))
        ):
            return
        for name in (before.keys() | space.keys()) - REGISTRIES:
            value, old = space.get(name, GONE), before.get(name, GONE)
            if value is old or (is_buffers and (child, name) not in self._in_place):
                continue
            if name in before or not _is_made_once(value):
                yield (child, is_buffers), name, value, old
            else:
                self._made_once[id(value)] = name, value


def comes_to(stage: Stage, place: Place, probe: Probe, stages: Sequence[Stage]) -> bool:
    """Whether a stage comes to a place of the step."""
    if not place.is_in_block:
        return stage is stages[-1] or place.segment < stage.blocks.stop
    output = probe.flow.outputs[place.segment]
    runs_remote = place.segment in probe.flow.opened or not output.is_template
    is_before = place.segment < stage.blocks.start
    return place.segment in stage.blocks or (is_before and runs_remote)


class _Lacking(Elsewhere):
    """Stands for an attribute of which a stage lacks what another one has written.

    What only puts something into a container asks for nothing that is in it.
    """

    __slots__ = ("_variable",)

    def __init__(self, message: str, variable: Variable) -> None:
        super().__init__(message, variable.value)
        self._variable = variable

    def __getattr__(self, name: str) -> Any:
        if name in _FILLS and isinstance(self.own, _CONTAINERS):
            return getattr(self.own, name)
        return super().__getattr__(name)

    def __setitem__(self, key: Any, value: Any) -> None:  # type: ignore[override]
        self.own[key] = value

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        if not isinstance(self.own, _CONTAINERS):
            self._use()
        self.own += other
        return self

    def clear(self) -> None:
        self.own.clear()
        self._variable.put(self.own)


@contextmanager
def _standing_for(found: Iterable[tuple[Variable, str]]) -> Iterator[None]:
    placed = []
    for variable, message in found:
        if variable.value is not GONE or hasattr(type(variable.part), variable.name):
            placed.append((variable, _Lacking(message, variable)))
            variable.put(placed[-1][1])
    try:
        yield
    finally:
        for variable, placeholder in placed:
            if variable.value is placeholder:
                variable.put(placeholder.own)


def _read_in_backward(variable: Variable) -> str:
    return (
        f"{variable.label}, which the step writes, is read in a backward, after other "
        f"microbatches' forwards have written it: give a block that runs again what it reads as "
        f"an argument, an autograd function its ctx, or bind the value when a hook is made"
    )


def _is_made_once(value: Any) -> bool:
    """Whether a first pass has made it for all that follow: a flag that hooks are there, a cache.

    Each stage would make it again, hooks too. A number or tensor that is new may be a count, and
    from what is drawn from each stage has to draw.
    """
    return isinstance(value, bool) or not _goes_on(value)


def _goes_on(value: Any) -> bool:
    return isinstance(value, _COUNTS) or is_iterator(value) or is_generator(value)


def _space(child: nn.Module, is_buffers: bool) -> _Values:
    """Return attributes or buffers; a stage's buffers are another dict than the module's own."""
    space = child.__dict__
    return space["_buffers"] if is_buffers else space


def _put(place: _SpaceOf, name: str, value: Any) -> None:
    if value is GONE:
        _space(*place).pop(name, None)
    else:
        _space(*place)[name] = value
