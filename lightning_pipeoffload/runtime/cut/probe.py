"""The probe: one run of the user's step without values, to learn how it can be cut.

It takes no memory and no arithmetic, and tells, for batches of these shapes, what each block hands
on, which part of the step uses which parameter, and the floating-point operations of each part.

The step is cut at its blocks into **segments**: segment k is what runs after block k-1 up to and
including block k; the last segment is what follows the last block. Segment 0 so holds the
embedding, the last one the head and the loss.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter  # private: see runtime/leaves
from torch.utils.flop_counter import flop_registry

from lightning_pipeoffload.runtime.cut.batch_sizes import BatchSizes
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.call_counter import mark_slots
from lightning_pipeoffload.runtime.cut.crossings import Flow
from lightning_pipeoffload.runtime.cut.step_result import loss_in
from lightning_pipeoffload.runtime.cut.value_log import LoggedValue, ValueLog
from lightning_pipeoffload.runtime.cut.value_trace import Alias, ValueTrace
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.microbatch import shape_signature
from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.shapes.imagined_values import EVERYTHING, NO_ALARM, Imagined
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    memory_of,
    shape_only_leaves,
    uncompiled,
    written_arguments,
)
from lightning_pipeoffload.runtime.shapes.step_rules import (
    dropping_writes,
    imagining_values,
    observing,
)
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError
from lightning_pipeoffload.runtime.users_code.attribute_uses import AttributeUses, Uses
from lightning_pipeoffload.runtime.users_code.module_snapshot import (
    Attribute,
    is_written,
    unchanged,
)
from lightning_pipeoffload.runtime.users_code.random_sources import Place, Source
from lightning_pipeoffload.runtime.users_code.source_watch import Draw, SourceWatch
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot, find_slots
from lightning_pipeoffload.runtime.users_code.users_lines import (
    calling_line,
    deepest_users_line,
    in_brackets,
    users_line,
)
from lightning_pipeoffload.runtime.users_code.written_state import (
    REGISTRIES,
    Variable,
    noting_writes,
)

_MOST_IMAGINED = 1000  # in a block, and behind them: a loop may never end


class WeightWrite(NamedTuple):
    """A write into a parameter.

    Attributes:
        name: of the parameter.
        segment: of the step that writes.
        line: of the user's code.
    """

    name: str
    segment: int
    line: str


@dataclass
class Probe:
    """What one run of the step without values has shown.

    Attributes:
        flow: what goes from block to block.
        segments: name of a parameter, or of a buffer that the step writes, to the segments using
            it.
        forward_flops: of each segment, for one microbatch.
        weight_flops: the part of it that has a weight gradient of as many operations.
        written: names of buffers that the step writes from values that every stage has.
        written_in_place: what else of the modules' attributes is, and these buffers.
        saved_and_written: the part of it that a backward reads.
        weight_writes: into parameters.
        aliases: between whose segments the step cannot be cut.
        assigned: what else of the module's, its classes' and their Python modules' it writes.
        briefly_hooked: blocks with a hook that the step takes away again.
        draws: where the step draws from what the user has made, and changes what classes and
            Python modules have.
        made: what it has made to draw from, with its place.
        lines: of the user's code that draw from sources drawn from in several places.
        changes_batch: the step changes its microbatch in place.
        unrepeatable: the first value that a second run did not have; None if it had all.
        uses: of what some step writes to keep, by the id of what holds it and its name.
        trained: names of the parameters that the loss leads back to; None: it is not known.
        imagined: blocks that ask for values, which are made up, and the line that does so first.
        sized_in: the last segment in which sizes beside the blocks depend on the batch's values;
            None: there is none.
    """

    flow: Flow
    segments: dict[str, set[int]]
    forward_flops: list[int]
    weight_flops: list[int]
    written: set[str] = field(default_factory=set)
    written_in_place: set[Attribute] = field(default_factory=set)
    saved_and_written: set[Attribute] = field(default_factory=set)
    weight_writes: list[WeightWrite] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    assigned: list[Variable] = field(default_factory=list)
    briefly_hooked: set[int] = field(default_factory=set)
    draws: dict[Source, set[Draw]] = field(default_factory=dict)
    made: list[tuple[Place, Any]] = field(default_factory=list)
    lines: dict[Source, list[str]] = field(default_factory=dict)
    changes_batch: bool = False
    unrepeatable: LoggedValue | None = None
    uses: dict[tuple[int, str], Uses] = field(default_factory=dict)
    trained: set[str] | None = None
    imagined: dict[int, str] = field(default_factory=dict)
    sized_in: int | None = None


class ImaginedError(Exception):
    """A step whose blocks asked for values went wrong, maybe because these are made up.

    Attributes:
        cause: what went wrong.
        found: what was seen until then.
        is_in_block: a block went wrong.
    """

    def __init__(self, cause: Exception, found: Probe, is_in_block: bool) -> None:
        self.cause = cause
        self.found = found
        self.is_in_block = is_in_block


def probe_step(  # noqa: PLR0913 - what watches a run, each of which most leave out
    module: nn.Module,
    chain: BlockChain,
    run: Callable[[], Any],
    device: torch.device,
    log: ValueLog | None = None,
    way: Imagined = EVERYTHING,
    uses: AttributeUses | None = None,
) -> Probe:
    """Run the user's step once without values.

    Args:
        module: the user's module; it is left as it was.
        chain: its blocks.
        run: calls the step on one microbatch.
        device: of that microbatch, on which the module seems to be, wherever it is.
        log: keeps the values that the step has nevertheless.
        way: to make values up that blocks ask for.
        uses: watches what the step writes to keep.

    Raises:
        ValueError: the step cannot be cut at its blocks; says what it does and where.
        ImaginedError: something went wrong with values that are made up.
    """
    probing = _ProbePass(module, chain, device, log, way)
    probing.uses = uses
    result = probing.result
    with probing.telling_of_imagination():
        with _looking(module, probing):
            try:
                probing.lead_back(run())
            except ValueNeededError as error:
                if probing.segment < len(chain):
                    raise ValueError(_explain(error, chain, probing.segment)) from None
            except Exception:
                if not probing.num_imagined:
                    raise
            probing.finish()
        probing.check_complete()
    result.flow.is_certain = not probing.num_imagined
    result.draws = probing.watch.draws
    return result


def repeat_step(
    module: nn.Module,
    chain: BlockChain,
    run: Callable[[], Any],
    device: torch.device,
    way: Imagined,
) -> ValueLog:
    """Run a step once more as :func:`probe_step` does, for the values that it has.

    Args:
        module: the user's module; it is left as it was.
        chain: its blocks.
        run: calls the step on one microbatch.
        device: of that microbatch.
        way: to make values up that blocks ask for.
    """
    log = ValueLog()
    probing = _RepeatedPass(module, chain, device, log, way)
    with _looking(module, probing):
        try:
            run()
        except ValueNeededError:
            pass  # as in the probe
        except Exception:
            if not (probing.result.imagined or probing.num_imagined):
                raise
    return log


def find_sizes(
    module: nn.Module, chain: BlockChain, run: Callable[[], Any], device: torch.device, block: int
) -> tuple[Any, ...]:
    """Return what the shapes of a step depend on, of its microbatch's values.

    Args:
        module: the user's module; it is left as it was.
        chain: its blocks.
        run: calls the step on one microbatch.
        device: of that microbatch.
        block: before which the last such size is.
    """
    probing = _BeginningPass(module, chain, device, block)
    # What goes wrong goes wrong in the probe of these sizes too, which explains it.
    with _looking(module, probing), suppress(_BlockReached, ValueNeededError, Exception):
        run()
    return *probing.sizes.found, probing.arguments


@contextmanager
def _looking(module: nn.Module, probing: _ProbePass) -> Iterator[None]:
    """Let a step run without values, and without a trace."""
    with ExitStack() as stack:
        stack.enter_context(forked_randomness())
        stack.enter_context(_same_grad_mode())
        stack.callback(probing.watch.finish)
        written = stack.enter_context(unchanged(module))
        stack.enter_context(uncompiled())
        stack.enter_context(probing.on(module))
        if probing.looks:
            probing.result.assigned = stack.enter_context(noting_writes(module))
        stack.enter_context(probing.uses.watching() if probing.uses else nullcontext())
        stack.enter_context(probing.sizes)
        yield
    probing.result.written_in_place |= written
    probing.result.saved_and_written |= written & probing.saved_attributes


@contextmanager
def _same_grad_mode() -> Iterator[None]:
    """Leave inference mode, in which nothing counts writes, but stay without gradients."""
    is_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_enabled):
        yield


class _ProbePass:
    """Watches the calls of blocks and the operations in between.

    Attributes:
        looks: at what the step does, not only at the values that it has.
    """

    looks = True

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        device: torch.device,
        log: ValueLog | None,
        way: Imagined,
    ) -> None:
        count = len(chain) + 1
        self.chain = chain
        self._module = module
        self._device = device
        self.watch = SourceWatch(module)
        self.uses: AttributeUses | None = None
        self.sizes = BatchSizes(self._find_place)
        self._trace = ValueTrace(chain, log)
        flow, aliases = self._trace.flow, self._trace.aliases
        self.result = Probe(flow, defaultdict(set), [0] * count, [0] * count, aliases=aliases)
        self._names: dict[int, str] = {}
        self._memories: dict[int, str] = {}
        self._saved: set[int] = set()
        self._training = torch.is_grad_enabled()
        self._is_in_block = False
        self._checkpoint: Any = None
        self._num_hooks: list[int] = []
        self._way = way
        self._num_in_block = 0
        self.num_imagined = 0
        self.saved_attributes: set[Attribute] = set()

    @property
    def segment(self) -> int:
        """The one that the step is in."""
        return self._trace.segment

    def _find_place(self) -> int | None:
        return None if self._is_in_block or self.segment == len(self.chain) else self.segment

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        buffers = list(self._strip(module))
        names = {memory_of(tensor): slot.name for slot, tensor, _ in buffers}
        mark_slots(((slot, slot.tensor) for slot in find_slots(module)), self.chain)

        def drop(written: Tensor) -> bool:
            name = names.get(memory_of(written))
            if name is not None:
                self.result.segments[name].add(self.segment)
            return name is not None or self._is_in_block

        observed = observing(self._observe), dropping_writes(drop), imagining_values(self._imagine)
        saving = saved_tensors_hooks(self._note_saved, _itself)
        try:
            with ExitStack() as stack:
                news = self._seeing_new_parameters(module)
                for context in (self.chain.running(self), news, saving, *observed, self._trace):
                    stack.enter_context(context)
                yield
        finally:
            written = [
                slot
                for slot, tensor, value in buffers
                if slot.tensor is not tensor or is_written(tensor, value)
            ]
            for slot in written:
                if isinstance(slot.tensor, ShapeOnly) and hasattr(slot.tensor, "birth"):
                    self.result.segments[slot.name].add(slot.tensor.birth.segment)
            common = [slot for slot in written if not self.result.segments.get(slot.name)]
            self.result.written = {slot.name for slot in common}
            self.result.written_in_place = {(slot.module, slot.attribute) for slot in common}
            self.result.saved_and_written = {
                (slot.module, slot.attribute)
                for slot, tensor, value in buffers
                if memory_of(tensor) in self._saved
                and (self.result.segments.get(slot.name) or is_written(tensor, value))
            }

    def _strip(self, module: nn.Module) -> Iterator[tuple[Slot, Tensor, Tensor]]:
        """Put shape-only tensors in the place of parameters, copies in that of buffers.

        Yields:
            The place, the copy and the value of each buffer.
        """
        for slot in find_slots(module):
            place = slot.module.__dict__[slot.kind]
            if slot.kind == "_buffers" and not isinstance(slot.tensor, ShapeOnly):
                device = torch.device("meta") if slot.tensor.is_meta else self._device
                value = slot.tensor
                place[slot.attribute] = value.detach().to(device, copy=True)
                yield slot, place[slot.attribute], value
                continue
            trains = slot.tensor.requires_grad
            stripped = ShapeOnly.like(slot.tensor, slot.name, trains, self._device)
            place[slot.attribute] = stripped
            if slot.kind == "_parameters":
                stripped.is_weight = True  # type: ignore[attr-defined]
                self._names[id(stripped)] = slot.name
                self._memories[memory_of(stripped)] = slot.name

    def call_block(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        self._check_call(index)
        args, kwargs = self._trace.enter_block(index, arguments)
        self._num_hooks.append(_count_hooks(self.chain.blocks[index]))
        self._look(Draw(index, is_in_block=False))
        self._is_in_block, self._num_in_block = True, 0
        output = self.chain.run_block(index, *args, **kwargs)
        self._is_in_block = False
        self._look(Draw(index, is_in_block=True))
        return self._trace.leave_block(index, arguments, output)

    def _look(self, place: Draw) -> None:
        # Private: what is copied here is no call of the step's, which its log would have.
        with torch._C.DisableTorchFunction():
            self.watch.look(place)
            if self.uses is not None:
                self.uses.look(place)

    def _check_call(self, index: int) -> None:
        """Refuse a call of a block that a stage could not make, or not alike in its backward."""
        name = self.chain.block_name(index)
        if index != self.segment:
            expected = self.segment
            what = f"before {self.chain.block_name(expected)}" if index > expected else "again"
            raise ValueError(
                f"the step calls {name} {what}{_calling_line()}; a pipeline needs each entry of "
                f"{self.chain.name} called once and in order"
            )
        if self._training and not torch.is_grad_enabled():
            raise ValueError(
                f"the step calls {name} without gradients{_calling_line()}: leave out "
                f"torch.no_grad(), and write checkpoint(..., use_reentrant=False)"
            )
        outer, self._checkpoint = self._checkpoint, _checkpoint_around()
        if outer is not None and outer is self._checkpoint:
            raise ValueError(
                f"the step checkpoints {self.chain.block_name(index - 1)} and {name} together"
                f"{_calling_line()}; a stage can only compute its own blocks again, so checkpoint "
                f'each by itself, or leave it to recompute="full"'
            )

    def _observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if id(tensor) in self._names:
                self.result.segments[self._names[id(tensor)]].add(self.segment)
        self._trace.observe(func, args, result)
        for written in shape_only_leaves(list(written_arguments(func, args))):
            if memory_of(written) in self._memories:
                self._note_write(self._memories[memory_of(written)])
        weights = [getattr(tensor, "is_weight", False) for tensor in tensors]
        for leaf in tree_iter(result):
            if isinstance(leaf, ShapeOnly):
                leaf.is_weight = all(weights)  # type: ignore[attr-defined]
        flops = count_flops(func, args, result)
        self.result.forward_flops[self.segment] += flops
        trains = any(tensor.requires_grad for tensor, w in zip(tensors, weights, strict=True) if w)
        if trains and not all(weights):
            self.result.weight_flops[self.segment] += flops

    def _note_write(self, name: str) -> None:
        line = deepest_users_line(traceback.extract_stack())
        self.result.weight_writes.append(WeightWrite(name, self.segment, line))

    @contextmanager
    def _seeing_new_parameters(self, module: nn.Module) -> Iterator[None]:
        """Note where the step puts another parameter into the place of one."""
        names = {(id(slot.module), slot.attribute): slot.name for slot in find_slots(module)}
        plain = nn.Module.register_parameter

        def register(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if (id(owner), name) in names:
                self._note_write(names[id(owner), name])
                self._names[id(parameter)] = names[id(owner), name]
            plain(owner, name, parameter)

        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = plain  # type: ignore[method-assign]

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
        """Say of what goes wrong that it may be due to what is made up."""
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
            leaves = self._trace.lead_back(loss)
            self.result.trained = {self._names[id(x)] for x in leaves if id(x) in self._names}

    def check_complete(self) -> None:
        if self.segment < len(self.chain):
            raise ValueError(
                f"the step does not call {self.chain.block_name(self.segment)}; a pipeline needs "
                f"each entry of {self.chain.name} called once and in order"
            )

    def finish(self) -> None:
        """Look once more when the step is over, before all is set back."""
        self._compare_hooks()
        self.saved_attributes = set(self._find_saved_attributes())
        self._look(Draw(self.segment, is_in_block=False))
        self.result.made = self.watch.made()
        self.result.sized_in = self.sizes.last

    def _note_saved(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, ShapeOnly):
            self._saved.add(memory_of(tensor))
        return tensor

    def _find_saved_attributes(self) -> Iterator[Attribute]:
        for part in self._module.modules():
            for name, value in vars(part).items():
                if name not in REGISTRIES and any(
                    memory_of(tensor) in self._saved for tensor in tensors_in(value)
                ):
                    yield part, name

    def _compare_hooks(self) -> None:
        """Find the blocks that had more hooks when they were called than they have now."""
        for index, (block, before) in enumerate(
            zip(self.chain.blocks, self._num_hooks, strict=False)
        ):
            if _count_hooks(block) < before:
                self.result.briefly_hooked.add(index)


def _itself(saved: Any) -> Any:
    return saved


class _BlockReached(BaseException):
    """Leaves the user's step."""


class _RepeatedPass(_ProbePass):
    """Runs the step for its log alone."""

    looks = False

    def _look(self, place: Draw) -> None:
        pass

    def _observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        pass


class _BeginningPass(_ProbePass):
    """Runs the step up to a block.

    Attributes:
        arguments: of that block, as far as shapes go.
    """

    def __init__(
        self, module: nn.Module, chain: BlockChain, device: torch.device, block: int
    ) -> None:
        super().__init__(module, chain, device, None, EVERYTHING)
        self._last = block
        self.arguments: Any = None

    def call_block(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        if index < self._last:
            return super().call_block(index, call, arguments)
        self.arguments = shape_signature(arguments)
        raise _BlockReached


def _count_hooks(block: nn.Module) -> int:
    # Private: which hooks a module has can be seen nowhere else.
    return len(block._forward_hooks) + len(block._forward_pre_hooks)


def _checkpoint_around() -> Any:
    """Return what is the same while one checkpoint's function runs; None outside of any."""
    # Private: nothing public tells of a checkpoint, in which blocks are called again in B.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook."):
        return None
    return hooks[0]


def _calling_line() -> str:
    return in_brackets(deepest_users_line(traceback.extract_stack()))


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


def _explain(error: ValueNeededError, chain: BlockChain, segment: int) -> str:
    return (
        f"the step cannot be cut into stages, for only one of them has what it needs before "
        f"{chain.block_name(segment)}: {error}{in_brackets(users_line(error))}; move it behind "
        f"{chain.block_name(len(chain) - 1)}, where the last stage has all values, or compute it "
        f"from the batch"
    )
