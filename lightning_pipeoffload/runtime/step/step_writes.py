"""What steps write outside of the blocks, once for each microbatch on a rank of several stages.

Each stage of a rank runs the step's beginning on the one module that the rank has, and so would
count every microbatch once more. So each stage has values of its own of what it has written, as if
it were alone on a rank. The module has those of the rank's last stage, which comes farthest in the
step; another stage's stand in their place while that stage runs. When all stages have run as many
microbatches, the last one's are all that is left, so that what hooks write in between steps counts
for every stage. What the first pass makes for all later ones, a flag or a cache, is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import eq, is_
from typing import Any

from torch import Tensor, nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.step.seen_values import WrittenTensors
from lightning_pipeoffload.runtime.users_code.module_snapshot import Attribute, private_copy
from lightning_pipeoffload.runtime.users_code.namespaces import GONE, REGISTRIES
from lightning_pipeoffload.runtime.users_code.random_sources import (
    Source,
    forget_readings,
    make_rewindable,
    take_snapshot,
)
from lightning_pipeoffload.runtime.users_code.source_kinds import generator_kind, is_iterator
from lightning_pipeoffload.runtime.users_code.written_state import WrittenState

_Values = dict[str, Any]

_COUNTS = (int, float, complex, Tensor)


class StepWrites:
    """The attributes and buffers outside of the blocks, as each stage of a rank has written them.

    Args:
        module: The user's module.
        chain: Its blocks.
        stages: The stages of the rank.

    Attributes:
        module: The user's module.
        state: What the steps write anywhere, for blocks that run again.
        tensors: The tensors that they write in place, for backwards.
    """

    def __init__(self, module: nn.Module, chain: BlockChain, stages: Iterable[int]) -> None:
        self.module = module
        inside = {id(child) for block in chain.blocks for child in block.modules()}
        self._modules = [child for child in module.modules() if id(child) not in inside]
        self._num_passes = dict.fromkeys(stages, 0)
        self._own: dict[int, list[_Values]] = {}
        self._in_place: set[Attribute] = set()
        self.state = WrittenState()
        self.tensors = WrittenTensors(self.last_stage)
        self._sources: list[Source] = []
        self._own_states: dict[int, dict[Source, Any]] = {}

    @property
    def last_stage(self) -> int:
        """The rank's stage that comes farthest in the step."""
        return max(self._num_passes)

    def expect(self, attributes: Iterable[Attribute]) -> None:
        """Learn whose values the step changes in place, which are copied for each stage."""
        # A copy of a registry would come in its place, for good, with copies of all its buffers.
        self._in_place.update(place for place in attributes if place[1] not in REGISTRIES)

    def expect_sources(self, sources: Iterable[Source]) -> None:
        """Learn what goes on in a step, and so has a state for each stage."""
        self._sources += [source for source in sources if source not in self._sources]

    def of_stage(self, stage: int) -> AbstractContextManager[None]:
        """Let the module have what ``stage`` has written, while it runs one microbatch."""
        return nullcontext() if len(self._num_passes) == 1 else self._taking_turns(stage)

    def keep(self) -> Callable[[], None]:
        """Keep what there is when all stages have run as many microbatches.

        Returns:
            A function that puts it back, as if none of them had run another one since.
        """
        kept = self.state.keep()

        def put_back() -> None:
            self._own.clear()
            self._own_states.clear()
            self._num_passes = dict.fromkeys(self._num_passes, 0)
            if kept is not None:
                kept.put_back()

        return put_back

    @contextmanager
    def _taking_turns(self, stage: int) -> Iterator[None]:
        if stage == self.last_stage:
            yield
        else:
            make_rewindable(self._sources)
            with self._exchanged(stage), self._drawing(stage) if self._sources else nullcontext():
                yield
        self._num_passes[stage] += 1
        if len(set(self._num_passes.values())) == 1:
            self._own.clear()
            self._own_states.clear()
            forget_readings(self._sources)

    @contextmanager
    def _drawing(self, stage: int) -> Iterator[None]:
        """Let sources go on from where this stage has come, and then from where they are now."""
        before = {source: take_snapshot(source) for source in self._sources}
        own = self._own_states.get(stage, {})
        for source, found in before.items():
            if found is not None and source in own and source.kind.goes_on:
                source.kind.write(found.found, own[source])
        try:
            yield
        finally:
            after = ((source, take_snapshot(source)) for source in self._sources)
            self._own_states[stage] = {source: now.state for source, now in after if now}
            for found in before.values():
                if found is not None:
                    found.restore()

    @contextmanager
    def _exchanged(self, stage: int) -> Iterator[None]:
        before = self._values()
        for space, own in zip(self._spaces(), self._own.get(stage, ()), strict=False):
            _put(space, own)
        for child, name in self._in_place:
            for space in (child.__dict__, child.__dict__["_buffers"]):
                if name in space:
                    space[name] = private_copy(space[name])
        try:
            yield
        finally:
            after = self._values()
            written = [*map(_written, before, after)]
            for space, old, names in zip(self._spaces(), before, written, strict=False):
                _put(space, {name: old.get(name, GONE) for name in names})
            self._own[stage] = written

    def _spaces(self) -> list[_Values]:
        attributes = [child.__dict__ for child in self._modules]
        return attributes + [space["_buffers"] for space in attributes]

    def _values(self) -> list[_Values]:
        """Copy the attributes, and of the buffers those that more than one stage writes."""
        attributes = [child.__dict__.copy() for child in self._modules]
        if not self._in_place:
            return attributes
        buffers = []
        for child in self._modules:
            found = child.__dict__["_buffers"].items()
            buffers.append({n: tensor for n, tensor in found if (child, n) in self._in_place})
        return attributes + buffers


def _written(before: _Values, after: _Values) -> _Values:
    """Return what a pass has written for its own stage alone."""
    # By far most modules: not a line of Python for each of their attributes.
    if (
        len(before) == len(after)
        and all(map(eq, before, after))
        and all(map(is_, before.values(), after.values()))
    ):
        return {}
    names = (before.keys() | after.keys()) - REGISTRIES
    found = {name: after.get(name, GONE) for name in names}
    return {
        name: value
        for name, value in found.items()
        if value is not before.get(name, GONE) and (name in before or not _is_made_once(value))
    }


def _is_made_once(value: Any) -> bool:
    """Whether a first pass has made it for all that follow: a flag that hooks are there, a cache.

    Each stage would make it again, hooks too. A number or tensor that is new may be a count, and
    from what is drawn from each stage has to draw.
    """
    return isinstance(value, bool) or not _goes_on(value)


def _goes_on(value: Any) -> bool:
    return isinstance(value, _COUNTS) or is_iterator(value) or generator_kind(value) is not None


def _put(space: _Values, values: _Values) -> None:
    for name, value in values.items():
        if value is GONE:
            space.pop(name, None)
        else:
            space[name] = value
