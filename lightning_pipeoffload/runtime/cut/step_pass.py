"""One run of the user's step without values, and what is seen meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home
from torch.utils._pytree import tree_iter  # private: see runtime/leaves
from torch.utils.flop_counter import flop_registry

from lightning_pipeoffload.runtime.compiled.block_compiler import uncompiled
from lightning_pipeoffload.runtime.cut.backwards import finding_hooked_spans
from lightning_pipeoffload.runtime.cut.block_chain import BlockCalls, BlockChain, StageExit
from lightning_pipeoffload.runtime.cut.checks import loss_in
from lightning_pipeoffload.runtime.cut.crossings import mark_slots
from lightning_pipeoffload.runtime.cut.record import ImaginedError, StepRecord, ValueLog
from lightning_pipeoffload.runtime.cut.stripped_module import StrippedModule
from lightning_pipeoffload.runtime.cut.value_trace import ValueTrace
from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.microbatch import shape_signature
from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.step_rules import (
    EVERYTHING,
    NO_ALARM,
    Imagined,
    StepRules,
)
from lightning_pipeoffload.runtime.shapes.value_sizes import is_sized_by_values
from lightning_pipeoffload.runtime.users_code.attributes import REGISTRIES, Place, WriteWatch
from lightning_pipeoffload.runtime.users_code.snapshot import Attribute, unchanged
from lightning_pipeoffload.runtime.users_code.sources import Generators, refusing_iterators
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> int:
    """Count the operations of matrix products, convolutions and attention; 0 for others."""
    packet = func.overloadpacket
    if packet.__name__.startswith("_scaled_dot_product"):  # torch has no formula for all of them
        query, key, value = args[:3]
        rows = query.shape[:-1].numel()
        return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
    if packet is torch.ops.aten._grouped_mm:  # each row of the left with its group's matrix
        return int(2 * args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(packet)
    return int(formula(*args, out_val=result)) if formula else 0


aten = torch.ops.aten


class DrawsAndSizes(TorchDispatchMode):
    """Notes where a step draws from torch's generators, and sizes that depend on values.

    Args:
        find_place: Returns where the step is.
        num_blocks: Behind the blocks sizes are not asked for.
        draws: Takes the places of the draws.

    Attributes:
        found: Shapes beside the blocks, and answers to questions.
        last: Segment in which there is one; None: in none.
    """

    def __init__(self, find_place: Callable[[], Place], num_blocks: int, draws: set[Place]) -> None:
        super().__init__()
        self._find_place = find_place
        self._num_blocks = num_blocks
        self._draws = draws
        self.found: list[Any] = []
        self.last: int | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and note it."""
        result = func(*args, **(kwargs or {}))
        place = self._find_place()
        if _may_draw(func, args, kwargs or {}):
            self._draws.add(place)
        if not place.is_in_block and place.segment < self._num_blocks:
            self._note_sizes(func, args, result, place.segment)
        return result

    def _note_sizes(self, func: Any, args: tuple[Any, ...], result: Any, place: int) -> None:
        if is_sized_by_values(func, args):
            self.found.append(tuple(tensor.shape for tensor in tensors_in(result)))
            self.last = place
        elif func is aten._local_scalar_dense.default and not (
            args[0].is_floating_point() or args[0].is_complex()
        ):
            # A number may be a length, where the shapes tell; most answers change no shape.
            is_answer = isinstance(result, bool)
            self.found.append(result if is_answer else None)
            self.last = self.last if is_answer else place


_NAMESPACES = {"aten", "prim", "prims"}  # whose operations are tagged where they draw


def _may_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers; one of a library's own is taken to."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func.namespace not in _NAMESPACES
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # of attention, which is tagged with or without dropout
            return bool(args[place] if place < len(args) else kwargs.get(argument.name))
    return True


_MOST_IMAGINED = 1000  # in a block, and behind them: a loop may never end


class StepPass:
    """Watches the calls of blocks and the operations in between.

    Args:
        module: The user's module.
        chain: Its blocks.
        device: The device that the module seems to be on.
        log: What keeps the values that the step has; None: nothing does.
        way: How to make up the values that blocks ask for.
        looks: Whether to look at what the step does, not only at the values that it has.

    Attributes:
        until: The block at which the step is left; None: it comes to its end.
    """

    until: int | None = None

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        device: torch.device,
        log: ValueLog | None = None,
        way: Imagined = EVERYTHING,
        looks: bool = True,
    ) -> None:
        self._looks = looks
        self._before_block: list[tuple[int, Any]] = []
        self._module = module
        self.chain = chain
        self.writes = WriteWatch(module)
        self.result = StepRecord(len(chain) + 1, writes=self.writes.writes)
        self.sizes = DrawsAndSizes(self._find_place, len(chain), self.result.draws)
        self._trace = ValueTrace(chain, self.result, log)
        self._calls = BlockCalls(chain, device, self.result.block_calls)
        self._stripped = StrippedModule(module, device, lambda: self.segment, self.result)
        self._training = torch.is_grad_enabled()
        self._is_in_block = False
        self._way = way
        self._num_in_block = 0
        self.num_imagined = 0
        self.saved_attributes: set[Attribute] = set()

    @property
    def segment(self) -> int:
        """The segment that the step is in."""
        return self._trace.segment

    def sizes_before(self, block: int) -> tuple[Any, ...]:
        """Return the sizes that depend on values up to a block, and its arguments' shapes."""
        if block >= len(self._before_block):
            return *self.sizes.found, None
        count, arguments = self._before_block[block]
        return *self.sizes.found[:count], arguments

    def _find_place(self) -> Place:
        return Place(self.segment, self._is_in_block)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Let the step run inside without values, and without a trace."""
        module = self._module
        with ExitStack() as stack:
            stack.enter_context(forked_randomness())
            stack.enter_context(_same_grad_mode())
            stack.enter_context(Generators(module).kept())
            written = stack.enter_context(unchanged(module))
            stack.enter_context(uncompiled())
            stack.enter_context(refusing_iterators(module))
            self._stripped.strip()
            stack.callback(self._stripped.find_written)
            mark_slots(((slot, slot.tensor) for slot in find_slots(module)), self.chain)
            stack.enter_context(self.chain.running(self))
            stack.enter_context(self._stripped.noting_new_weights())
            stack.enter_context(self._stripped.noting_saved())
            spans = self.result.hooked_spans
            stack.enter_context(finding_hooked_spans(module, lambda: self.segment, spans))
            rules = StepRules(self._observe, self._imagine, self._drop)
            stack.enter_context(IN_FORCE.during(rules))
            stack.enter_context(self._trace)
            if self._looks:
                stack.enter_context(self.writes.watching())
            stack.enter_context(self.sizes)
            yield
        # Not the registries themselves, in which shapes were put and taken out again.
        written = {place for place in written if place[1] not in REGISTRIES}
        self.result.written_in_place |= written
        self.result.saved_and_written |= written & self.saved_attributes

    def _drop(self, written: Tensor) -> bool:
        name = self._stripped.buffer_name(written)
        if name is not None:
            self.result.segments[name].add(self.segment)
        return name is not None or self._is_in_block

    def call_block(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        """Run a block on shapes, and look around before and after.

        Raises:
            StageExit: It is the one at which the step is left.
        """
        self._before_block.append((len(self.sizes.found), shape_signature(arguments)))
        if index == self.until:
            raise StageExit([])
        self._calls.see(index, self.segment, arguments)
        args, kwargs = self._trace.enter_block(index, arguments)
        self._look(Place(index, is_in_block=False))
        self._is_in_block, self._num_in_block = True, 0
        output = self._run_block(index, args, kwargs)
        self._is_in_block = False
        self._look(Place(index, is_in_block=True))
        return self._trace.leave_block(index, arguments, output)

    def _run_block(self, index: int, args: Any, kwargs: Any) -> Any:
        return self.chain.plain_call(index)(*args, **kwargs)

    def _look(self, place: Place) -> None:
        if self._looks:
            # Private: what is copied here is no call of the step's, which its log would have.
            with torch._C.DisableTorchFunction():
                self.writes.look(place)

    def _observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if not self._looks:
            return
        tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            name = self._stripped.weight_name(tensor)
            if name is not None:
                self.result.segments[name].add(self.segment)
        self._trace.observe(func, args, result)
        self._stripped.note_weight_writes(func, args)
        weights = [getattr(tensor, "is_weight", False) for tensor in tensors]
        for leaf in tree_iter(result):
            if isinstance(leaf, ShapeOnly):
                leaf.is_weight = all(weights)  # type: ignore[attr-defined]
        flops = count_flops(func, args, result)
        self.result.forward_flops[self.segment] += flops
        trains = any(tensor.requires_grad for tensor, w in zip(tensors, weights, strict=True) if w)
        if trains and not all(weights):
            self.result.weight_flops[self.segment] += flops
        self.result.training_flops += flops * (1 + _num_gradients(trains, weights))

    def _imagine(self) -> Imagined | None:
        """Go on inside a block and behind them, where all values will be; not for ever."""
        if self._is_in_block and self._num_in_block < _MOST_IMAGINED:
            self._num_in_block += 1
            self.result.imagined.setdefault(self.segment, calling_line())
            return self._way
        if self.segment < len(self.chain) or self.num_imagined >= _MOST_IMAGINED:
            return None
        self.num_imagined += 1
        return NO_ALARM

    @contextmanager
    def telling_of_imagination(self) -> Iterator[None]:
        """Say of what goes wrong that it may be due to what is made up.

        Raises:
            ImaginedError: Something went wrong after a value was made up.
        """
        try:
            yield
        except Exception as error:
            if not self.result.imagined:
                raise
            raise ImaginedError(error, self.result, self._is_in_block) from error

    def lead_back(self, result: Any) -> None:
        """Find what gets a gradient from what the step returned."""
        if not self._training:
            return
        loss = loss_in(result)
        if self.segment == len(self.chain):
            reach = self._trace.lead_back(loss)
            named = [(self._stripped.weight_name(leaf), leaf) for leaf in reach.leaves]
            self.result.weight_uses = {name: reach.uses[id(leaf)] for name, leaf in named if name}
            # An expert that no row is sent to gets none.
            self.result.trained = {
                name
                for name in self.result.weight_uses
                if self.chain.index_of(name) not in self.result.imagined
            }

    def check_complete(self) -> None:
        """Check that the step has called all blocks."""
        self._calls.check_complete(self.segment)

    def finish(self) -> None:
        """Look once more when the step is over, before all is set back."""
        self.result.briefly_hooked.update(self._calls.find_briefly_hooked())
        self.saved_attributes = set(self._stripped.find_saved_attributes())
        self._look(Place(self.segment, is_in_block=False))
        if self._looks:
            self.writes.finish()
        if self.sizes.last is not None:
            self.result.sized_in = self.sizes.last
            self.result.sizes = self.sizes_before(self.sizes.last)


@contextmanager
def _same_grad_mode() -> Iterator[None]:
    is_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_enabled):
        yield


def _num_gradients(trains: bool, weights: list[bool]) -> int:
    if not torch.is_grad_enabled():
        return 0
    return 2 if trains or not any(weights) else 1
