"""The trace: one run of the user's step without values for each kind of step and shape.

It takes no memory and no arithmetic, and tells, for microbatches of these shapes, what each block
hands on, which part of the step uses which parameter, and the operations of each part.

The step is cut at its blocks into **segments**: segment k is what runs after block k-1 up to and
including block k; the last segment is what follows the last block. Segment 0 so holds the
embedding, the last one the head and the loss. With three blocks on two stages::

    step      embedding, block 0 | mask, block 1 | mask, block 2 | head, loss
    segment           0          |       1       |       2       |     3
    stage     [ 0: its rank leaves the step here ] [ 1: comes to the end      ]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain, StageExit
from lightning_pipeoffload.runtime.cut.record import (
    ImaginedError,
    StepRecord,
    ValueLog,
    first_difference,
)
from lightning_pipeoffload.runtime.cut.step_pass import StepPass
from lightning_pipeoffload.runtime.microbatch import shape_signature
from lightning_pipeoffload.runtime.randomness import (
    has_drawn_since,
    mix_seed,
    seed_all,
)
from lightning_pipeoffload.runtime.shapes.step_rules import (
    EVERYTHING,
    NO_ALARM,
    Imagined,
    ValueNeededError,
)
from lightning_pipeoffload.runtime.users_code.attributes import look_beside, refuse_written
from lightning_pipeoffload.runtime.users_code.snapshot import is_same_look
from lightning_pipeoffload.runtime.users_code.sources import Generators
from lightning_pipeoffload.runtime.users_code.step_call import (
    PROBE,
    UsersStep,
    copy_part,
    look_at_part,
)
from lightning_pipeoffload.runtime.users_code.users_lines import in_brackets, users_line


def trace_step(
    module: nn.Module,
    chain: BlockChain,
    run: Callable[[], Any],
    device: torch.device,
    log: ValueLog | None = None,
    way: Imagined = EVERYTHING,
) -> StepRecord:
    """Run the user's step once without values.

    Args:
        module: The user's module; it is left as it was.
        chain: Its blocks.
        run: Calls the step on one microbatch.
        device: The device of that microbatch. The module seems to be on it, wherever it is.
        log: What keeps the values that the step has nevertheless.
        way: How to make up the values that blocks ask for.

    Raises:
        ValueError: The step cannot be cut at its blocks; says what it does and where.
        ImaginedError: Something went wrong with values that are made up.
    """
    probing = StepPass(module, chain, device, log, way)
    result = probing.result
    with probing.telling_of_imagination():
        with probing.looking():
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
    result.is_certain = not probing.num_imagined
    return result


def _explain(error: ValueNeededError, chain: BlockChain, segment: int) -> str:
    return (
        f"the step cannot be cut into stages, for only one of them has what it needs before "
        f"{chain.block_name(segment)}: {error}{in_brackets(users_line(error))}; move it behind "
        f"{chain.block_name(len(chain) - 1)}, where the last stage has all values, or compute it "
        f"from the batch"
    )


_MOST_PROBES = 64


class StepRecords:
    """The probes of one module's steps, of which the last few are kept.

    Attributes:
        known: Probes by kind of step, mode of the module and shapes, and by sizes that depend on
            the values of the microbatch.
        generators: The generators that the modules hold.
        always_trained: Names of the parameters that get a gradient in each training step that was
            looked at.
    """

    def __init__(
        self,
        module: nn.Module,
        chain: BlockChain,
        device: torch.device,
        is_cut: bool,
        before_trace: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._chain, self._device = module, chain, device
        self._is_cut = is_cut
        self._before_trace = before_trace
        self._compared: set[Any] = set()
        self.generators = Generators(module)
        self._sized_in: dict[Any, int] = {}
        self.known: OrderedDict[Any, StepRecord] = OrderedDict()
        self._first_of_training: StepRecord | None = None
        self.always_trained: set[str] = set()

    def find(self, kind: str, part: Any, step: UsersStep, seed: int = 0) -> StepRecord:
        """Return what a step does with a microbatch."""
        key = kind, self._module.training, shape_signature(part)
        if key in self._sized_in or (key, ()) not in self.known:
            self._before_trace()
        trial = _Trial(step, part, mix_seed(seed, 0), self.generators)
        sizes = self._find_sizes(key, trial)
        if (key, sizes) in self.known:
            self.known.move_to_end((key, sizes))
            return self.known[key, sizes]
        record = self._probe(trial, is_first=key[:2] not in self._compared)
        if self._is_cut and record.sized_in is not None and key not in self._sized_in:
            self._sized_in[key] = record.sized_in
            sizes = record.sizes
        self.known[key, sizes] = record
        record.changes_batch = trial.changes_batch
        record.draws_beside_torch = trial.draws_beside_torch
        self._compared.add(key[:2])
        if len(self.known) > _MOST_PROBES:
            self.known.popitem(last=False)
        if torch.is_grad_enabled():
            self._note_training(record)
        return record

    def _find_sizes(self, key: Any, call: Callable[[], Any]) -> tuple[Any, ...]:
        if key not in self._sized_in:
            return ()
        beginning = StepPass(self._module, self._chain, self._device)
        beginning.until = self._sized_in[key]
        # What goes wrong goes wrong in the whole run with these sizes too, which explains it.
        with beginning.looking(), suppress(StageExit, ValueNeededError, Exception):
            call()
        return beginning.sizes_before(self._sized_in[key])

    def _note_training(self, record: StepRecord) -> None:
        trained = record.trained or set()
        if self._first_of_training is None:
            self._first_of_training = record
            self.always_trained = set(trained)
        else:
            self.always_trained &= trained

    def always_train(self, names: Set[str]) -> bool:
        """Whether every training step gives a parameter of these names a gradient."""
        return not self.always_trained.isdisjoint(names)

    def _probe(self, call: Callable[[], Any], is_first: bool) -> StepRecord:
        """Run a step as if every flag were up; where that fails, as an alarm does, with none."""
        error: ImaginedError | None = None
        for way in (EVERYTHING, NO_ALARM):
            log = ValueLog() if is_first else None
            try:
                record = trace_step(self._module, self._chain, call, self._device, log, way)
            except ImaginedError as failed:
                error = error or failed
                continue
            if log is not None:
                self._compare_runs(record, log, partial(self._repeat, call, way))
            return record
        assert error is not None
        raise self._explain(error) from None

    def _compare_runs(
        self, record: StepRecord, log: ValueLog, repeat: Callable[[], ValueLog]
    ) -> None:
        """Run the step again from the same state: its values and nothing else tell of others."""
        beside = look_beside(self._module)
        again = repeat()
        refuse_written(beside, look_beside(self._module))
        if first_difference(log, again):
            # What only the first run makes is a cache.
            record.unrepeatable = first_difference(again, repeat())

    def _explain(self, error: ImaginedError) -> Exception:
        if not error.is_in_block:
            return error.cause
        block, line = list(error.found.imagined.items())[-1]
        return ValueError(
            f"{self._chain.block_name(block)} asks for values{in_brackets(line)} that only the "
            f"stage has that runs it; its shapes are found as if every search found everything, "
            f"and then it fails ({type(error.cause).__name__}: {error.cause}); let the block take "
            f"any number of rows, or compute what it asks for from the batch"
        )

    def _repeat(self, call: Callable[[], Any], way: Imagined) -> ValueLog:
        log = ValueLog()
        repeated = StepPass(self._module, self._chain, self._device, log, way, looks=False)
        with repeated.looking():
            try:
                call()
            except ValueNeededError:
                pass  # as in the first run
            except Exception:
                if not (repeated.result.imagined or repeated.num_imagined):
                    raise
        return log

    def forget(self) -> None:
        """Look anew: what blocks hand on may need a gradient now, or none."""
        self.known.clear()
        self._first_of_training = None

    def weight_flops(self, segments: Iterable[int]) -> int:
        """Return the operations of the weight gradients of the first training microbatch."""
        record = self._first_of_training
        return (
            sum(record.weight_flops[segment] for segment in segments) if record is not None else 0
        )


class _Trial:
    """Calls a step on a copy of a microbatch, so that it draws before its blocks what it will.

    Sizes may depend on that.
    """

    def __init__(self, step: UsersStep, part: Any, seed: int, generators: Generators) -> None:
        self._step, self._part = step, part
        self._seed = seed
        self._generators = generators
        self.draws_beside_torch = False
        self.changes_batch = False

    def __call__(self) -> Any:
        copied = copy_part(self._part)
        before = look_at_part(copied)
        seed_all(self._seed)
        self._generators.seed(self._seed)
        try:
            return self._step(copied, PROBE)
        finally:
            self._generators.find()  # the step may have made one
            self.draws_beside_torch |= has_drawn_since(self._seed)
            self.changes_batch |= not is_same_look(before, look_at_part(copied))
