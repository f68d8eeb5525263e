"""Steps that run whole on every rank, while each block runs on the rank that owns it.

An evaluation step that cannot be cut, such as one that generates text, and a call of the module in
a hook have the same values and branches on every rank. Their code outside of the blocks runs on
all ranks. A block, and a module outside of the blocks that is as large, runs on its owner alone;
its parameters stay there. Then the owner sends one header to the others, which do not run it: the
structure of what it returned, with shapes, and what it changed in its arguments and attributes. The
values of its result follow where code outside needs them: at once after the last of several blocks
of one owner, else when that code reads them. They go to all ranks, not to the next owner alone:
what code between two owners reads is not known before, and they are some kB for each token. What is
small outside of the blocks is sent to all ranks once for a run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import leaves_of, mix_seed, replaced, seed_all
from lightning_pipeoffload.runtime.cut import ActiveStepRun
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import HeldOutput, quantize_if_4bit
from lightning_pipeoffload.runtime.users_code import RandomGenerators, Slot, find_slots, swapped
from lightning_pipeoffload.runtime.whole.root_values import RootValues
from lightning_pipeoffload.runtime.whole.unit_calls import OwnersCall, RemoteUnitCall, Unit
from lightning_pipeoffload.runtime.whole.values import HeldValues


class WholeRuns:
    """The runs with a module, in steps and in hooks.

    Args:
        pipeline: The module and its ranks.

    Attributes:
        peak_remote_bytes: The most bytes of other ranks' weights that this rank has held in a run
            since the module was cut.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._layout: UnitLayout | None = None
        self.peak_remote_bytes = 0

    def prepare_run(
        self, seed: int | None, part: nn.Module | None = None, num_shared_calls: int = 0
    ) -> WholeRun:
        """Prepare a run.

        Args:
            seed: The seed of the step's random numbers; None: the generators are not seeded.
            part: The module that is called; None: the whole module.
            num_shared_calls: In so many calls of blocks, the first ones, all ranks get the values
                of what a block keeps in its arguments and attributes; later it stays on its owner.
        """
        if self._layout is None or not self._layout.matches_cut(self._pipeline.tensors):
            self._layout = UnitLayout(self._pipeline)
        return WholeRun(self._layout, seed, self._record_bytes, part, num_shared_calls)

    def _record_bytes(self, num_bytes: int) -> None:
        self.peak_remote_bytes = max(self.peak_remote_bytes, num_bytes)

    def drop_layout(self) -> None:
        """Free copies of values of a module that is not cut."""
        self._layout = None


class UnitLayout:
    """Which rank runs which unit of a module that is cut in one way.

    Args:
        pipeline: The module and its ranks.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.module, self.chain, self.group = pipeline.module, pipeline.chain, pipeline.group
        self.tensors = tensors = pipeline.tensors
        module, chain, group = self.module, self.chain, self.group
        self._owners, self._was_split = tensors.owners, tensors.is_split
        self.values = HeldValues(group)
        self.names = {id(part): name for name, part in module.named_modules()}
        inside: list[list[Slot]] = [[] for _ in chain.blocks]
        self.outside: list[Slot] = []
        for slot in find_slots(module):
            index = chain.enclosing_block(slot.name)
            (self.outside if index is None else inside[index]).append(slot)
        sizes = [_size(slots) for slots in inside]
        ranks: Sequence[int | None] = _balance_blocks_by_bytes(sizes, group.num_ranks)
        if tensors.is_split:
            ranks = [tensors.rank_with_all(slot.name for slot in slots) for slots in inside]
        # A chain that is still to be found by a step's calls has no blocks.
        followers = [*ranks[1:], None] if ranks else []
        self.blocks = [
            Unit(name, block, slots, rank if slots else None, rank == follower)
            for name, block, slots, rank, follower in zip(
                chain.names, chain.blocks, inside, ranks, followers, strict=True
            )
        ]
        self.large = [*self._large_modules(sum(sizes) / len(sizes))] if sizes else []
        self.generators = RandomGenerators(module)
        self._scopes: dict[int, CalledUnits] = {}
        self.root_values = RootValues(group)

    def matches_cut(self, tensors: Any) -> bool:
        """Whether the module is still cut as it was when this was made."""
        is_same = self.tensors is tensors and self._owners is tensors.owners
        return is_same and self._was_split == tensors.is_split

    def _large_modules(self, least: float) -> Iterator[Unit]:
        """Yield the largest modules without blocks that have one owner and ``least`` bytes."""
        first, last = 0, self.group.num_ranks - 1
        taken = ""
        for name, part in self.module.named_modules():
            path = f"{name}."
            if not name or (taken and path.startswith(taken)):
                continue
            slots = [slot for slot in self.outside if slot.name.startswith(path)]
            has_blocks = any(block.startswith(path) for block in self.chain.names)
            if has_blocks or _size(slots) < max(1, least):
                continue
            rank: int | None = first if self._comes_first(name) else last
            if self.tensors.is_split:
                rank = self.tensors.rank_with_all(slot.name for slot in slots)
            if rank is not None:
                taken = path
                yield Unit(name, part, slots, rank)

    def _comes_first(self, name: str) -> bool:
        """Whether a module is registered before the first block."""
        names = [*self.names.values()]
        return names.index(name) < names.index(self.chain.names[0])

    @contextmanager
    def providing_remote_tensors(self, called_units: CalledUnits) -> Iterator[int]:
        """Give each rank the values that it needs for a run; all ranks enter.

        Yields:
            The bytes of other ranks' weights that this rank has got.
        """
        if self.tensors.is_split:
            is_on_every_stage = self.tensors.is_on_every_stage
            remote = [
                slot for slot in called_units.broadcast_slots if not is_on_every_stage(slot.name)
            ]
            rank, owner_of = self.group.rank, self.tensors.owner_of
            with swapped([(slot, self._broadcast_tensor(slot)) for slot in remote]):
                yield _size([slot for slot in remote if owner_of(slot.name) != rank])
        else:
            units = *called_units.blocks.values(), *called_units.large
            needed: list[tuple[Slot, int | None]] = [
                (slot, None) for slot in called_units.broadcast_slots
            ]
            needed += [(slot, unit.rank) for unit in units for slot in unit.slots]
            with self.root_values.swapped_in(needed):
                yield 0

    def _broadcast_tensor(self, slot: Slot) -> Tensor:
        tensor = slot.tensor
        quantize_if_4bit(tensor, tensor.device)
        return self.group.broadcast_to_devices(tensor, self.tensors.owner_of(slot.name))

    def called_units(self, part: nn.Module | None) -> CalledUnits:
        """Return the units in a module, and the slots of its other tensors.

        Args:
            part: The module that is called; None: the whole module.
        """
        key = id(part)
        if key not in self._scopes:
            called = {id(child) for child in (part or self.module).modules()}
            inside = [id(u.module) in called and u.module is not part for u in self.blocks]
            blocks = {index: self.blocks[index] for index, is_in in enumerate(inside) if is_in}
            large = [u for u in self.large if id(u.module) in called and u.module is not part]
            apart = {slot.name for unit in (*blocks.values(), *large) for slot in unit.slots}
            every = [*self.outside, *(slot for unit in self.blocks for slot in unit.slots)]
            broadcast_slots = [s for s in every if id(s.module) in called and s.name not in apart]
            self._scopes[key] = CalledUnits(blocks, large, broadcast_slots)
        return self._scopes[key]


class CalledUnits(NamedTuple):
    """What a run calls.

    Attributes:
        blocks: The blocks, by their place in the chain.
        large: The large modules outside of the blocks.
        broadcast_slots: The slots of all other tensors, which are sent to all ranks for the run.
    """

    blocks: dict[int, Unit]
    large: list[Unit]
    broadcast_slots: list[Slot]


class WholeRun:
    """One run of a step, or of a module that a hook calls, on every rank.

    Args:
        layout: Which rank runs what.
        seed: The seed of the step's random numbers; None: the generators are not seeded.
        record_bytes: Gets the bytes of other ranks' weights that this rank has held, at the end.
        part: The module that is called; None: the whole module.
        num_shared_calls: See :meth:`WholeRuns.prepare_run`.

    Attributes:
        calls: The block of each call.
    """

    def __init__(
        self,
        layout: UnitLayout,
        seed: int | None,
        record_bytes: Callable[[int], None],
        part: nn.Module | None = None,
        num_shared_calls: int = 0,
    ) -> None:
        self._layout, self._group = layout, layout.group
        self._num_shared_calls = num_shared_calls
        self._seed, self._record_bytes = seed, record_bytes
        self._scope = layout.called_units(part)
        self._generators = layout.generators
        self.calls: list[int] = []
        self._num_held = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the step within the context, without gradients."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(ActiveStepRun(self._layout.chain, self))
            num_remote = stack.enter_context(self._layout.providing_remote_tensors(self._scope))
            for unit in self._scope.large if self._group.num_ranks > 1 else ():
                stack.enter_context(self._forward_on_owner(unit))
            stack.enter_context(self._generators.restoring())
            self._seed_next_call()
            yield
            if self._num_held or self._seed is not None:  # ranks begin a hook's call together
                self._layout.values.broadcast_live_outputs()
            self._record_bytes(num_remote + self._layout.values.pop_weight_bytes())

    @contextmanager
    def _forward_on_owner(self, unit: Unit) -> Iterator[None]:
        """Run a module on its owner; send its tensors to all ranks where code reads them."""
        assert unit.rank is not None
        real = [(slot, slot.tensor) for slot in unit.slots]
        stand_ins = [
            (slot, self._layout.values.make_held_weight(value, slot.name, unit.rank))
            for slot, value in real
        ]
        forward = unit.module.forward

        def plain(*args: Any, **kwargs: Any) -> Any:
            with swapped(real):
                return forward(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(unit, plain, args, kwargs)

        with replaced(unit.module, "forward", call), swapped(stand_ins):
            yield

    def _seed_next_call(self) -> None:
        if self._seed is not None:
            self._seed_with(mix_seed(self._seed, len(self.calls)))

    def _seed_with(self, seed: int) -> None:
        seed_all(seed)
        self._generators.seed(seed)

    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block on its owner; return what it returns on all ranks."""
        plain, unit = self._layout.chain.plain_calls[index], self._scope.blocks.get(index)
        output = plain(*args, **kwargs) if unit is None else self._call(unit, plain, args, kwargs)
        self.calls.append(index)
        self._seed_next_call()
        return output

    def _call(
        self, unit: Unit, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if unit.rank is None or self._group.num_ranks == 1:
            return plain(*args, **kwargs)
        layout, values = self._layout, self._layout.values
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, HeldOutput) and leaf.holder != unit.rank:
                values.fetch(leaf)
        roots = {"args": [*args], "kwargs": kwargs, "modules": [*unit.module.modules()]}
        subject = unit.name, _checksum(args, kwargs)
        self._num_held += unit.is_followed
        if self._group.rank == unit.rank:
            call = OwnersCall(values, self._group, layout.names, unit, roots, subject)
            call.shares_state = len(self.calls) < self._num_shared_calls
            return call.run(plain)[0]
        remote = RemoteUnitCall(values, self._group, layout.module, unit, roots, subject)
        output, drawn = remote.receive()
        if drawn is not None and self._seed is None:
            drawn.restore()
        return output


def _checksum(*arguments: Any) -> int:
    """Return a checksum of the shapes of all tensors among arguments."""
    tensors = [leaf for leaf in leaves_of(arguments) if isinstance(leaf, Tensor)]
    shapes = [(*leaf.shape,) if not leaf.is_nested else leaf.dim() for leaf in tensors]
    return zlib.crc32(repr(shapes).encode())


def _size(slots: Sequence[Slot]) -> int:
    return sum(slot.tensor.nbytes for slot in slots)


def _balance_blocks_by_bytes(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each block, so that all have about as many bytes."""
    total, before, ranks = max(1, sum(sizes)), 0.0, []
    for size in sizes:
        ranks.append(min(num_ranks - 1, int((before + size / 2) * num_ranks / total)))
        before += size
    return ranks
