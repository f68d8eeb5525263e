"""Bytes that each stage saves of a microbatch, measured by running F and B on shapes alone.

The step runs as in the trace, but of a stage's alike blocks only two run, and the second counts for
those left out. Where each block is a stage, only two of the alike stages run. Each stage has a
store for the tensors that autograd saves, weight gradients wait for W, and blocks are checkpointed
as configured. So the bytes are the same as those that the stages' stores count later on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten  # private: see runtime/leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_pipeoffload.runtime import (
    BlockOutput,
    TensorSpec,
    mix_seed,
    output_tensors,
    seed_all,
    tensors_in,
)
from lightning_pipeoffload.runtime.batch import batch_leaves
from lightning_pipeoffload.runtime.cut import StepTrace, find_alike_blocks, loss_in
from lightning_pipeoffload.runtime.device import make_lanes
from lightning_pipeoffload.runtime.measure.live_bytes import LiveBytes
from lightning_pipeoffload.runtime.memory import (
    ActivationStore,
    CheapRecompute,
    HostMemory,
    OffloadSettings,
    Saved,
    SavedMemory,
    SavedTensor,
    storage_address,
)
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.sequence import BlockOnSlice, Dims, EarlierSlices, SequenceSlice
from lightning_pipeoffload.runtime.shapes import (
    KernelsOnZeros,
    ShapeOnly,
    ValueNeededError,
    storage_key,
)
from lightning_pipeoffload.runtime.step import Microbatch, backward_mode, run_checkpointed
from lightning_pipeoffload.runtime.tensor_parallel import sent_bytes
from lightning_pipeoffload.runtime.users_code import (
    TRACE,
    find_slots,
    in_brackets,
    private_copy,
    users_line,
)
from lightning_pipeoffload.runtime.weight_grad import (
    Fetch,
    WeightGradQueue,
    WeightInputKeeper,
    mark_computed_in_b,
)
from lightning_pipeoffload.runtime.weight_grad import kernels as weight_grad_kernels
from lightning_pipeoffload.schedule import Kind, MemoryPart


class _ShapeStore(ActivationStore):
    """The saved shapes of one stage.

    Attributes:
        num_alike: The number of blocks for which a new storage counts.
    """

    num_alike = 1

    @override
    def _keep(self, tensor: Tensor, part: MemoryPart) -> SavedTensor:
        index = self._num_storages
        saved = super()._keep(tensor, part)
        if self._num_storages > index:
            self._storages[index].num_bytes *= self.num_alike
        return saved


class StageStores(WeightInputKeeper):
    """The stores of all stages; tensors go to that of ``stage``, the running one.

    Args:
        stores: A list for each stage: one store for each slice, or one where sequences are whole.
        before: The store of the code before the blocks, which each slice runs; None: the code
            uses the first stage's store.
    """

    def __init__(
        self, stores: Sequence[Sequence[_ShapeStore]], before: _ShapeStore | None = None
    ) -> None:
        self.stores, self.before = stores, before
        self.stage = self.slice = 0
        self.is_before = before is not None

    @property
    def running(self) -> _ShapeStore:
        """The store of the running stage and slice."""
        if self.is_before and self.before is not None:
            return self.before
        return self.stores[self.stage][self.slice]

    def set_num_alike(self, num_blocks: int) -> None:
        """Count the tensors saved from now on for ``num_blocks`` blocks each."""
        for store in self.stores[self.stage]:
            store.num_alike = num_blocks

    def pack(self, tensor: Tensor) -> Saved:
        return self.running.pack(tensor)

    @override
    def pack_weight_input(self, x: Tensor) -> Saved:
        return self.running.pack_weight_input(x)

    def keep_until_w(self, tensor: Tensor) -> Fetch:
        return self.running.keep_until_w(tensor)

    @override
    def unpack(self, packed: Any) -> Tensor:
        return self.running.unpack(packed)

    @override
    def unpack_for_b(self, packed: Any) -> tuple[Tensor, Fetch | None]:
        return self.running.unpack_for_b(packed)


def measure_saved_memory(
    pipeline: Pipeline, part: Microbatch, recompute: str | None = None
) -> list[SavedMemory]:
    """Return the saved bytes of every stage for one microbatch, from a run without values.

    Where blocks run on slices of sequences, the list has an entry for each slice: those of the
    first stage, then those of the second, and so on.

    Args:
        pipeline: One rank's pipeline; its module is not changed.
        part: A microbatch of that pipeline.
        recompute: What B computes again; None: as the pipeline's settings have it.

    Raises:
        ValueError: The step needs values, or there is no loss.
    """
    recompute = recompute or pipeline.settings.recompute
    return _measure(pipeline, part, recompute, pipeline.records.kernels.copy())


def _measure(
    pipeline: Pipeline, part: Microbatch, recompute: str, kernels: KernelsOnZeros
) -> list[SavedMemory]:
    measuring = _MemoryTrace(pipeline, part, recompute, kernels)
    try:
        with measuring.tracing():
            # As F does: sizes may depend on the step's random numbers.
            seed_all(mix_seed(part.seed, 0))
            pipeline.records.generators.seed(mix_seed(part.seed, 0))
            with measuring.saving_to_stores():
                result = part.run(TRACE)
            measuring.run_backward(loss_in(result))
    except (ValueNeededError, RuntimeError) as error:
        if kernels.register_from_error(error, pipeline.chain.blocks):  # in a backward
            return _measure(pipeline, part, recompute, kernels)
        if not isinstance(error, ValueNeededError):
            raise
        raise ValueError(f"{error}{in_brackets(users_line(error))}") from None
    finally:
        measuring.remove_hooks()
    return measuring.memories


class _MemoryTrace(StepTrace):
    def __init__(
        self, pipeline: Pipeline, part: Microbatch, recompute: str, kernels: KernelsOnZeros
    ) -> None:
        options: Any = {"observes": False, "calls": part.record.calls}
        super().__init__(pipeline.module, pipeline.chain, part.device, kernels, **options)
        stages = pipeline.cut.stages
        self._part = part
        self._left_to_b, self._at_once = pipeline.left_to_b, pipeline.at_once
        self._recompute = recompute
        self._stage_of = {block: stage.index for stage in stages for block in stage.blocks}
        self._stage_of[len(self.chain)] = len(stages) - 1
        is_alone = all(len(stage.blocks) <= 1 for stage in stages)  # each block is a stage
        blocks = [range(len(self.chain))] if is_alone else [stage.blocks for stage in stages]
        # Cheap recomputation computes a block's values from those before it on its stage.
        runs_all = recompute == "cheap" and not is_alone
        alike = {} if runs_all else find_alike_blocks(self.chain, part.record, blocks)
        self.outputs = {index: part.record.outputs[index] for index in alike}
        self._alike_stages = alike if is_alone else {}
        # How many others of its stage a block counts for.
        self._num_alike = Counter(() if is_alone else alike.values())
        self._slices: Sequence[SequenceSlice] = ()
        if part.record.sequence is not None:
            of_slices = part.record.slice_records(pipeline.settings.num_sequence_slices)
            self._slices = of_slices[0].sequence_slices
        self._cuts: dict[Any, tuple[Tensor, Tensor]] = {}
        self._of_stages = [[SavedMemory() for _ in self._slices or (None,)] for _ in stages]
        self._before = SavedMemory()
        self._is_backward = False
        self._cheap: CheapRecompute | None = None
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def saving_to_stores(self) -> Iterator[None]:
        resident = self._record_resident()
        lanes = make_lanes(torch.device("cpu"))  # nothing is copied
        settings = OffloadSettings(self._part.device, lanes, HostMemory(pinned=False))
        make = partial(_ShapeStore, resident=resident, settings=settings, counts_shapes=True)
        stores = [[make(f"stage {n}") for _ in of] for n, of in enumerate(self._of_stages)]
        self._stores = StageStores(stores, make("before the blocks") if self._slices else None)
        self._queue = WeightGradQueue(keeper=self._stores, has_at_once=bool(self._at_once))
        defers = not self._part.record.backwards.are_any
        with (
            self._queue if defers else nullcontext(),
            saved_tensors_hooks(self._stores.pack, self._stores.unpack),
        ):
            if self._recompute == "cheap":
                self._cheap = CheapRecompute((Tensor, ShapeOnly))
            is_sequential = self.record.calls.is_sequential
            with (
                self._cheap.saving() if self._cheap else nullcontext(),
                nullcontext() if is_sequential else _BeforeEachFunction(self._begin_stage_of),
            ):
                yield

    def _record_resident(self) -> set[int]:
        """Mark the shapes of parameters as parameters; return the storages that stay resident."""
        resident = [leaf for leaf in batch_leaves(self._part.part) if isinstance(leaf, Tensor)]
        for slot in find_slots(self.module):
            tensor: Any = slot.tensor
            if slot.kind == "_parameters":
                weight_grad_kernels.mark_deferrable(tensor, slot.name not in self._left_to_b)
                tensor._is_param = True
                if slot.name in self._at_once:
                    mark_computed_in_b(tensor)
                if tensor.requires_grad:  # to which a backward adds, as later microbatches do
                    tensor.grad = ShapeOnly.like(tensor, slot.name)
            resident.append(tensor.meta if isinstance(tensor, ShapeOnly) else tensor)
        return {*map(storage_address, resident)}

    @override
    def call_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_backward:  # a checkpoint runs it again
            with self._again_in_block():
                return self.chain.plain_calls[index](*args, **kwargs)
        self._begin_stage(self._stage_of[index])
        self._stores.set_num_alike(1 + self._num_alike[index])
        call = self.num_calls
        output = super().call_block(index, args, kwargs)
        self._stores.set_num_alike(1)
        self._begin_stage(self._stage_of[self.record.calls.position_after(call)])
        for leaf in tensors_in(output):
            if leaf.requires_grad:
                measure = partial(self._measure_backward_until, self._stage_of[index], index)
                self._hooks.append(leaf.register_hook(measure))
        return output

    @override
    @contextmanager
    def around_loss_chunks(self) -> Iterator[None]:
        with LiveBytes() as live:
            yield
        self._of_stages[self._stores.stage][self._stores.slice].record_workspace(live.peak)

    @override
    def _observe(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        super()._observe(func, args, result)
        sent = sent_bytes(func, args) * self._stores.running.num_alike
        memory = self._of_stages[self._stores.stage][self._stores.slice]
        memory.collective_bytes[Kind.B if self._is_backward else Kind.F] += sent

    @override
    def _drops_write(self, written: Tensor) -> bool:
        """Drop writes after the blocks too, as of metrics: nothing reads them here."""
        return super()._drops_write(written) or self.segment == len(self.chain)

    def _begin_stage_of(self, operands: Any) -> None:
        if not self._is_in_block:
            self._begin_stage(self._stage_of[self.segment_of_operation(operands)])

    def _begin_stage(self, stage: int) -> None:
        if self._cheap and stage != self._stores.stage:
            self._cheap.change_stage(self._stores.stage, stage)
        if stage != self._stores.stage:
            self._cuts.clear()
        self._stores.stage, self._stores.slice = stage, max(0, len(self._slices) - 1)
        self._stores.is_before = False

    @override
    def _run_block(self, index: int, args: Any, kwargs: Any) -> Any:
        if index in self.outputs:
            return self._skip_block(index, (args, kwargs))
        if self._slices:
            return self._run_in_slices(index, args, kwargs)
        return self._run_with_recompute(index, self.chain.plain_calls[index], args, kwargs)

    def _run_with_recompute(
        self, index: int, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self._recompute != "full" or index in self._part.record.opened:
            return call(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._again_in_block() if self._is_backward else nullcontext():
                return call(*args, **kwargs)

        return run_checkpointed(self.chain.blocks[index], run, args, kwargs)

    def _run_in_slices(self, index: int, args: Any, kwargs: Any) -> Any:
        """Run a block slice by slice; return its whole output."""
        call, earlier = self.num_calls, EarlierSlices()
        stage, plain = self._stage_of[index], self.chain.plain_calls[index]
        dims, is_last = self._part.record.sequence, index == len(self.chain) - 1
        parts: list[list[Tensor]] = []
        assert dims is not None
        for part in self._slices:
            self._stores.slice = part.index
            on_slice = BlockOnSlice(self.chain.block_name(index), index, part, earlier)
            cut = self._slice_arguments(part, (args, kwargs), dims.arguments[call])
            output = self._run_with_recompute(index, partial(on_slice.run, plain), *cut)
            tensors = output_tensors(output)
            for leaf in tensors:
                if leaf.requires_grad:
                    measure = partial(self._measure_backward_until_slice, stage, index, part.index)
                    self._hooks.append(leaf.register_hook(measure))
            # After the last block slices are joined as here, but earlier ones are leaves then.
            is_joined = is_last and part.is_last
            parts.append(tensors if is_joined else [*map(_CopiedSlice.apply, tensors)])
        if is_last:
            earlier.outputs += parts[:-1]
        for part, memory in zip(self._slices, self._of_stages[stage], strict=True):
            memory.add_for_later(earlier.bytes_kept_by_slice(part), 1 + self._num_alike[index])
        joined = zip(zip(*parts, strict=True), dims.outputs[call], strict=True)
        return self._part.record.outputs[call].fill([torch.cat(p, dim) for p, (dim, *_) in joined])

    def _slice_arguments(self, part: SequenceSlice, arguments: Any, dims: Sequence[Dims]) -> Any:
        """Return a slice of the arguments of a call; arguments of several blocks are cut once."""
        leaves, form = tree_flatten(arguments)
        for place, (leaf, of) in enumerate(zip(leaves, dims, strict=True)):
            if not isinstance(leaf, Tensor):
                leaves[place] = private_copy(leaf)  # a cache of keys, say
            elif of:
                key = part.index, storage_key(leaf), leaf.shape, leaf.storage_offset()
                if key not in self._cuts:
                    self._cuts[key] = leaf, part.cut(leaf, of)
                leaves[place] = self._cuts[key][1]
        return tree_unflatten(leaves, form)

    def _skip_block(self, index: int, arguments: Any) -> Any:
        output = self.outputs[index]
        form = self._part.device, self.chain.output_origins(index)
        shapes = [ShapeOnly(meta, *form) for meta in output.meta_tensors]
        inputs = [leaf for leaf in tensors_in(arguments) if leaf.requires_grad]
        return output.fill(_SkippedBlock.apply(output, shapes, *inputs))

    @contextmanager
    def _again_in_block(self) -> Iterator[None]:
        self._is_in_block, self._num_in_block = True, 0
        try:
            yield
        finally:
            self._is_in_block = False

    def run_backward(self, loss: Tensor) -> None:
        """Run the B of all stages."""
        for memories, stores in zip(self._of_stages, self._stores.stores, strict=True):
            for memory, store in zip(memories, stores, strict=True):
                memory.measure_forward_if_due(store)
        self._before.measure_forward_if_due(self._stores.before)
        self._is_backward = True
        with backward_mode(self._part.device), self._queue:
            self._part.differentiate(loss)
        self._measure_backward_until(-1, -1)
        self._before.measure_backward_if_due(self._queue, self._stores.before)
        for memory in self._of_stages[0] if self._slices else ():  # each slice runs it
            memory.add(self._before)

    @property
    def memories(self) -> list[SavedMemory]:
        """What each stage saves, in their order; where there are slices, for each slice of it."""
        alike = self._alike_stages
        of_stages = (self._of_stages[alike.get(n, n)] for n in range(len(self._of_stages)))
        return [memory for of_stage in of_stages for memory in of_stage]

    def remove_hooks(self) -> None:
        """Remove the hooks: Python cannot collect a cycle through autograd, which holds them."""
        for hook in self._hooks:
            hook.remove()

    def _measure_backward_until(self, stage: int, block: int, *gradient: Tensor) -> None:
        """Measure the stages after ``stage``, whose B is finished; that of ``block`` begins."""
        if not self._is_backward:  # a backward of the step's own
            return
        if not self.record.calls.is_sequential:
            self._stores.stage = stage if stage >= 0 else len(self._stores.stores) - 1
            if stage >= 0:  # the backward comes back to later stages
                return
        while self._stores.stage > stage:
            running = self._stores.stage
            for memory, store in zip(
                self._of_stages[running], self._stores.stores[running], strict=True
            ):
                memory.measure_backward_if_due(self._queue, store)
            if not running:
                return
            self._stores.stage -= 1
        self._stores.set_num_alike(1 + self._num_alike[block])

    def _measure_backward_until_slice(
        self, stage: int, block: int, place: int, gradient: Tensor
    ) -> None:
        self._measure_backward_until(stage, block)
        self._stores.slice = place


class _BeforeEachFunction(TorchFunctionMode):
    """Calls ``begin`` before each torch function, for steps that call blocks more than once."""

    def __init__(self, begin: Callable[[Any], None]) -> None:
        super().__init__()
        self._begin = begin

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._begin((args, kwargs))
        return func(*args, **(kwargs or {}))


class _CopiedSlice(torch.autograd.Function):
    """Copies a slice of a block's output, and its gradient, so that neither is a view."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return part.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class _SkippedBlock(torch.autograd.Function):
    """Stands for a block that does not run; its outputs and input gradients are shapes."""

    @staticmethod
    def forward(
        ctx: Any, output: BlockOutput, shapes: list[ShapeOnly], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.specs = [(TensorSpec.of(leaf), leaf.device) for leaf in inputs]
        pairs = zip(shapes, output.tensor_specs, strict=True)
        ctx.mark_non_differentiable(*(leaf for leaf, spec in pairs if not spec.requires_grad))
        return tuple(shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shapes = (ShapeOnly(spec.empty("meta"), device, frozenset()) for spec, device in ctx.specs)
        return None, None, *shapes
