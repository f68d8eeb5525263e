"""The batches of an evaluation: in microbatches by the plan's forwards, or whole on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

from lightning_pipeoffload.loop.exchange import Exchange
from lightning_pipeoffload.loop.split import Split
from lightning_pipeoffload.loop.step_calls import StepInputs, StepOutput
from lightning_pipeoffload.runtime.batch import batch_size, shape_signature
from lightning_pipeoffload.runtime.shapes import substitute_values
from lightning_pipeoffload.runtime.step import (
    Microbatch,
    set_indices_and_weights,
    without_mha_fastpath,
)
from lightning_pipeoffload.runtime.users_code import GlobalWriteError, StepCall

log = logging.getLogger(__name__)

_WHOLE = "%s runs as a whole on every rank, each block of it on the rank that owns it: %s"


class Evaluation:
    """Runs the evaluation batches of one entry.

    Args:
        split: The module.
        exchange: Compares the batches with the other ranks'.
        record: Called with the microbatches of each batch, none where it runs whole unseen.
        send_written: Sends to all ranks the attributes that training steps wrote on some, for a
            step that runs whole on each.
    """

    def __init__(
        self,
        split: Split,
        exchange: Exchange,
        record: Callable[[Sequence[Microbatch]], None],
        send_written: Callable[[], None],
    ) -> None:
        self._split, self._group = split, split.group
        self._exchange, self._record, self._send_written = exchange, record, send_written
        self._runs_whole = split.runs_whole

    def run(self, inputs: StepInputs) -> StepOutput:
        """Run the forwards of a batch of any size, in no more microbatches than in training."""
        key = inputs.kind, shape_signature(inputs.batch)
        is_open = not self._runs_whole.get(key)
        microbatches = self._try_cut(inputs, key) if is_open else None
        self._record(microbatches or ())
        if microbatches is not None and not self._runs_whole[key]:
            return self._run_microbatches(inputs, microbatches)
        self._send_written()
        done, could_be_cut = self._run_whole(inputs, microbatches)
        if is_open and self._runs_whole[key]:
            stays_whole = microbatches is None or not could_be_cut
            self._runs_whole[key] = self._group.agree(stays_whole, unanimous=False)
        return done

    def _run_microbatches(self, inputs: StepInputs, microbatches: list[Microbatch]) -> StepOutput:
        split, training = self._split, self._split.plans.training
        training.prepare_for_batch(
            any(map(attrgetter("is_new"), microbatches)), split.pipeline.cut.costs
        )
        self._exchange.start_batch_checksum(inputs.batch, f"batch in {inputs.kind}")
        sizes, shares = split.sizes_and_shares(inputs, microbatches)
        results: list[Any] = []
        most = training.schedule.num_microbatches  # a batch may have more packed rows
        with without_mha_fastpath(split.pipeline.device):
            for start in range(0, len(microbatches), most):
                some = set_indices_and_weights(microbatches[start : start + most])
                results += split.executor.run(training.lower_for_evaluation(len(some)), some)
        self._exchange.end_batch()
        return StepOutput.of(results, sizes, shares)

    def _try_cut(self, inputs: StepInputs, key: Hashable) -> list[Microbatch] | None:
        """Cut a batch, and decide whether batches of its key run in microbatches; None: not cut."""
        cutter, microbatches, obstacle = self._split.cutter, None, ""
        parts = cutter.make_user_microbatches(inputs) if cutter.by_user else None
        try:
            microbatches = (
                cutter.cut_evaluation_batch(inputs)
                if parts is None
                else cutter.build_microbatches(inputs, parts)
            )
        except GlobalWriteError:
            raise
        except Exception as error:  # an error of the user's comes again in the whole step
            obstacle = str(error)
        if key not in self._runs_whole:
            is_certain = microbatches is not None and all(
                each.record.is_certain for each in microbatches
            )
            of_ranks = self._group.gather((is_certain, microbatches is None))
            self._runs_whole[key] = not all(certain for certain, _ in of_ranks)
            if any(is_uncut for _, is_uncut in of_ranks):
                microbatches = None  # all ranks run as many
            if obstacle and self._group.is_global_zero:
                log.info(_WHOLE, inputs.kind, obstacle)
        return microbatches

    def _num_shared_calls(self, kind: str, microbatches: list[Microbatch] | None) -> int:
        """Return in how many calls of blocks all ranks get what these keep in their arguments.

        The code after the blocks of one pass may read it. The caches of a step that goes through
        the blocks again and again, as one that generates, stay on their owners from its next batch
        on.
        """
        if kind in self._split.generating:
            return 0
        traced = (len(each.record.calls.blocks) for each in microbatches or ())
        return max(traced, default=len(self._split.pipeline.chain))

    def _run_whole(
        self, inputs: StepInputs, microbatches: list[Microbatch] | None
    ) -> tuple[StepOutput, bool]:
        """Run a step on every rank alike, each block of it on its owner.

        Returns:
            The outcome, and whether the step has called the blocks as the traces did.
        """
        self._exchange.start_batch_checksum(inputs.batch, f"batch in {inputs.kind}")
        num_shared = self._num_shared_calls(inputs.kind, microbatches)
        run = self._split.whole_runs.prepare_run(inputs.seed, num_shared_calls=num_shared)
        with run.running():
            result = inputs.step(
                inputs.batch, StepCall(is_last=self._group.is_root, is_last_local=True)
            )
        values = substitute_values(result)
        self._exchange.end_batch()
        if len(run.calls) > num_shared:
            self._split.generating.add(inputs.kind)
        could_be_cut = all(run.calls == [*each.record.calls.blocks] for each in microbatches or ())
        of_root = values if self._group.is_root else None
        return StepOutput(of_root, [batch_size(inputs.batch, default=1)], [1.0]), could_be_cut
