"""The trace: one run of the user's step without values for each kind of step and shape.

The trace allocates no memory and does no arithmetic. It fills a :class:`.record.StepRecord`.

The step is divided at its blocks into **segments**: segment k is the code after block k-1 up to
and including block k; the last segment is the code after the last block. So segment 0 includes the
embedding, and the last one is the head and the loss. Where blocks are called several times a
segment is all code with one position, see :mod:`.call_order`. With three blocks on two stages::

    step      embedding, block 0 | mask, block 1 | mask, block 2 | head, loss
    segment           0          |       1       |       2       |     3
    stage     [ 0: the step is left here         ] [ 1: runs to the end       ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home
from torch.utils.flop_counter import flop_registry

from lightning_pipeoffload.runtime.batch.parts import sample_counts, shape_signature
from lightning_pipeoffload.runtime.compiled.block_compiler import is_compiled, uncompiled
from lightning_pipeoffload.runtime.contexts import without_collection
from lightning_pipeoffload.runtime.cut.batch_flags import BatchFlags
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain, Running, StageExit
from lightning_pipeoffload.runtime.cut.block_classes import SegmentWork
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.cut.carried_values import mark_slots
from lightning_pipeoffload.runtime.cut.checks import (
    CallChecks,
    CallsError,
    OrderError,
    describe_argument_write,
    is_in_function,
    loss_in,
    refuse_packed,
)
from lightning_pipeoffload.runtime.cut.draws import DrawWatch
from lightning_pipeoffload.runtime.cut.observers import Operation
from lightning_pipeoffload.runtime.cut.record import (
    BlockCall,
    HookedSpan,
    LoggedValue,
    SegmentDigest,
    StepRecord,
)
from lightning_pipeoffload.runtime.cut.sample_uses import SampleWatch
from lightning_pipeoffload.runtime.cut.stripped_module import StrippedModule
from lightning_pipeoffload.runtime.cut.value_trace import ValueTrace
from lightning_pipeoffload.runtime.cut.writes import WriteWatch
from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.leaves import leaves_of, tensors_in
from lightning_pipeoffload.runtime.payload import BlockOutput
from lightning_pipeoffload.runtime.shapes.kernels_on_zeros import (
    KernelFoundError,
    KernelsOnZeros,
)
from lightning_pipeoffload.runtime.shapes.operations import lengths_place, written_arguments
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    memory_of,
    shape_only_leaves,
)
from lightning_pipeoffload.runtime.shapes.shard_origins import noting_shards
from lightning_pipeoffload.runtime.shapes.sharding import (
    refuse_loss_of_shard,
    refuse_weight_on_shard,
)
from lightning_pipeoffload.runtime.shapes.step_rules import (
    EVERYTHING,
    NO_ALARM,
    AddressNeededError,
    Imagined,
    StepRules,
    ValueNeededError,
    is_sized_by_values,
)
from lightning_pipeoffload.runtime.users_code.attributes import StepPoint
from lightning_pipeoffload.runtime.users_code.snapshot import Attribute, unchanged
from lightning_pipeoffload.runtime.users_code.sources import refusing_iterators
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots
from lightning_pipeoffload.runtime.users_code.users_lines import (
    calling_line,
    in_brackets,
    users_line,
)
from lightning_pipeoffload.runtime.weight_grad.chunked_loss import AroundChunks

aten = torch.ops.aten
_WHOLE = {aten.linear, aten.conv1d, aten.conv2d, aten.conv3d}
# Which of these an operation such as reshape makes depends on strides.
_BY_LAYOUT = {f"aten.{name}.default" for name in ("view", "_unsafe_view", "clone")}

_FUNCTIONAL = "don't yet support saved tensor hooks"  # torch's error in torch.func
_MOST_IMAGINED_IN_NOTES = 8  # of an evaluation
_MOST_IMAGINED_IN_TRAINING_NOTES = 16
_MOST_IMAGINED = 1000  # values in a block, and behind the blocks: a loop may never end


class StepTrace:
    """One run of a step without values.

    Args:
        module: The user's module; it is restored afterwards.
        chain: Its blocks.
        device: The device that tensors report, wherever the module is.
        kernels: The Functions and modules that run on zeros; None: none so far.
        log: A list to which calls with values between the blocks are appended; None: no log.
        imagined: How to make up the values that blocks read, and those read after the blocks.
        observes: Whether to record all of the step; else only its values and sizes.
        until: The call at which to leave the step; None: run to the end.
        compared: Attributes that are compared at each block, though they are long.
        calls: The order of the calls of blocks; None: each is called once.

    Attributes:
        outputs: The outputs of blocks that are skipped, by index.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        device: torch.device,
        kernels: KernelsOnZeros | None = None,
        log: list[LoggedValue] | None = None,
        imagined: tuple[Imagined, Imagined] = (EVERYTHING, NO_ALARM),
        observes: bool = True,
        until: int | None = None,
        compared: Set[Attribute] = frozenset(),
        calls: CallOrder | None = None,
    ) -> None:
        self.module = module
        self.outputs: Mapping[int, BlockOutput] = {}
        self.chain = chain
        self._imagined, self._behind = imagined
        self.observes = observes
        self._until = until
        self.calls = calls or CallOrder.of_once(len(chain))
        self.record = StepRecord(len(chain) + 1, device.type, self.calls)
        self._values = ValueTrace(chain, self.record, log)
        self.work = SegmentWork(len(chain) + 1)
        self._between = SegmentWork(1)
        self._stripped = StrippedModule(device)
        uses = self.record.segments
        self.writes = WriteWatch(self.record.writes, uses, self, self._stripped, compared)
        self._samples = SampleWatch(self.record.samples)
        self.draws = DrawWatch(self.record.draws, module, lambda: self._stripped.has_shards)
        self._sizes = _SizesByValues(self)
        self._checks = CallChecks(chain, self.calls)
        self._kernels = KernelsOnZeros() if kernels is None else kernels
        self._device, self._device_type = device, device.type
        self._is_compiled = any(is_compiled(block) for block in chain.blocks)
        self._before_block: list[tuple[int, Any]] = []
        self._training = torch.is_grad_enabled()
        self._is_in_call = self._is_in_block = self._is_in_chunks = False
        self._num_in_block = 0
        self._dropped: list[str] = []  # buffers that the operation that runs writes
        self._argument_memory: set[int] = set()  # addresses of the block's arguments
        self.num_imagined = 0  # values behind the blocks

    @property
    def segment(self) -> int:
        """The running segment; between blocks that are called again, the first possible one."""
        return self._values.place

    @property
    def num_calls(self) -> int:
        """The number of calls of blocks so far."""
        return self._values.segment

    def segment_of(self, tensors: Iterable[Any]) -> int:
        """Return the segment of an operation on tensors, at the present point of the step."""
        return self._values.position_of(tensors)

    @property
    def point(self) -> StepPoint:
        """The point of the step that is running."""
        return StepPoint(self.segment, self._is_in_block)

    def sizes_before(self, call: int) -> tuple[Any, ...]:
        """Return the value-dependent sizes before a call and the shapes of its arguments."""
        sizes = self._sizes.sizes
        if call >= len(self._before_block):
            return *sizes, None
        count, arguments = self._before_block[call]
        return *sizes[:count], arguments

    def trace(self, run: Callable[[], Any]) -> StepRecord:
        """Record the step that ``run`` calls on one microbatch.

        Raises:
            ValueError: The step cannot be cut at its blocks, with the reason and the line.
            ImaginedError: The step failed after a value was made up.
            KernelFoundError: A kernel asked for an address; the step has to be traced again.
            LongWriteError: The step wrote long containers in place; it has to be traced again, with
                these attributes in ``compared``.
        """
        try:
            with self.running():
                try:
                    result = run()
                    self.record.result_counts = sample_counts(result)
                    self._reach_back(result)
                except (ValueNeededError, Exception) as error:
                    if self._kernels.add_from(error, self.chain.blocks):
                        raise KernelFoundError from error
                    self._end_early(self._kernels.explain(error))
                self._finish()
            self._checks.check_complete(self.num_calls)
        except (KernelFoundError, OrderError):
            raise
        except Exception as error:
            if self.record.writes.arguments:  # without which the step may fail
                first = self.record.writes.arguments[0]
                raise ValueError(describe_argument_write(first, self.chain)) from error
            if isinstance(error, ImaginedError) or not self.record.imagined:
                raise
            raise ImaginedError(error, self.record, self._is_in_block) from error
        if self.writes.long_writes:
            raise LongWriteError(self.writes.long_writes)
        return self.record

    def _end_early(self, error: BaseException) -> None:
        """Accept a step that has failed behind the blocks where it lacks values; else raise."""
        if not isinstance(error, ValueNeededError):
            if _FUNCTIONAL in str(error):
                raise ValueError(
                    f"the step calls torch.func.grad, vjp, jacrev or hessian"
                    f"{in_brackets(users_line(error))}, which work without saved_tensors_hooks "
                    f"only, and a pipeline needs these; call torch.autograd.grad("
                    f"..., create_graph=True) instead"
                ) from None
            if not self.num_imagined or isinstance(error, OrderError):
                raise error
        elif isinstance(error, AddressNeededError):
            raise ValueError(f"{error}{in_brackets(users_line(error))}") from None
        elif self.segment < len(self.chain):  # other blocks may enclose the line
            raise CallsError(_explain(error, self.chain, self.segment)) from None
        self.record.is_certain = False
        unused = self._values.unused_blocks()
        if unused:
            block, (first, *_) = self.chain.block_name(min(unused)), (str(error) + "\n").split("\n")
            refusal = ValueError(
                f"the step fails behind the blocks when it runs without values "
                f"({type(error).__name__}: {first}){in_brackets(users_line(error))}, and an "
                f"attribute or a hook holds what {block} has computed: whether it is used behind "
                f"that line cannot be found out; use it before that line"
            )
            raise ImaginedError(refusal, self.record, is_in_block=False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Prepare a context for the step; restore the module, its buffers and all generators."""
        module = self.module
        with ExitStack() as stack:
            stack.enter_context(without_collection())
            stack.enter_context(_same_grad_mode())
            stack.enter_context(_without_cached_casts())
            stack.enter_context(self._kernels.in_use(self._note_kernel))
            changed = stack.enter_context(unchanged(module))
            stack.enter_context(uncompiled())
            stack.enter_context(noting_shards())
            stack.enter_context(refusing_iterators(module))
            slots = find_slots(module)
            self._stripped.strip(slots)
            mark_slots(slots, self.chain)
            stack.enter_context(Running(self.chain, self))
            stack.enter_context(self.writes.noting_saved())
            if self.observes:
                stack.enter_context(self.writes.watching())
            stack.enter_context(self._finding_hooked_spans())
            stack.enter_context(
                IN_FORCE.during(StepRules(self._observe, self._imagine, self._drop))
            )
            chunks = AroundChunks(self.around_chunks, self._samples.note_weights_of_chunks)
            stack.enter_context(IN_FORCE.during(chunks))
            stack.enter_context(self._values)
            stack.enter_context(self._sizes)
            yield
        self.writes.note_restored(changed)

    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block on shape-only arguments, and return its shape-only output.

        Raises:
            StageExit: ``until`` is this call, so the step ends here.
        """
        if self.num_imagined and not self._training:
            # Text is generated until a value says stop: the step runs whole, however it goes on.
            raise RuntimeError("a value behind the blocks decides whether they are called again")
        arguments: Any = args, kwargs
        call = self.num_calls
        may_be_last = call in (self._until, self._sizes.last, self._sizes.last_flag)
        shapes = shape_signature(arguments) if may_be_last else None
        self._before_block.append((len(self._sizes.sizes), shapes))
        if call == self._until:
            raise StageExit([])
        self._checks.check(index, call)
        self._is_in_call = True
        if self.observes:
            self.work.add_values(index, "a block", arguments)
            with self._values.paused():
                self.record.argument_shapes.append([*map(_shape_of, leaves_of(arguments))])
        if self._is_compiled:
            self.record.block_calls.append(BlockCall.of(arguments, self._device_type))
        args, kwargs = self._values.enter_block(index, arguments)
        if self.observes:
            self.writes.enter_block(index, args, kwargs)
        self._is_in_block, self._num_in_block = True, 0
        self._argument_memory = {memory_of(leaf) for leaf in shape_only_leaves(arguments)}
        output = self._run_block(index, args, kwargs)
        refuse_packed(output, self.chain.block_name(index))
        self._is_in_block = False
        if self.observes:
            self.writes.leave_block(index, args, kwargs)
        output = self._values.leave_block(index, arguments, output)
        self._is_in_call = False
        return output

    def _run_block(self, index: int, args: Any, kwargs: Any) -> Any:
        run = partial(self.chain.plain_calls[index], *args, **kwargs)
        output = self.outputs.get(index)
        if output is None:
            return run()
        form = self._device, self.chain.output_origins(index)
        metas = zip(output.metas, output.payload, strict=True)
        return output.fill([ShapeOnly(meta, *form, spec.requires_grad) for meta, spec in metas])

    def _note_kernel(self, name: str, arguments: Any) -> None:
        self.record.kernels.add(self.point)
        self.work.add_values(self.segment, name, arguments)

    def _observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if not self.observes:
            return
        tensors = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor)]
        segment = self.segment_of(tensors)
        weights_alone = self._note_uses(tensors, segment)
        operands = self._values.observe(func, args, result, segment, weights_alone)
        self.writes.note(Operation(func, args, result, segment, operands))
        # A search for blocks has none.
        is_behind = not self._is_in_block and segment == len(self.chain) > 0
        self._samples.note(func, args, result, is_behind)
        if self._is_in_block:
            self._note_input_writes(func, args)
        weights = [getattr(tensor, "is_weight", False) for tensor in tensors]
        if self._stripped.has_shards and any(weights):
            refuse_weight_on_shard(tensors, weights)
        for leaf in leaves_of(result):
            if isinstance(leaf, ShapeOnly):
                leaf.is_weight = all(weights)  # type: ignore[attr-defined]
        flops = count_flops(func, args, result)
        trains = any(tensor.requires_grad for tensor, w in zip(tensors, weights, strict=True) if w)
        self._count(segment, flops, trains, weights, not (flops and self._is_frozen(tensors)))

    def note_between(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Add an operation outside of the blocks to the digest of these."""
        if not self._is_in_call and str(func) not in _BY_LAYOUT:
            self._between.add(0, func, args, kwargs or {})

    @property
    def between(self) -> SegmentDigest:
        """A digest of the operations outside of the blocks so far."""
        return self._between.digests[0]

    def _note_uses(self, tensors: Sequence[Tensor], segment: int) -> frozenset[str]:
        """Record the segment that uses weights, and writes of buffers.

        Returns:
            The weights, if repeated calls are around and nothing else is used: then the segment is
            that of who uses the result.
        """
        for name in self._dropped:
            self.record.segments[name].add(segment)
        self._dropped.clear()
        direct = [self._stripped.weight_name(tensor) for tensor in tensors]
        if self._values.is_between_repeated and tensors:
            used = [
                self._values.weights_of(tensor) if name is None else frozenset((name,))
                for tensor, name in zip(tensors, direct, strict=True)
            ]
            if all(used):
                return frozenset().union(*used)
        for name in filter(None, direct):
            self.record.segments[name].add(segment)
        return frozenset()

    def _is_frozen(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a product of training has no gradient."""
        if not self._training:
            return False
        if not any(tensor.requires_grad for tensor in tensors):
            return True
        # The forward of an autograd function runs without gradients, and has a backward.
        return not (torch.is_grad_enabled() or is_in_function())

    def _note_input_writes(self, func: Any, args: tuple[Any, ...]) -> None:
        for written in shape_only_leaves(list(written_arguments(func, args))):
            if memory_of(written) in self._argument_memory:
                obstacle = f"writes its input in place{in_brackets(calling_line())}"
                self.record.recompute_obstacles.setdefault(self.segment, obstacle)

    def _count(
        self, segment: int, flops: int, trains: bool, weights: list[bool], has_backward: bool
    ) -> None:
        """Add the work of a product and of its gradients: one per operand that trains."""
        record = self.record
        record.forward_flops[segment] += flops
        if not has_backward:
            record.training_flops += flops
            return
        for_weight = flops if trains and not all(weights) else 0
        num_gradients = 2 if trains or not any(weights) else 1
        for_input = flops * num_gradients - for_weight
        record.training_flops += flops + self._training * (for_input + for_weight)
        if self._is_in_chunks:  # B runs them again, and does the work of W
            for_input, for_weight = flops + for_input + for_weight, 0
        record.input_flops[segment] += for_input
        record.weight_flops[segment] += for_weight

    @contextmanager
    def around_chunks(self) -> Iterator[None]:
        """Count the operations within the context as those of a loss's chunks."""
        self._is_in_chunks = True
        try:
            yield
        finally:
            self._is_in_chunks = False

    def _imagine(self) -> Imagined | None:
        """Make up values inside a block or behind the blocks, where stages have real values."""
        if self._is_in_block and self._num_in_block < _MOST_IMAGINED:
            self._num_in_block += 1
            self.record.imagined.setdefault(self.segment, calling_line())
            return self._imagined
        most = _MOST_IMAGINED
        if not len(self.chain):  # to note calls a few values are enough: a step may write text
            most = _MOST_IMAGINED_IN_TRAINING_NOTES if self._training else _MOST_IMAGINED_IN_NOTES
        if self.segment < len(self.chain) or self.num_imagined >= most:
            return None
        self._imagine_behind()
        return self._behind

    def _imagine_behind(self) -> None:
        self.num_imagined += 1
        self.record.is_certain = False

    def _drop(self, written: Tensor) -> bool:
        name = self._stripped.buffer_name(written)
        if name is not None:
            self._dropped.append(name)
        elif not self._is_in_block and self.segment == len(self.chain):
            self._imagine_behind()  # the tensor's value is wrong from now on
            return True
        return name is not None or self._is_in_block

    def _reach_back(self, result: Any) -> None:
        """Record the weights and values that get a gradient from the step's loss."""
        if not self._training:
            return
        loss = loss_in(result)
        refuse_loss_of_shard(loss)
        self._samples.note_loss(loss)
        if self.segment == len(self.chain):
            reach = self._values.reach_back(loss)
            named = [(self._stripped.weight_name(leaf), leaf) for leaf in reach.leaves]
            self.record.weight_uses = {name: reach.uses[id(leaf)] for name, leaf in named if name}
            # An expert without rows gets no gradient.
            self.record.trained = {
                name
                for name in self.record.weight_uses
                if self.chain.index_of(name) not in self.record.imagined
            }

    def _finish(self) -> None:
        """Complete the record after the step, before the module is restored."""
        record, last = self.record, self._sizes.last
        record.opened |= self.writes.filling
        hooked = set(self._checks.hooked)
        if record.opened & hooked:  # a list that hooks fill has an entry of each of their blocks
            record.opened |= hooked
        record.work, record.between = self.work.digests, self.between
        self.draws.finish()
        record.flags.finish()
        made_up = [record.calls.blocks.index(block) for block in record.imagined]
        record.reads.finish(min(made_up, default=len(record.calls.blocks)))
        if not record.flags.is_repeatable:
            last = max(call for call in (last, self._sizes.last_flag) if call is not None)
            record.flags = BatchFlags()
        record.briefly_hooked.update(self._checks.find_briefly_hooked())
        self.writes.finish()
        self._samples.note_writes(record.writes.attributes)
        if last is not None:
            record.sized_in, record.sizes = last, self.sizes_before(last)

    @contextmanager
    def _finding_hooked_spans(self) -> Iterator[None]:
        """Record calls, over several segments, of modules with full backward hooks.

        Such a hook gets the gradients of the module's inputs and outputs in one call. Where a cut
        goes through the module no stage has both, and torch would not call the hook.
        """
        is_any = bool(torchs._global_backward_hooks)  # private, as is _backward_hooks
        parts = self.module.named_modules()
        names = {part: name for name, part in parts if is_any or part._backward_hooks}
        begun: list[tuple[nn.Module, int]] = []

        def enter(part: nn.Module, args: tuple[Any, ...]) -> None:
            trains = any(isinstance(value, Tensor) and value.requires_grad for value in args)
            if part in names and trains:
                begun.append((part, self.num_calls))

        def leave(part: nn.Module, args: Any, output: Any) -> None:
            if begun and begun[-1][0] is part:
                called = self.record.calls.blocks[begun.pop()[1] : self.num_calls]
                if called:
                    name = names[part] or "the module"
                    self.record.hooked_spans.append(HookedSpan(name, min(called), max(called) + 1))

        if not names:
            yield
            return
        before = torchs.register_module_forward_pre_hook(enter)
        with before, torchs.register_module_forward_hook(leave):
            yield


class LongWriteError(Exception):
    """A step has changed long containers in place; the line is not recorded."""

    def __init__(self, written: set[Attribute]) -> None:
        self.written = written


class ImaginedError(Exception):
    """A step failed, possibly because of made-up values that its blocks read."""

    def __init__(self, cause: Exception, record: StepRecord, is_in_block: bool) -> None:
        self.cause = cause
        self.record = record  # of what ran until then
        self.is_in_block = is_in_block


def _explain(error: ValueNeededError, chain: BlockChain, segment: int) -> str:
    return (
        f"the step cannot be cut into stages, for only one of them has what it needs before "
        f"{chain.block_name(segment)}: {error}{in_brackets(users_line(error))}; move it behind "
        f"{chain.block_name(len(chain) - 1)}, where the last stage has all values, or compute it "
        f"from the batch"
    )


@contextmanager
def _same_grad_mode() -> Iterator[None]:
    is_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_enabled):
        yield


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Cast a weight at each use, as each stage does: a cast is no value that crosses a cut."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _shape_of(leaf: Any) -> torch.Size | None:
    return leaf.shape if isinstance(leaf, Tensor) else None


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> int:
    """Return the floating-point operations of a product, convolution or attention; else 0."""
    packet = func.overloadpacket
    # Torch has no formula for all of these.
    if packet.__name__.lstrip("_").startswith("scaled_dot_product"):
        query, key, value = args[:3]
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        pairs = num_queries * num_keys
        names = [argument.name for argument in func._schema.arguments]
        if dict(zip(names, args, strict=False)).get("is_causal"):
            seen = min(num_queries, num_keys)  # kernels skip what no query sees
            pairs = seen * (seen + 1) // 2 + (num_queries - seen) * num_keys
        return int(2 * query.shape[:-2].numel() * pairs * (query.shape[-1] + value.shape[-1]))
    if packet in _WHOLE:  # as they arrive in inference mode, where torch takes none of them apart
        return int(2 * result.numel() * args[1].shape[1:].numel())
    if packet is aten.matmul:
        return int(2 * result.numel() * args[0].shape[-1])
    if packet is torch.ops.aten._grouped_mm:  # each row of the left with its group's matrix
        return int(2 * args[0].numel() * args[1].shape[-1])
    if packet.__name__ == "gemm_4bit":  # of bitsandbytes, whose weight is packed
        return int(2 * result.numel() * args[0].shape[-1])
    formula = flop_registry.get(packet)
    return int(formula(*args, out_val=result)) if formula else 0


class _SizesByValues(TorchDispatchMode):
    """Records sizes that depend on values.

    Attributes:
        sizes: Value-dependent shapes and booleans between the blocks.
        last: The number of calls before the last such size; None if there is none.
        last_flag: The number of calls before the last such boolean.
    """

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self._trace = trace
        self.sizes: list[Any] = []
        self.last: int | None = None
        self.last_flag: int | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        trace, point = self._trace, self._trace.point
        trace.note_between(func, args, kwargs)
        if trace.observes:
            trace.writes.note_use(args)
            segment = trace.segment_of(args)
            trace.work.add(segment, func, args, kwargs)
            trace.draws.note(segment, func, args, kwargs or {})
        reads = trace.record.reads
        if point.is_in_block or point.segment == len(trace.chain):
            result = func(*args, **(kwargs or {}))
            reads.note_operation(func, args, result, trace.chain.part(*point))
            return result
        result = trace.record.flags.call(func, args, kwargs or {})
        reads.note_operation(func, args, result, trace.chain.part(*point))
        reads.note_between(func, args, kwargs or {}, result, trace.num_calls)
        self._note_sizes(func, args, result, trace.num_calls)
        return result

    def _note_sizes(self, func: Any, args: tuple[Any, ...], result: Any, num_calls: int) -> None:
        if is_sized_by_values(func, args) or lengths_place(func) is not None:
            self.sizes.append(tuple(tensor.shape for tensor in tensors_in(result)))
            self.last = num_calls
        elif func is aten._local_scalar_dense.default and not (
            args[0].is_floating_point() or args[0].is_complex()
        ):
            # A number may be a length, which the shapes show.
            self.sizes.append(result if isinstance(result, bool) else None)
            if isinstance(result, bool):
                self.last_flag = num_calls
            else:
                self.last = num_calls
