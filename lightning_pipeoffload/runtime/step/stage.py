"""F, B and W of one stage; see :mod:`.in_flight` for the life of a microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime import (
    NOTHING,
    ReceivedGradients,
    TensorSpec,
    combine_contexts,
    gradients_to_send,
)
from lightning_pipeoffload.runtime.batch import weighted
from lightning_pipeoffload.runtime.cut import SKIP_A_BATCH, StageRecord, StepRecord, loss_in
from lightning_pipeoffload.runtime.memory import ActivationStore, CheapRecompute, SavedMemory
from lightning_pipeoffload.runtime.sequence import EarlierSlices
from lightning_pipeoffload.runtime.step.checkpoint_replay import CheckpointChecker, is_repeatable
from lightning_pipeoffload.runtime.step.in_flight import InFlight
from lightning_pipeoffload.runtime.step.microbatch import Microbatch
from lightning_pipeoffload.runtime.step.read_cache import ReadCachePass
from lightning_pipeoffload.runtime.step.sliced_pass import SlicedPass
from lightning_pipeoffload.runtime.step.stage_pass import StageContext, StagePass
from lightning_pipeoffload.runtime.step.step_writes import reraise_as_late_write
from lightning_pipeoffload.runtime.users_code import TensorSnapshot
from lightning_pipeoffload.runtime.weight_grad import (
    GradientListener,
    RegroupedWeightGrads,
    WeightGradQueue,
    has_hooks,
)

_NUM_CHECKED = 8  # backwards of a stage


class StageRunner:
    """Runs F, B and W of one stage.

    Attributes:
        in_flight: The microbatches from their F to their W, by their index.
        memories: The measured memory of a microbatch's slices, by their place (0: not sliced).
    """

    def __init__(self, context: StageContext) -> None:
        self._compared: set[int] = set()
        self._num_checked = 0
        self._context = context
        self._gradients: AbstractContextManager[Any] = context.gradients or NOTHING
        self.is_first = context.is_first
        self.is_last = context.is_last
        self._measures_all = False
        self.memories = defaultdict[int, SavedMemory](lambda: SavedMemory(self._measures_all))
        self.in_flight: dict[int, InFlight] = {}
        self._records: WeakKeyDictionary[StepRecord, StageRecord] = WeakKeyDictionary()
        self._last = -1
        self._present: tuple[Any, TensorSnapshot] | None = None

    def owned_tensors(self) -> Iterable[Tensor]:
        """Return the parameters and buffers that the rank owns."""
        return self._context.tensors.local_tensors().values()

    def clear_measurements(self) -> None:
        """Forget the measured memory: other parameters are trained from the next step on."""
        self.memories.clear()

    def set_measure_all(self, measures_all: bool) -> None:
        """Set whether to measure all microbatches of the next step, or only unmeasured slices."""
        self._measures_all = measures_all
        for memory in self.memories.values():
            memory.set_measure_all(measures_all)

    @cached_property
    def _sender(self) -> str:
        start = self._context.stage.blocks.start
        return "" if self.is_first else self._context.chain.block_name(start - 1)

    @property
    def _last_block_name(self) -> str:
        return self._context.chain.block_name(self._context.stage.blocks.stop - 1)

    def record_of(self, microbatch: Microbatch) -> StageRecord:
        """Return the part of a microbatch's record that concerns the stage."""
        record = self._records.get(microbatch.record)
        if record is None:
            record = StageRecord(microbatch.record, self._context.stage.blocks, self.is_last)
            self._records[microbatch.record] = record
        return record

    def forward(
        self,
        microbatch: Microbatch,
        receive: Callable[[], list[Tensor]],
        keep: bool,
        store: ActivationStore | None = None,
    ) -> Any:
        """Run F.

        Args:
            microbatch: The microbatch to run.
            receive: Waits for the tensors of the previous stage; the first stage does not call it.
            keep: Whether a backward follows.
            store: Stores the tensors that autograd saves; None: autograd keeps them.

        Returns:
            The tensors for the next stage; on the last stage the result of the user's step.
        """
        context = self._context
        record = self.record_of(microbatch)
        at_once = context.head_is_at_once and context.is_last
        queue = WeightGradQueue(False, store, context.add_product, at_once)
        received = ReceivedGradients(record.specs_in) if keep else None
        part = microbatch.record.sequence_slice
        place = 0 if part is None else part.index
        flight = InFlight(microbatch, record, queue, received, store, place)
        # Then the later stages of this rank would read the same values again.
        reuses_reads = microbatch.record.reads.common and len(context.tensors.local_stages) > 1
        if part is None:
            step = (ReadCachePass if reuses_reads else StagePass)(context, flight, receive)
        else:
            flight.earlier = self._earlier_of(flight)
            step = SlicedPass(context, flight, receive)
        if context.writes.may_write_tensors:
            queue.start_recording_operands()
            self._snapshot_seen_values()
        if not keep:
            with context.forward_context():
                output = step.run()
        else:
            self._last = microbatch.index
            self.in_flight[self._last] = flight
            with self._around_forward(flight, step):
                output = step.run()
            flight.written = step.written
            if store is not None:
                kept = (
                    None
                    if flight.earlier is None
                    else flight.earlier.bytes_kept_by_slice(flight.slice)
                )
                self.memories[flight.place].measure_forward_if_due(store, kept)
        if self.is_last:
            if not keep or not microbatch.has_result:
                return output
            flight.loss = loss_in(output)
            return output.detach() if isinstance(output, Tensor) else tree_map(_detach, output)
        return self._outputs_to_send(flight, output)

    def _earlier_of(self, flight: InFlight) -> EarlierSlices | None:
        if flight.slice.index == 0:
            return EarlierSlices()
        return self.in_flight[flight.microbatch.index - 1].earlier

    def _outputs_to_send(self, flight: InFlight, output: list[Tensor]) -> list[Tensor]:
        specs = flight.record.specs_out
        if len(output) != len(specs):
            self._refuse_message(output, flight)
        # Without gradients a view of a weight requires one all the same, which never comes.
        trains = torch.is_grad_enabled()
        detached, edges = [], []
        for leaf, spec in zip(output, specs, strict=True):
            if leaf.shape != spec.shape or leaf.dtype != spec.dtype:
                self._refuse_message(output, flight)
            if leaf.requires_grad != spec.requires_grad and trains:
                self._refuse_frozen()
            detached.append(spec.match_stride(leaf.detach()))
            if spec.gets_gradient and trains:
                # The edge, not the tensor: the output's memory may go as soon as it is sent.
                edges.append(get_gradient_edge(leaf))
        flight.sent = tuple(edges)
        return detached

    def backward(
        self, microbatch: Microbatch, gradients: list[Tensor], fused: bool = False
    ) -> list[Tensor]:
        """Run B, or BW if ``fused``.

        Args:
            microbatch: The microbatch to run.
            gradients: The gradients of the sent tensors that get one; empty on the last stage.
            fused: Whether to compute the weight gradients too.

        Returns:
            The gradients of the received tensors that get one.
        """
        flight = self.in_flight[microbatch.index]
        received = flight.received
        assert received is not None
        memory = self.memories[flight.place]
        flight.queue.configure_backward(fused, counts_flops=memory.deferred_flops is None)
        with self._around_backward(flight), flight.queue:
            self._differentiate(flight, gradients)
        flight.awaits_weight = True
        if flight.seen and not flight.queue.may_read(flight.seen.tensors):
            flight.seen = None
        to_send = gradients_to_send(received, self._sender)
        received.gradients, flight.sent, flight.loss = (), (), None
        if flight.store is not None or memory.deferred_flops is None:
            memory.measure_backward_if_due(flight.queue, flight.store)
        return to_send

    def _differentiate(self, flight: InFlight, gradients: list[Tensor]) -> None:
        roots = flight.sent
        if flight.earlier is not None:
            edges, of_later = flight.earlier.pop_edges_and_gradients(flight.slice)
            roots, gradients = (*roots, *edges), [*gradients, *of_later]
        try:
            if roots:
                # Private: what torch.autograd.backward() calls once it has compared the shapes,
                # which the received gradients have by their specs. In a small block's B that
                # comparison takes as long as the engine.
                _engine_run_backward(
                    roots, tuple(gradients), False, False, (),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
            elif flight.loss is not None:
                if not flight.loss.requires_grad:
                    _refuse_constant_loss()
                microbatch = flight.microbatch
                microbatch.differentiate(weighted(flight.loss, microbatch.weight))
        except RuntimeError as error:
            reraise_as_late_write(error, self._context.tensors)
            raise

    def backward_weight(self, microbatch: Microbatch) -> None:
        """Run W."""
        flight = self.in_flight[microbatch.index]
        with self._around_backward(flight):
            flight.queue.run()

    def run_regrouped_weights(
        self, microbatches: Sequence[Microbatch], final: GradientListener
    ) -> None:
        """Run the last W's of a step, grouped by parameter, so that gradients become final early.

        Args:
            microbatches: The microbatches whose W is due.
            final: Its ``mark_gradients_final`` gets the stage's parameters; its
                ``mark_parameter_final`` gets each parameter once its gradient is final.
        """
        flights = [self.in_flight[microbatch.index] for microbatch in microbatches]
        if any(flight.seen for flight in flights):  # each W needs the values of its own F
            parameters = RegroupedWeightGrads(each.queue.pending for each in flights).parameters
            final.mark_gradients_final(self._context.stage.index, parameters)
            for microbatch in microbatches:
                self.backward_weight(microbatch)
            for parameter in parameters:
                final.mark_parameter_final(parameter)
            return
        gradients = RegroupedWeightGrads(flight.queue.pop_all() for flight in flights)
        final.mark_gradients_final(self._context.stage.index, gradients.parameters)
        with backward_mode(microbatches[0].device), self._gradients, self._checking_first_hooks():
            gradients.run(final.mark_parameter_final)

    def drop_microbatch(self, microbatch: Microbatch) -> None:
        """Drop the state of a microbatch, whose weight gradients are computed."""
        del self.in_flight[microbatch.index]
        if not self.in_flight:
            self._present = None

    def _around_backward(self, flight: InFlight) -> AbstractContextManager[Any]:
        """Return the context of a B or W: gradients and attributes as they are for this stage."""
        outside = backward_mode(flight.microbatch.device)
        is_plain = self._gradients is NOTHING and not (flight.seen or flight.written)
        if is_plain and self._num_checked >= _NUM_CHECKED:
            return outside  # as in most models
        return combine_contexts(
            outside,
            self._gradients,
            flight.seen.restored(self._present_of(flight.seen.tensors)) if flight.seen else NOTHING,
            self._context.writes.hiding_later_writes(self._context.stage.index, flight.written),
            self._checking_first_hooks(),
        )

    def _checking_first_hooks(self) -> AbstractContextManager[Any]:
        """Refuse hooks that write their weight; checks the first backwards only."""
        self._num_checked += 1
        is_checked = self._num_checked <= _NUM_CHECKED and self._context.num_stages > 1
        return self._check_hooks() if is_checked else NOTHING

    @contextmanager
    def _check_hooks(self) -> Iterator[None]:
        local = self._context.tensors.local_tensors().items()
        hooked = [(n, p, p.detach().clone()) for n, p in local if _has_hooks(p)]
        yield
        for name, weight, before in hooked:
            if not torch.equal(weight.detach(), before):
                raise ValueError(
                    f"a hook on {name} writes the weight itself in the backward, between forwards "
                    f"of this step, which use the old value or the new one by the schedule; write "
                    f"it in the optimizer or in on_before_optimizer_step()"
                )

    def _snapshot_seen_values(self) -> None:
        tensors = self._context.written_tensors()
        if tensors:
            torch.clear_autocast_cache()
        last = self.in_flight.get(self._last)
        if not tensors or last is None:
            return
        if not last.awaits_weight or last.queue.may_read(tensors):
            last.seen = self._present_of(tensors)

    def _present_of(self, tensors: list[Tensor]) -> TensorSnapshot:
        """Return the present values of tensors; copied once for all B and W between two F's."""
        key = self._context.writes.num_forwards, [*map(id, tensors)]
        if self._present is None or self._present[0] != key:
            self._present = key, TensorSnapshot(tensors)
        return self._present[1]

    def _around_forward(self, flight: InFlight, step: StagePass) -> AbstractContextManager[Any]:
        """Return the context of an F that a backward follows."""
        microbatch, writes = flight.microbatch, self._context.writes
        is_first = microbatch.index not in self._compared
        self._compared.add(microbatch.index)
        compares = is_first and is_repeatable(microbatch.device)
        return combine_contexts(
            NOTHING if microbatch.record.backwards.are_any else flight.queue,
            flight.store.recording() if flight.store else NOTHING,
            _cheap_recompute() if self._context.recompute == "cheap" else NOTHING,
            CheckpointChecker(step, writes, compares, is_first).checking_recomputation()
            if is_first or writes.is_by_users
            else NOTHING,
            self._context.forward_context(),
            NOTHING if flight.microbatch.has_result else writes.undoing_writes(),
        )

    def abandon(self) -> None:
        """Drop the state of all microbatches, after an error."""
        self._drop_flights()
        self._context.gradients.forget()

    def discard_forwards(self) -> None:
        """Drop all forwards of this step, since they run again with other weights."""
        self._compared.difference_update(self.in_flight)
        self._drop_flights()

    def _drop_flights(self) -> None:
        for flight in self.in_flight.values():
            if flight.earlier is not None:
                flight.earlier.drop()
        self.in_flight.clear()

    def save_written_state(self) -> Callable[[], None]:
        """Save attributes and buffers that steps write; return a function that restores them."""
        return self._context.writes.keep()

    def _refuse_message(self, leaves: list[Tensor], flight: InFlight) -> NoReturn:
        raise RuntimeError(
            f"{self._last_block_name} returned {[*map(TensorSpec.of, leaves)]} where "
            f"{flight.record.specs_out} was expected from the shapes of the batch; what a block "
            f"returns must not depend on the values of its input"
            f"{flight.microbatch.record.derivation_note}"
        )

    def _refuse_frozen(self) -> NoReturn:
        raise RuntimeError(
            f"whether the output of {self._last_block_name} requires a gradient has changed "
            f"without the other ranks knowing; freeze or unfreeze parameters in hooks, alike on "
            f"all ranks, or before fit"
        )


@cache
def backward_mode(device: torch.device) -> _BackwardMode:
    """Return the context of B and W: autocast is off, and autograd runs in this thread.

    Autograd's own thread for an accelerator takes time to wake, and does not have this thread's
    autocast state: a checkpoint that ran in it would clear the casts that microbatches share.
    """
    return _BackwardMode(device)


class _BackwardMode:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        kind, self._outside = self._device.type, NOTHING
        if torch.is_autocast_enabled(kind):  # the casts that its cache has stay there
            self._outside = torch.autocast(kind, enabled=False)
            self._outside.__enter__()
        self._here = torch.autograd.set_multithreading_enabled(False)

    def __exit__(self, *error: Any) -> None:
        self._here.__exit__(*error)
        if self._outside is not NOTHING:
            self._outside.__exit__(*error)


@contextmanager
def _cheap_recompute() -> Iterator[None]:
    with CheapRecompute().saving():  # made here, for it reads the hooks that hold around it
        yield


def _has_hooks(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and has_hooks(tensor)


def _refuse_constant_loss() -> NoReturn:
    raise ValueError(
        f"the loss does not depend on any parameter that trains: it was detached, computed under "
        f"no_grad, or replaced by a constant where it was bad; return the loss itself, log "
        f"loss.detach(), {SKIP_A_BATCH}"
    )


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
