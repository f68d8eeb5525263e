"""The end of a training batch, in one order: what is waited for, what is sent, what hooks read.

::

    Fit.train        1  the plan's last action; each name that steps have logged, once; the root
                        sends these values (SharedMetricsConnector.publish)
                     2  gradients are means over replicas, and sums over the stages of a weight
                     3  on_after_backward: reads the batch's metrics, and gradients, whose sizes
                        are exchanged first
    optimizer_step   4  clipping and the loss scale (GradientClipper), by all ranks' gradients or as
                        if they changed nothing (PostValidation)
                     5  the optimizer (NarrowedOptimizer); weights that replicas send, or that are
                        not validated, are pending from now on: what reads one waits for it
                        (StepBoundary)
    Lightning        6  on_train_batch_end: reads metrics and the rank's own weights; what steps
                        wrote on other ranks are placeholders. Callbacks save by RankZeroClocks
    LoopPatches._end_batch, in place of what ends a batch in Lightning's logger connector:
                     7  the root sends what these hooks have logged (SharedMetricsConnector)
    end_batch        8  the vector of all ranks for the batch before is read, and this rank's is
                        sent: the same options, a stop, clocks that are due, reasons for another
                        plan; and the same batches, where hooks may change them
                     9  saved and requeued, where Slurm has asked for it
    Fit.train       10  another plan, where there is a reason and gradients start anew

Where all ranks meet anyway (a validation, an epoch's end, a save, the end) they wait for 8 of the
batch that has just ended.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipeoffload.loop.data import ReplicaBatchCounts
from lightning_pipeoffload.loop.exchange import Exchange, Flags
from lightning_pipeoffload.loop.requeue import Requeue, requeues
from lightning_pipeoffload.loop.split import Split
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.loop.stops import JointStop, RankZeroClocks
from lightning_pipeoffload.processes import Processes, StepOptions


class BatchEndExchange:
    """What ranks tell each other at the end of batches, and where they meet.

    Attributes:
        stop: Stops all ranks; None on one rank, and in an evaluation.
        clocks: Decides what goes by the clock; None as above.
    """

    def __init__(
        self,
        trainer: Trainer,
        split: Split,
        exchange: Exchange,
        boundary: StepBoundary,
        processes: Processes,
        environment: ClusterEnvironment | None,
        at_end: ExitStack,
    ) -> None:
        self._trainer, self._split = trainer, split
        self._exchange, self._boundary = exchange, boundary
        self._trains = trainer.state.fn == TrainerFn.FITTING
        self.stop = self.clocks = self._arrivals = self._requeue = None
        group, board = split.group, processes.board
        if board is not None and self._trains:
            assert processes.metrics_store is not None
            self.stop = JointStop(trainer, exchange, group.is_root)
            self.clocks = RankZeroClocks(trainer, exchange)
            at_end.callback(self.clocks.remove)
            if group.num_replicas > 1:
                self._arrivals = ReplicaBatchCounts(processes.metrics_store, group)
                board.add_poll(self._arrivals.poll)
        if requeues(environment):
            self._requeue = Requeue(trainer, environment, at_end)
            if board is not None:
                board.add_poll(self._requeue.poll)

    def _options(self) -> StepOptions | None:
        """Return what decides the optimizers' steps; None: nothing is trained."""
        if not self._trains:
            return None
        trained = self._split.pipeline.trained
        return StepOptions(self._trainer.optimizers, trained, self._boundary.num_steps)

    def start_batch(self, num_microbatches: int) -> None:
        """Begin a training batch."""
        if self.stop is not None:
            self.stop.start_batch(num_microbatches)

    def counting_batch(self) -> AbstractContextManager[None]:
        """Return the context of a batch's run, which is counted."""
        return nullcontext() if self._arrivals is None else self._arrivals.batch()

    def end_batch(self) -> None:
        """Exchange with all ranks, after the hooks of a batch's end; ``LoopPatches`` calls it."""
        if self._trainer.training:
            plans, wants_stop = self._split.plans, self._wants_stop()
            due_clocks = 0 if self.clocks is None else self.clocks.update_due_clocks()
            self._exchange.end_batch(plans.flags(wants_stop, due_clocks), self._options())
            of_all = self._exchange.pop_flags()
            if self.stop is not None:
                self.stop.end_batch(wants_stop, of_all.stops)
            plans.merge_flags(of_all)
        if self._requeue is not None:
            self._requeue.requeue_after_agreed_step()

    def _wants_stop(self) -> bool:
        return self.stop is not None and self.stop.wants_stop()

    def reach_milestone(self) -> None:
        """Check that all ranks reach a milestone after the same number of batches."""
        if self._arrivals is not None:
            self._arrivals.reach_milestone()

    def agree_on_stop(self) -> None:
        """Stop all ranks if one of them has set ``trainer.should_stop``; they wait here."""
        self.reach_milestone()
        if self.stop is not None:
            self.stop.set_should_stop(self._flush())

    def compare_batches(self) -> None:
        """Compare the last batches and the optimizers' options; all ranks call it, and wait."""
        any_stops = self._flush()
        if self.stop is not None:
            self.stop.record(any_stops)

    def compare_remaining(self) -> None:
        """Compare what is not compared yet, after the last batch."""
        self._flush()
        self._split.loss_weights.check_previous_weights()

    def requeue_if_asked(self) -> None:
        """Save and requeue if that is still to be done, after the last batch."""
        if self._requeue is not None:
            self._requeue.requeue_if_requested(self._split.group)

    def _flush(self) -> bool:
        """Compare now, and wait; returns whether any rank wants to stop."""
        of_all = self._exchange.flush(Flags(stops=self._wants_stop()), self._options())
        self._split.plans.merge_flags(of_all)
        return of_all.stops
