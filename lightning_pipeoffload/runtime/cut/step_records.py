"""The records of a module's steps, traced once for each kind of step and shape of microbatch.

The first step of each kind is traced twice from the same state. It is refused if a value between
the blocks differs, or if the second run writes to a Python module or class, because stages would
compute with different values.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime import BlockOutput, has_drawn_outside_torch, mix_seed, seed_all
from lightning_pipeoffload.runtime.batch import batch_leaves, shape_signature
from lightning_pipeoffload.runtime.cut.batch_flags import BatchFlags
from lightning_pipeoffload.runtime.cut.block_chain import BlockChain, StageExit
from lightning_pipeoffload.runtime.cut.block_classes import (
    find_skippable_blocks,
    outputs_without_side_effects,
)
from lightning_pipeoffload.runtime.cut.call_checks import CallsError, OrderError, RepeatedCallError
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.cut.derived_records import RecordFamily, split_lengths
from lightning_pipeoffload.runtime.cut.record import RecordedCall, StepRecord
from lightning_pipeoffload.runtime.cut.sequence_dims import find_dims
from lightning_pipeoffload.runtime.cut.trace import (
    AssumedValueError,
    LongContainerWriteError,
    StepTrace,
)
from lightning_pipeoffload.runtime.cut.trial_cuts import TrialCuts
from lightning_pipeoffload.runtime.shapes import (
    EVERYTHING,
    NO_ALARM,
    AssumedValues,
    KernelFoundError,
    KernelsOnZeros,
    ValueNeededError,
)
from lightning_pipeoffload.runtime.users_code import (
    TRACE,
    Attribute,
    RandomGenerators,
    UsersStep,
    copy_batch,
    fingerprint_batch,
    in_brackets,
    is_unchanged,
    record_globals,
    refuse_written_globals,
)

_MOST_RECORDS = 64
# Of values that are read in blocks and after them, where most ask whether something is wrong.
_FLAGS = (EVERYTHING, NO_ALARM), (NO_ALARM, NO_ALARM), (EVERYTHING, EVERYTHING)
_CLOSE = 1e-4  # sums on an accelerator may differ by their order

_NUM_DRAWS = 4
_DRAWN = (
    "; which blocks it calls is drawn at random (LayerDrop), and a stage needs each in every step: "
    "set layerdrop=0, or call each block and choose, x = torch.where(keeps, block(x), x)"
)

_Log = list[RecordedCall]
_Flags = tuple[AssumedValues, AssumedValues]


class StepRecords:
    """The latest records of one module's steps.

    Attributes:
        by_key: Records by kind of step, mode of the module and shapes, and by booleans and sizes
            that depend on the values of the microbatch.
        generators: The random generators that modules hold.
        kernels: The Functions and modules that the steps run on zeros.
        always_trained: Names of the parameters with a gradient in all training steps so far.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        device: torch.device,
        before_trace: Callable[[], None] = lambda: None,
        derives: bool = True,
    ) -> None:
        self._module, self._chain = module, chain
        self.kernels = KernelsOnZeros()
        self._traced = module, chain, device, self.kernels
        self._num_stages = 1
        self._before_trace = before_trace
        self._compared: set[Any] = set()
        self._written_long: set[Attribute] = set()
        self.generators = RandomGenerators(module)
        self._orders: dict[Any, CallOrder] = {}  # of kinds of steps that call blocks again
        self._sized_in: dict[Any, tuple[int, CallOrder]] = {}
        self._flags: dict[Any, dict[tuple[bool, ...], BatchFlags]] = {}  # by shapes and answers
        self.by_key: OrderedDict[Any, StepRecord] = OrderedDict()
        # Whose shapes have run since the module was cut, and keys of such that were dropped.
        self._running: WeakSet[StepRecord] = WeakSet()
        self._ran: set[Any] = set()
        self._of_slices: WeakKeyDictionary[StepRecord, list[StepRecord]] = WeakKeyDictionary()
        self._derives = derives
        self._families: dict[Any, dict[tuple[bool, ...], RecordFamily]] = {}
        self._confirmed: set[Any] = set()  # shapes and answers of derived records that a run gave
        self._underivable: set[Any] = set()  # shapes of which a derived record did not hold
        self._first_of_training: StepRecord | None = None
        self.always_trained: set[str] = set()

    def prepare_new_cut(self, num_stages: int) -> None:
        """Prepare for a new cut into ``num_stages`` stages: no record is assigned to these yet."""
        if (num_stages > 1) != (self._num_stages > 1):  # sizes count between stages only
            self.forget()
        self._num_stages = num_stages
        self._ran.clear()
        self._running.clear()

    def find_or_trace(self, kind: str, part: Any, step: UsersStep, seed: int = 0) -> StepRecord:
        """Return the record of a step for a microbatch; trace the step if there is none.

        Raises:
            ValueError: The step cannot be cut at its blocks, with the reason and the line; a
                CallsError where it might be cut at other blocks.
        """
        shapes = kind, self._module.training, *split_lengths(shape_signature(part))
        key = shapes, self._find_flag_values(shapes, part)
        if key not in self._sized_in:
            earlier = self._find_known(key, ()) or self._derive_from_family(
                shapes, part, step, seed
            )
            if earlier is not None:
                return earlier
        self._before_trace()
        trial = self._make_trial(part, step, seed)
        sizes = self._trace_sizes(key, trial)
        earlier = self._find_known(key, sizes)
        if earlier is not None:
            return earlier
        # A length that the step treats differently tells nothing about others.
        is_apart = shapes in self._underivable
        record = self._trace(shapes[:2], trial)
        key = shapes, record.flags.flag_values
        if self._num_stages > 1 and record.sizes.until is not None and key not in self._sized_in:
            self._sized_in[key] = record.sizes.until, record.calls
            sizes = record.sizes.values
        record.writes.changes_batch = trial.changes_batch
        record.draws.outside_torch = trial.draws_outside_torch
        self._cache_record(key, sizes, record)
        self._compared.add(shapes[:2])
        if self._derives and not is_apart:
            families = self._families.setdefault(shapes[:-1], {})
            families.setdefault(record.flags.flag_values, RecordFamily()).add(shapes[-1], record)
        if torch.is_grad_enabled():
            self._update_always_trained(record)
        return record

    def _find_known(self, key: Any, sizes: tuple[Any, ...]) -> StepRecord | None:
        record = self.by_key.get((key, sizes))
        if record is not None:
            self.by_key.move_to_end((key, sizes))
        return record

    def _derive_from_family(
        self, shapes: Any, part: Any, step: UsersStep, seed: int
    ) -> StepRecord | None:
        """Derive the record of a microbatch of new lengths, where no size depends on its values."""
        families = {} if shapes in self._underivable else self._families.get(shapes[:-1], {})
        for flag_values, family in families.items():
            record = family.derive(shapes[-1])
            if record is None or not record.flags.matches_batch(_tensors_of(part)):
                continue
            key = shapes, flag_values
            if key in self._confirmed or self._matches_trace(record, part, step, seed):
                self._confirmed.add(key)
                self._cache_record(key, (), record)
                return record
            self._underivable.add(shapes)
        return None

    def _matches_trace(self, record: StepRecord, part: Any, step: UsersStep, seed: int) -> bool:
        """Whether the code between the blocks makes the operations that a derived record has."""
        self._before_trace()
        trace = StepTrace(*self._traced, observes=False, calls=record.calls)
        trace.outputs = outputs_without_side_effects(record)
        # An error here occurs again in the whole trace, which explains it.
        with suppress(ValueNeededError, Exception), trace.tracing():
            self._make_trial(part, step, seed)()
        return trace.record.work.between == record.work.between

    def _cache_record(self, key: Any, sizes: Any, record: StepRecord) -> None:
        record.freeze()
        shapes, flag_values = key
        self._flags.setdefault(shapes, {})[flag_values] = record.flags
        if any(_is_within((key, sizes), other) for other in self._keys_that_ran()):
            self.mark_as_run(record)
        self.by_key[key, sizes] = record
        if len(self.by_key) > _MOST_RECORDS:
            self._drop_oldest()

    def _keys_that_ran(self) -> Iterator[Any]:
        yield from self._ran
        yield from (key for key, record in self.by_key.items() if record in self._running)

    def _drop_oldest(self) -> None:
        key, record = self.by_key.popitem(last=False)
        (shapes, flag_values), _ = key
        self._flags[shapes].pop(flag_values, None)
        has_run = record in self._running
        if has_run and not any(_is_within(key, other) for other in self._keys_that_ran()):
            self._ran.add(key)

    def mark_as_run(self, record: StepRecord) -> None:
        """Record that a batch with microbatches of this record is cut to run."""
        self._running.add(record)

    def has_run(self, record: StepRecord) -> bool:
        """Return whether microbatches of a record's shapes have run since the module was cut."""
        return record in self._running

    def slice_records(self, record: StepRecord, num_slices: int) -> list[StepRecord]:
        """Return a record for each of so many slices of the sequence; none for one."""
        if num_slices == 1:
            return []
        of_slices = self._of_slices.get(record, [])
        if len(of_slices) != num_slices:
            of_slices = self._of_slices[record] = record.slice_records(num_slices)
        return of_slices

    def add_sequence_dims(
        self, record: StepRecord, part: Any, step: UsersStep, seed: int
    ) -> StepRecord:
        """Replace a record by one with the sequence dimensions of blocks' arguments and outputs.

        Raises:
            ValueError: There is none, or it is not found everywhere.
        """

        def trace(some: Any) -> StepRecord:
            trial = self._make_trial(some, step, seed)
            trace = StepTrace(*self._traced, compared=self._written_long)
            trial.trace = trace
            return trace.trace(trial)

        traced = trace(part) if record.is_derived else record
        complete = replace(record, sequence=find_dims(self._chain, traced, part, trace))
        key = next(key for key, each in self.by_key.items() if each is record)
        self.by_key[key] = complete
        if self.has_run(record):
            self.mark_as_run(complete)
        for families in self._families.values():
            for family in families.values():
                family.replace_base_record(record, complete)
        return complete

    def describe_other_blocks(self, part: Any, step: UsersStep, seed: int) -> str:
        """Return the end of an error that names other blocks at which a step could be cut."""
        if not torch.is_grad_enabled():  # an evaluation runs as a whole then
            return ""
        if self._calls_blocks_at_random(part, step, seed):
            return _DRAWN
        trial = self._make_trial(part, step, seed)
        proposal = self._trial_cuts(trial).describe_other_blocks(self._chain, self._num_stages)
        return f"; it could be cut with {proposal}" if proposal else ""

    def _calls_blocks_at_random(self, part: Any, step: UsersStep, seed: int) -> bool:
        """Return whether which blocks a step calls depends on random numbers."""
        self._chain.release()
        try:
            trials = (self._make_trial(part, step, mix_seed(seed, n)) for n in range(_NUM_DRAWS))
            orders = {self._trial_cuts(each).find_call_order(self._chain).blocks for each in trials}
        finally:
            self._chain.intercept()
        return len(orders) > 1

    def find_chains(self, part: Any, step: UsersStep, seed: int) -> list[list[str]]:
        """Return chains of blocks at which a step could be cut, by its calls; the best first."""
        self._before_trace()
        return self._trial_cuts(self._make_trial(part, step, seed)).ranked_chains()

    def _make_trial(self, part: Any, step: UsersStep, seed: int) -> _Trial:
        return _Trial(step, part, mix_seed(seed, 0), self.generators)

    def _trial_cuts(self, trial: _Trial) -> TrialCuts:
        module, _, device, kernels = self._traced
        return TrialCuts(module, device, kernels, trial)

    def _find_flag_values(self, shapes: Any, part: Any) -> tuple[bool, ...] | None:
        """Return the booleans that the step reads from a microbatch; None if they are new."""
        leaves = None
        for flag_values, flags in self._flags.get(shapes, {}).items():
            if flags.calls and leaves is None:
                leaves = _tensors_of(part)
            if not flags.calls or flags.matches_batch(leaves or ()):
                return flag_values
        return None

    def _trace_sizes(self, key: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        if key not in self._sized_in:
            return ()
        until, calls = self._sized_in[key]
        beginning = StepTrace(*self._traced, until=until, calls=calls)
        # An error here occurs again in the whole trace, which explains it.
        with beginning.tracing(), suppress(StageExit, ValueNeededError, Exception):
            call()
        return beginning.sizes_before(until)

    def _update_always_trained(self, record: StepRecord) -> None:
        trained = record.trained or set()
        if self._first_of_training is None:
            self._first_of_training = record
            self.always_trained = set(trained)
        else:
            self.always_trained &= trained

    def is_always_trained(self, names: Set[str]) -> bool:
        """Return whether the parameter with these names gets a gradient in every training step."""
        return not self.always_trained.isdisjoint(names)

    def _trace(self, kind: Any, call: _Trial) -> StepRecord:
        is_first = kind not in self._compared
        if kind in self._orders:
            with suppress(CallsError):  # the step calls its blocks in another order now
                return self._trace_in_order(call, is_first, self._orders[kind])
        try:
            return self._trace_in_order(call, is_first, CallOrder.each_block_once(len(self._chain)))
        except OrderError as error:
            unexpected = error
        calls = self._trial_cuts(call).find_call_order(self._chain)
        if calls.is_sequential or not calls.can_be_cut:
            raise unexpected
        try:
            record = self._trace_in_order(call, is_first, calls)
        except CallsError as error:
            raise error if isinstance(unexpected, RepeatedCallError) else unexpected from None
        del unexpected  # its frames hold the batch, and this one it
        self._orders[kind] = calls
        return record

    def _trace_in_order(self, call: _Trial, is_first: bool, calls: CallOrder) -> StepRecord:
        """Trace with made-up flags True in blocks and False after them.

        If that fails, as an alarm would, trace with the flags of blocks False, then with all True.
        """
        error: AssumedValueError | None = None
        for assumed in _FLAGS:
            log: _Log | None = [] if is_first else None
            try:
                record = self._trace_with_retries(call, log, assumed, calls)
            except AssumedValueError as failed:
                error = error or failed
                continue
            if log is not None:
                outputs = find_skippable_blocks(self._chain, record)
                repeat = partial(self._log_rerun, call, assumed, calls, outputs)
                record = replace(record, unrepeatable=self._find_unrepeatable_call(log, repeat))
            error = None  # its frames hold the batch, and this one it
            return record
        assert error is not None
        raise self._make_user_error(error) from None

    def _trace_with_retries(
        self, call: _Trial, log: _Log | None, assumed: _Flags, calls: CallOrder
    ) -> StepRecord:
        compared = self._written_long
        trace = StepTrace(*self._traced, log, assumed, compared=compared, calls=calls)
        call.trace = trace
        try:
            return trace.trace(call)
        except LongContainerWriteError as error:
            self._written_long |= error.written
        except KernelFoundError:
            pass
        if log is not None:
            log.clear()
        return self._trace_with_retries(call, log, assumed, calls)

    def _find_unrepeatable_call(self, log: _Log, repeat: Callable[[], _Log]) -> RecordedCall | None:
        """Return the first value that differs in another run."""
        before = record_globals(self._module)
        again = repeat()
        refuse_written_globals(before, record_globals(self._module))
        # A call that only the first run makes fills a cache.
        return _first_difference(again, repeat()) if _first_difference(log, again) else None

    def _log_rerun(
        self,
        call: Callable[[], Any],
        assumed: _Flags,
        calls: CallOrder,
        outputs: Mapping[int, BlockOutput],
    ) -> _Log:
        """Return the calls between the blocks in another run, in which alike blocks run once."""
        log: _Log = []
        trace = StepTrace(*self._traced, log, assumed, observes=False, calls=calls)
        trace.outputs = outputs
        with trace.tracing():
            try:
                call()
            except ValueNeededError:
                pass  # as in the first run
            except Exception:
                if not (trace.record.assumed or trace.num_assumed):
                    raise
        return log

    def _make_user_error(self, error: AssumedValueError) -> Exception:
        if not error.is_in_block:
            return error.cause
        block, line = list(error.record.assumed.items())[-1]
        return ValueError(
            f"{self._chain.block_name(block)} reads values{in_brackets(line)} that only its own "
            f"stage has; it is traced as if every search found everything, and fails then "
            f"({type(error.cause).__name__}: {error.cause}); let the block accept any number of "
            f"rows, or compute these values from the batch"
        )

    def forget(self) -> None:
        """Drop all records, after a change of ``requires_grad``, for example."""
        self.by_key.clear()
        self._ran.clear()
        self._flags.clear()
        self._families.clear()
        self._confirmed.clear()
        self._underivable.clear()
        self._first_of_training = None

    @property
    def device_reads(self) -> dict[str, str]:
        """The lines of all steps that read values of the device, each with where that is."""
        records = reversed(self.by_key.values())
        return {line: part for record in records for line, part in record.reads.lines.items()}

    def weight_flops(self, segments: Iterable[int]) -> int:
        """Return the floating-point operations of W in ``segments``, for the first microbatch."""
        first = self._first_of_training
        return 0 if first is None else sum(first.work.weight_flops[s] for s in segments)


def _is_within(key: Any, other: Any) -> bool:
    """Whether keys agree and no length of the first exceeds that of the other."""
    ((*kind, lengths), flag_values), sizes = key
    ((*other_kind, limits), other_answers), other_sizes = other
    agree = (kind, flag_values, sizes) == (other_kind, other_answers, other_sizes)
    return agree and all(map(int.__le__, lengths, limits))


def _first_difference(before: Sequence[RecordedCall], after: _Log) -> RecordedCall | None:
    """Return the first call that differs between two runs; None if all are the same."""
    for old, new in zip(before, after, strict=False):
        is_same = old.name == new.name and old.arguments == new.arguments
        if not (is_same and _are_close(old.results, new.results)):
            return new
    return None


def _are_close(old: Sequence[float], new: Sequence[float]) -> bool:
    return len(old) == len(new) and all(
        a == b or math.isclose(a, b, rel_tol=_CLOSE) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(old, new, strict=True)
    )


class _Trial:
    """Calls a step on a copy of a microbatch, with the seed of the real call.

    Sizes may depend on random numbers.
    """

    def __init__(self, step: UsersStep, part: Any, seed: int, generators: RandomGenerators) -> None:
        self._step, self._part = step, part
        self._seed = seed
        self._generators = generators
        self.draws_outside_torch = False
        self.changes_batch = False
        self.trace: StepTrace | None = None  # that follows the batch

    def __call__(self) -> Any:
        copied = copy_batch(self._part)
        if self.trace is not None:
            self.trace.start(_tensors_of(copied))
            self.trace = None
        before = fingerprint_batch(copied)
        seed_all(self._seed)
        self._generators.seed(self._seed)
        try:
            return self._step(copied, TRACE)
        finally:
            self._generators.find()  # the step may have made one
            self.draws_outside_torch |= has_drawn_outside_torch(self._seed)
            self.changes_batch |= not is_unchanged(before, fingerprint_batch(copied))


def _tensors_of(part: Any) -> list[Tensor]:
    return [leaf for leaf in batch_leaves(part) if isinstance(leaf, Tensor)]
