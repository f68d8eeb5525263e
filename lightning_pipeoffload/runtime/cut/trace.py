"""The trace: one run of the user's step without values for each kind of step and shape.

The trace allocates no memory and does no arithmetic. Its observers (:mod:`.observers`) fill the
parts of a :class:`.record.StepRecord`.

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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home

from lightning_pipeoffload.runtime import (
    ACTIVE_SETTINGS,
    BlockOutput,
    leaves_of,
    without_garbage_collection,
)
from lightning_pipeoffload.runtime.batch import possible_sample_counts
from lightning_pipeoffload.runtime.compiled import force_eager
from lightning_pipeoffload.runtime.cut.batch_sizes import SizeObserver
from lightning_pipeoffload.runtime.cut.block_arguments import BlockArgumentObserver
from lightning_pipeoffload.runtime.cut.block_chain import ActiveStepRun, BlockChain
from lightning_pipeoffload.runtime.cut.call_checks import (
    CallChecks,
    CallsError,
    OrderError,
    refuse_packed,
)
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.cut.carried_values import mark_slots
from lightning_pipeoffload.runtime.cut.checks import describe_argument_write, loss_in
from lightning_pipeoffload.runtime.cut.device_reads import ReadObserver
from lightning_pipeoffload.runtime.cut.draws import DrawObserver
from lightning_pipeoffload.runtime.cut.module_hooks import HookObserver
from lightning_pipeoffload.runtime.cut.observers import Observer, Operation, overriding_methods
from lightning_pipeoffload.runtime.cut.own_backwards import BackwardObserver
from lightning_pipeoffload.runtime.cut.record import RecordedCall, StepRecord
from lightning_pipeoffload.runtime.cut.sample_uses import SampleObserver
from lightning_pipeoffload.runtime.cut.segment_work import SegmentWork, WorkBetween, WorkObserver
from lightning_pipeoffload.runtime.cut.stripped_module import StrippedModule
from lightning_pipeoffload.runtime.cut.value_trace import ValueTrace
from lightning_pipeoffload.runtime.cut.writes import WriteObserver
from lightning_pipeoffload.runtime.shapes import (
    EVERYTHING,
    NO_ALARM,
    AddressNeededError,
    AssumedValues,
    KernelFoundError,
    KernelsOnZeros,
    ShapeOnly,
    StepRules,
    ValueNeededError,
    recording_shards,
    refuse_loss_of_shard,
)
from lightning_pipeoffload.runtime.users_code import (
    Attribute,
    StepPoint,
    find_slots,
    in_brackets,
    refusing_held_iterators,
    restoring_attributes,
    running_user_line,
    users_line,
)
from lightning_pipeoffload.runtime.weight_grad import ChunkCallbacks

_FUNCTIONAL = "don't yet support saved tensor hooks"  # torch's error in torch.func
_MOST_ASSUMED_TO_FIND_BLOCKS = {False: 8, True: 16}  # of an evaluation, of training
_MOST_ASSUMED = 1000  # values in a block, and after the blocks: a loop may never end


class StepTrace:
    """One run of a step without values.

    Args:
        module: The user's module; it is restored afterwards.
        chain: Its blocks.
        device: The device that tensors report, wherever the module is.
        kernels: The Functions and modules that run on zeros; None: none so far.
        log: A list to which calls with values outside of the blocks are appended; None: no log.
        assumed: How to make up the values that blocks read, and those read after the blocks.
        observes: Whether all observers record; else those of sizes, reads and the work between
            blocks only, in a trace that is compared with another one.
        until: The call at which to leave the step; None: run to the end.
        compared: Attributes that are compared at each block, though they are long.
        calls: The order of the calls of blocks; None: each is called once.

    Attributes:
        outputs: The outputs of blocks that are skipped, by index.
        record: The record, complete once :meth:`trace` has returned it.
        num_assumed: How many values that the step reads after the blocks were made up.

    The others are what observers ask; see :class:`.observers.RunningTrace`.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        device: torch.device,
        kernels: KernelsOnZeros | None = None,
        log: list[RecordedCall] | None = None,
        assumed: tuple[AssumedValues, AssumedValues] = (EVERYTHING, NO_ALARM),
        observes: bool = True,
        until: int | None = None,
        compared: Set[Attribute] = frozenset(),
        calls: CallOrder | None = None,
    ) -> None:
        self.module, self.chain = module, chain
        self.calls = calls or CallOrder.each_block_once(len(chain))
        self.outputs: Mapping[int, BlockOutput] = {}
        self.device = device
        self._kernels = KernelsOnZeros() if kernels is None else kernels
        self._assumed, self._assumed_after = assumed
        self._observes = observes
        self.record = record = StepRecord(self.calls, work=SegmentWork.empty(len(chain) + 1))
        self._values = ValueTrace(chain, self.record, self._record_function, log)
        self.stripped = StrippedModule(device)
        self._checks = CallChecks(chain, self.calls)
        self._sizes = SizeObserver(self, record.sizes, record.flags, until)
        self._work = WorkObserver(self, record.work)
        self._writes = WriteObserver(self, record.writes, record.segments, compared)
        self._samples = SampleObserver(self, record.samples, record.writes)
        self._hook_observer = HookObserver(self, record.hooks)
        # In all traces, whose operations are compared: torch detaches a new tensor that is kept.
        reads = ReadObserver(self, record.reads, record.assumed)
        self._observers: list[Observer[Any]] = [self._sizes, reads, WorkBetween(self, record.work)]
        if observes:
            self._observers += [
                self._work,
                self._writes,
                self._samples,
                self._hook_observer,
                BlockArgumentObserver(self, record.arguments),
                DrawObserver(self, record.draws),
                BackwardObserver(self, record.backwards),
            ]
        self._on_function = overriding_methods(Observer.record_function, self._observers)
        self._on_operation = overriding_methods(Observer.record_operation, self._observers)
        self._on_any_operation = overriding_methods(Observer.record_below_autograd, self._observers)
        self._training = torch.is_grad_enabled()
        self.is_in_call = self._is_in_block = False
        self._num_in_block = 0
        self._dropped: list[str] = []  # buffers that the operation that runs writes
        self.num_assumed = 0  # values after the blocks

    @property
    def segment(self) -> int:
        """The running segment; between blocks that are called again, the first possible one."""
        return self._values.position

    @property
    def num_calls(self) -> int:
        """The number of calls of blocks that have returned."""
        return self._values.num_calls

    def segment_of_operation(self, tensors: Iterable[Any]) -> int:
        """Return the segment of an operation on tensors, at the present point of the step."""
        return self._values.position_of_operation(tensors)

    @property
    def point(self) -> StepPoint:
        """The point of the step that is running."""
        return StepPoint(self.segment, self._is_in_block)

    def sizes_before(self, call: int) -> tuple[Any, ...]:
        """Return the value-dependent sizes before a call and the shapes of its arguments."""
        return self._sizes.before(call)

    def start(self, batch: Sequence[Tensor]) -> None:
        """Record the tensors of the microbatch, which the step gets."""
        for observer in self._observers:
            observer.start(batch)

    def trace(self, run: Callable[[], Any]) -> StepRecord:
        """Record the step that ``run`` calls on one microbatch.

        Raises:
            ValueError: The step cannot be cut at its blocks, with the reason and the line.
            AssumedValueError: The step failed after a value was made up.
            KernelFoundError: A kernel asked for an address; the step has to be traced again.
            LongContainerWriteError: The step wrote long containers in place; it has to be traced
                again, with these attributes in ``compared``.
        """
        found: dict[str, Any] = {}
        try:
            with self.tracing():
                try:
                    result = run()
                    found["result_counts"] = possible_sample_counts(result)
                    found |= self._record_loss(result)
                except (ValueNeededError, Exception) as error:
                    if self._kernels.register_from_error(error, self.chain.blocks):
                        raise KernelFoundError from error
                    self._accept_or_raise(self._kernels.explain_why_not_registered(error))
                    found["is_certain"] = False
                self._finish()
            self._checks.check_complete(self.num_calls)
        except (KernelFoundError, OrderError):
            raise
        except Exception as error:
            if self.record.writes.arguments:  # without which the step may fail
                first = self.record.writes.arguments[0]
                raise ValueError(describe_argument_write(first, self.chain)) from error
            if isinstance(error, AssumedValueError) or not self.record.assumed:
                raise
            raise AssumedValueError(error, self.record, self._is_in_block) from error
        if self._writes.long_container_writes:
            raise LongContainerWriteError(self._writes.long_container_writes)
        if self.num_assumed:
            found["is_certain"] = False
        return replace(self.record, **found)

    def _accept_or_raise(self, error: BaseException) -> None:
        """Accept a step that has failed after the blocks where it lacks values; else raise."""
        if not isinstance(error, ValueNeededError):
            if _FUNCTIONAL in str(error):
                raise ValueError(
                    f"the step calls torch.func.grad, vjp, jacrev or hessian"
                    f"{in_brackets(users_line(error))}, which work without saved_tensors_hooks "
                    f"only, and a pipeline needs these; call torch.autograd.grad("
                    f"..., create_graph=True) instead"
                ) from None
            if not self.num_assumed or isinstance(error, OrderError):
                raise error
        elif isinstance(error, AddressNeededError):
            raise ValueError(f"{error}{in_brackets(users_line(error))}") from None
        elif self.segment < len(self.chain):  # other blocks may enclose the line
            raise CallsError(_explain_value_needed(error, self.chain, self.segment)) from None
        unused = self._values.blocks_with_escaped_tensors()
        if unused:
            block, (first, *_) = self.chain.block_name(min(unused)), (str(error) + "\n").split("\n")
            refusal = ValueError(
                f"the step fails after the blocks when it runs without values "
                f"({type(error).__name__}: {first}){in_brackets(users_line(error))}, and an "
                f"attribute or a hook holds what {block} has computed: whether it is used after "
                f"that line cannot be found out; use it before that line"
            )
            raise AssumedValueError(refusal, self.record, is_in_block=False)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Prepare a context for the step; restore the module, its buffers and all generators."""
        module = self.module
        with ExitStack() as stack:
            stack.enter_context(without_garbage_collection())
            stack.enter_context(_without_inference_mode())
            stack.enter_context(_without_cached_casts())
            stack.enter_context(self._kernels.running_on_zeros(self._record_kernel))
            changed = stack.enter_context(restoring_attributes(module))
            stack.enter_context(force_eager())
            stack.enter_context(recording_shards())
            stack.enter_context(refusing_held_iterators(module))
            slots = find_slots(module)
            self.stripped.strip(slots)
            mark_slots(slots, self.chain)
            stack.enter_context(ActiveStepRun(self.chain, self))
            stack.enter_context(self._writes.recording_saved_tensors())
            for observer in self._observers:
                stack.enter_context(observer.recording())
            stack.enter_context(
                ACTIVE_SETTINGS.during(
                    StepRules(self._observe, self._choose_assumed_values, self._drops_write)
                )
            )
            chunks = ChunkCallbacks(self.around_loss_chunks, self._samples.record_weights_of_chunks)
            stack.enter_context(ACTIVE_SETTINGS.during(chunks))
            stack.enter_context(self._values)
            stack.enter_context(_OperationInterceptor(self._run_operation))
            yield
        self._writes.record_in_place_changes(changed)

    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block on shape-only arguments, and return its shape-only output.

        Raises:
            StageExit: ``until`` is this call, so the step ends here.
        """
        if self.num_assumed and not self._training:
            # Text is generated until a value says stop: the step runs whole, however it goes on.
            raise RuntimeError("a value after the blocks decides whether they are called again")
        arguments: Any = args, kwargs
        self._checks.check(index, self.num_calls)
        self.is_in_call = True
        with self._values.paused():
            for observer in self._observers:
                observer.before_block(index, arguments)
        args, kwargs = self._values.enter_block(index, arguments)
        for observer in self._observers:
            observer.enter_block(index, args, kwargs)
        self._is_in_block, self._num_in_block = True, 0
        output = self._run_block(index, args, kwargs)
        refuse_packed(output, self.chain.block_name(index))
        self._is_in_block = False
        for observer in self._observers:
            observer.leave_block(index, args, kwargs)
        output = self._values.leave_block(index, arguments, output)
        self.is_in_call = False
        return output

    def _run_block(self, index: int, args: Any, kwargs: Any) -> Any:
        run = partial(self.chain.plain_calls[index], *args, **kwargs)
        output = self.outputs.get(index)
        if output is None:
            return run()
        form = self.device, self.chain.output_origins(index)
        meta_tensors = zip(output.meta_tensors, output.tensor_specs, strict=True)
        return output.fill(
            [ShapeOnly(meta, *form, spec.requires_grad) for meta, spec in meta_tensors]
        )

    def _record_kernel(self, name: str, arguments: Any) -> None:
        self.record.kernels.add(self.point)
        for observer in self._observers:
            observer.record_kernel(name, arguments)

    def _record_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for method in self._on_function:
            method(func, args, kwargs)

    def _run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation below autograd, on tensors with values or without."""
        segment = self.segment_of_operation(args)
        if self._is_in_block or self.segment == len(self.chain):
            result = func(*args, **kwargs)
        else:
            result = self._sizes.call(func, args, kwargs)
        operation = Operation(func, args, kwargs, result, segment)
        for method in self._on_any_operation:
            method(operation)
        return result

    def _observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if not self._observes:
            return
        tensors = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor)]
        segment = self.segment_of_operation(tensors)
        operation = Operation(func, args, {}, result, segment)
        for method in self._on_operation:
            method(operation)
        self._values.observe(func, args, result, segment, self._record_uses(tensors, segment))

    def _record_uses(self, tensors: Sequence[Tensor], segment: int) -> frozenset[str]:
        """Record the segment that uses weights, and writes of buffers.

        Returns:
            The weights, if repeated calls are around and nothing else is used: then the segment is
            that of who uses the result.
        """
        for name in self._dropped:
            self.record.segments[name].add(segment)
        self._dropped.clear()
        direct = [self.stripped.weight_name(tensor) for tensor in tensors]
        if self._values.is_between_repeated_calls and tensors:
            used = [
                self._values.sole_source_weights(tensor) if name is None else frozenset((name,))
                for tensor, name in zip(tensors, direct, strict=True)
            ]
            if all(used):
                return frozenset().union(*used)
        for name in filter(None, direct):
            self.record.segments[name].add(segment)
        return frozenset()

    def around_loss_chunks(self) -> AbstractContextManager[Any]:
        """Return a context for the chunks of a loss."""
        return self._work.around_loss_chunks()

    def _choose_assumed_values(self) -> AssumedValues | None:
        """Make up values inside a block or after the blocks, where stages have real values."""
        if self._is_in_block and self._num_in_block < _MOST_ASSUMED:
            self._num_in_block += 1
            self.record.assumed.setdefault(self.segment, running_user_line())
            return self._assumed
        most = _MOST_ASSUMED
        if not len(self.chain):  # to record calls a few values are enough: a step may write text
            most = _MOST_ASSUMED_TO_FIND_BLOCKS[self._training]
        if self.segment < len(self.chain) or self.num_assumed >= most:
            return None
        self.num_assumed += 1
        return self._assumed_after

    def _drops_write(self, written: Tensor) -> bool:
        """Return whether a write of a missing value into a real tensor is dropped, not refused."""
        name = self.stripped.buffer_name(written)
        if name is not None:
            self._dropped.append(name)
        elif not self._is_in_block and self.segment == len(self.chain):
            self.num_assumed += 1  # the tensor's value is wrong from now on
            return True
        return name is not None or self._is_in_block

    def _record_loss(self, result: Any) -> dict[str, Any]:
        """Tell observers the loss; return, for the record, the weights that it gives a gradient.

        Raises:
            ValueError: There is no loss, or each tensor rank would compute another one.
        """
        if not self._training:
            return {}
        loss = loss_in(result)
        refuse_loss_of_shard(loss)
        for observer in self._observers:
            observer.record_loss(loss)
        if self.segment != len(self.chain):
            return {}
        reach = self._values.trace_loss_graph(loss)
        named = [(self.stripped.weight_name(leaf), leaf) for leaf in reach.leaves]
        uses = {name: reach.uses[id(leaf)] for name, leaf in named if name}
        # An expert without rows gets no gradient.
        trained = {n for n in uses if self.chain.enclosing_block(n) not in self.record.assumed}
        return {"weight_uses": uses, "trained": trained}

    def _finish(self) -> None:
        """Complete the record after the step, before the module is restored."""
        opened, hooked = self.record.opened, self._hook_observer.hooked
        opened.update(self._writes.blocks_filling_arguments)
        if opened & hooked:  # a list that hooks fill has an entry of each of their blocks
            opened.update(hooked)
        for observer in self._observers:
            observer.finish()


class LongContainerWriteError(Exception):
    """A step has changed long containers in place; the line is not recorded."""

    def __init__(self, written: set[Attribute]) -> None:
        self.written = written


class AssumedValueError(Exception):
    """A step failed, possibly because of made-up values that its blocks read."""

    def __init__(self, cause: Exception, record: StepRecord, is_in_block: bool) -> None:
        self.cause = cause
        self.record = record  # of what ran until then
        self.is_in_block = is_in_block


def _explain_value_needed(error: ValueNeededError, chain: BlockChain, segment: int) -> str:
    return (
        f"the step cannot be cut into stages, for only one of them has what it needs before "
        f"{chain.block_name(segment)}: {error}{in_brackets(users_line(error))}; move it after "
        f"{chain.block_name(len(chain) - 1)}, where the last stage has all values, or compute it "
        f"from the batch"
    )


@contextmanager
def _without_inference_mode() -> Iterator[None]:
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


class _OperationInterceptor(TorchDispatchMode):
    """Has each operation run by a function."""

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})
