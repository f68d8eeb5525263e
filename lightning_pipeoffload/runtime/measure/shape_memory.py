"""What each stage keeps of a microbatch, known from shapes alone: its F and B run without values.

The step runs as in the probe. What autograd saves goes into a store for each stage, weight
gradients wait as they would for W, blocks are checkpointed where they are to be: so the bytes are
those that the stages' own stores count later, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_pipeoffload.runtime.accelerator import is_on
from lightning_pipeoffload.runtime.cut.checks import loss_in
from lightning_pipeoffload.runtime.cut.trace import StepTrace
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.memory.host_memory import HostMemory
from lightning_pipeoffload.runtime.memory.recompute import CheapRecompute
from lightning_pipeoffload.runtime.memory.saved_tensor import Resident, Saved, cast_parameter
from lightning_pipeoffload.runtime.memory.stage_store import (
    ActivationStore,
    OffloadSettings,
    address_of,
)
from lightning_pipeoffload.runtime.memory.streams import make_lanes
from lightning_pipeoffload.runtime.microbatch import batch_leaves
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.randomness import mix_seed, seed_all
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError
from lightning_pipeoffload.runtime.step.batch_slice import BatchSlice
from lightning_pipeoffload.runtime.step.recomputed_block import run_checkpointed
from lightning_pipeoffload.runtime.step.stage import BackwardOn, SavedMemory
from lightning_pipeoffload.runtime.users_code.step_call import PROBE
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets, users_line
from lightning_pipeoffload.runtime.weight_grad import kernels as weight_grad_kernels
from lightning_pipeoffload.runtime.weight_grad.node import Fetch, WeightInputKeeper
from lightning_pipeoffload.runtime.weight_grad.queue import WeightGradQueue, deferring
from lightning_pipeoffload.schedule.actions import Part


class _SavedShape:
    """A saved tensor without a value: its meta tensor is kept as that of a device would be."""

    def __init__(self, saved: Saved, tensor: ShapeOnly) -> None:
        self._saved = saved
        self._place = tensor.device, tensor.origins

    def unpack(self) -> Tensor:
        return ShapeOnly(self._saved.unpack(), *self._place)


class ShapeStore(ActivationStore):
    """An activation store that counts shape-only tensors as the device's own."""

    def __init__(self, name: str, resident: Collection[int], device: torch.device) -> None:
        lanes = make_lanes(torch.device("cpu"), count=1)  # nothing is ever copied
        super().__init__(name, resident, OffloadSettings(device, lanes, HostMemory(pinned=False)))
        self._device = device

    @override
    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return not (tensor.is_meta or is_on(tensor, self._device))

    @override
    def _pack(self, tensor: Tensor, part: Part) -> Saved:
        if not isinstance(tensor, ShapeOnly):
            return super()._pack(tensor, part)
        if self._stays(tensor.meta) or cast_parameter(tensor) is not None:
            return _SavedShape(Resident(tensor.meta), tensor)
        return _SavedShape(self._keep(tensor.meta, part), tensor)

    @override
    def pack_for_weight(self, tensor: Tensor) -> Saved:
        if not isinstance(tensor, ShapeOnly):
            return super().pack_for_weight(tensor)
        return _SavedShape(super().pack_for_weight(tensor.meta), tensor)


class StageStores(WeightInputKeeper):
    """The stores of all stages, of which the one in turn is given what autograd saves.

    Attributes:
        stores: These.
        turn: The stage that runs.
    """

    def __init__(self, stores: Sequence[ShapeStore]) -> None:
        self.stores = stores
        self.turn = 0

    @property
    def store(self) -> ShapeStore:
        """The store of the stage in turn."""
        return self.stores[self.turn]

    def pack(self, tensor: Tensor) -> Saved:
        """Keep a tensor that autograd saves."""
        return self.store.pack(tensor)

    @override
    def pack_weight_input(self, x: Tensor) -> Saved:
        return self.store.pack_weight_input(x)

    def pack_for_weight(self, tensor: Tensor) -> Saved:
        """Keep a tensor that waits for W from now on."""
        return self.store.pack_for_weight(tensor)

    @override
    def unpack(self, packed: Any) -> Tensor:
        return self.store.unpack(packed)

    @override
    def unpack_for_b(self, packed: Any) -> tuple[Tensor, Fetch | None]:
        # Only its shape is read, by B as by W.
        return self.unpack(packed), self.fetch(packed)

    def fetch(self, saved: Saved) -> Fetch:
        """Return what W calls to have a kept tensor."""
        return self.store.fetch(saved)


def measure_shapes(pipeline: Pipeline, part: BatchSlice) -> list[SavedMemory]:
    """Return what every stage keeps of one microbatch, from a run without values.

    Args:
        pipeline: One rank's part of a module that is cut; the module is left as it was.
        part: The microbatch, as the pipeline has cut it.

    Raises:
        ValueError: The step needs values, or there is no loss.
    """
    measuring = _MeasuringPass(pipeline, part)
    try:
        with measuring.running():
            # As F does: sizes may depend on what the step draws.
            seed_all(mix_seed(part.seed, 0))
            pipeline.records.generators.seed(mix_seed(part.seed, 0))
            with measuring.keeping():
                result = part.run(PROBE)
            measuring.run_backward(loss_in(result))
    except ValueNeededError as error:
        raise ValueError(f"{error}{in_brackets(users_line(error))}") from None
    finally:
        measuring.let_go()
    return measuring.found


class _MeasuringPass(StepTrace):
    def __init__(self, pipeline: Pipeline, part: BatchSlice) -> None:
        super().__init__(pipeline.module, pipeline.chain, part.device, observes=False)
        stages = pipeline.partition
        self._part = part
        self._mixed = pipeline.mixed
        self._recompute = pipeline.settings.recompute
        self._stage_of = {block: stage.index for stage in stages for block in stage.blocks}
        self._stage_of[len(self.chain)] = len(stages) - 1
        self.found = [SavedMemory() for _ in stages]
        self._is_backward = False
        self._cheap: CheapRecompute | None = None
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def keeping(self) -> Iterator[None]:
        resident = self._note_resident()
        device = self._part.device
        names = (f"stage {stage}" for stage in range(len(self.found)))
        self._stores = StageStores([ShapeStore(name, resident, device) for name in names])
        self._queue = WeightGradQueue(keeper=self._stores)
        defers = not self._part.record.starts_backward
        with (
            deferring(self._queue) if defers else nullcontext(),
            saved_tensors_hooks(self._stores.pack, self._stores.unpack),
        ):
            if self._recompute == "cheap":
                self._cheap = CheapRecompute((Tensor, ShapeOnly))
            with self._cheap.saving() if self._cheap else nullcontext():
                yield

    def _note_resident(self) -> set[int]:
        """Mark the stand-ins as the parameters are; return what is on the device anyway."""
        found = [leaf for leaf in batch_leaves(self._part.part) if isinstance(leaf, Tensor)]
        for slot in find_slots(self._module):
            tensor: Any = slot.tensor
            if slot.kind == "_parameters":
                weight_grad_kernels.mark(tensor, slot.name not in self._mixed)
                tensor._is_param = True
            found.append(tensor.meta if isinstance(tensor, ShapeOnly) else tensor)
        return {*map(address_of, found)}

    @override
    def call_block(self, index: int, call: Callable[[], Any], arguments: Any) -> Any:
        if self._is_backward:  # a checkpoint runs it again
            with self._again_in_block():
                return call()
        output = super().call_block(index, call, arguments)
        self._begin_stage(self._stage_of[index + 1])
        for leaf in tensors_in(output):
            if leaf.requires_grad:
                found = partial(self._come_back_to, self._stage_of[index])
                self._hooks.append(leaf.register_hook(found))
        return output

    @override
    def _drop(self, written: Tensor) -> bool:
        """Leave out what metrics, say, count behind the blocks: here nobody reads it."""
        return super()._drop(written) or self.segment == len(self.chain)

    def _begin_stage(self, stage: int) -> None:
        if self._cheap and stage != self._stores.turn:
            self._cheap.end_stage()
        self._stores.turn = stage

    @override
    def _run_block(self, index: int, args: Any, kwargs: Any) -> Any:
        if self._recompute != "full" or index in self._part.record.opened:
            return self.chain.plain_call(index)(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._again_in_block() if self._is_backward else nullcontext():
                return self.chain.plain_call(index)(*args, **kwargs)

        return run_checkpointed(self.chain.blocks[index], run, args, kwargs)

    @contextmanager
    def _again_in_block(self) -> Iterator[None]:
        self._is_in_block, self._num_in_block = True, 0
        try:
            yield
        finally:
            self._is_in_block = False

    def run_backward(self, loss: Tensor) -> None:
        """Run the B of all stages."""
        for found, store in zip(self.found, self._stores.stores, strict=True):
            found.measure_forward(store)
        self._is_backward = True
        with BackwardOn(self._part.device), deferring(self._queue):
            torch.autograd.backward(loss)
        self._come_back_to(-1)

    def let_go(self) -> None:
        """Take the hooks away: autograd holds them where Python does not see a circle."""
        for hook in self._hooks:
            hook.remove()

    def _come_back_to(self, stage: int, *gradient: Tensor) -> None:
        """Measure the stages whose B is over; autograd has run all that came after this one."""
        while self._is_backward and self._stores.turn > stage:  # else it is the step's own
            turn = self._stores.turn
            self.found[turn].measure_backward(self._queue, self._stores.stores[turn])
            if not turn:
                return
            self._stores.turn -= 1
