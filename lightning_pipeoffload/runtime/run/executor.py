"""Runs one rank's part of a plan, action by action.

Each kind of action has one method, found in a table. One microbatch on a stage in the middle::

    plan      RECV_F    F         SEND_F    RECV_B    B         SEND_B    W
    messages  posted -> taken     sent ->   posted -> taken     sent ->
    memory              [==== the activation ========][= inputs for W ====]

A receive is posted when its message may come soon by the plan and its edge is free, at the latest
by its RECV; F and B wait for their messages, RECV does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime import TensorSpec
from lightning_pipeoffload.runtime.comm import PendingParameters, Transport
from lightning_pipeoffload.runtime.device import ActionTimer, is_profiled, profiler_range
from lightning_pipeoffload.runtime.run.mailbox import Mailbox
from lightning_pipeoffload.runtime.run.rank_memory import ActivationMemory
from lightning_pipeoffload.runtime.step import Microbatch, StageRunner, forget_casts
from lightning_pipeoffload.runtime.weight_grad import GradientListener
from lightning_pipeoffload.schedule import (
    COPIES,
    FINAL,
    RECVS,
    SENDS,
    Action,
    Costs,
    Kind,
    Schedule,
    speculative_actions,
    tails,
)

_BACKWARD = {Kind.B, Kind.BW}
_LAST = {Kind.W, Kind.BW}

WaitForWeights = Callable[[], bool]
"""Waits until the weights for the step are final; returns whether they have changed meanwhile."""


class Executor:
    """One rank of a pipeline.

    Args:
        rank: The pipeline rank.
        stages: The stages of the rank, by index.
        transport: Sends and receives messages.
        timer: Measures the actions.
        memory: Stores activations.
        pending: Parameters that the first F of a step waits for; None: there never are any.

    Attributes:
        mailbox: The rank's messages.
    """

    def __init__(
        self,
        rank: int,
        stages: dict[int, StageRunner],
        transport: Transport,
        timer: ActionTimer,
        memory: ActivationMemory,
        pending: PendingParameters | None = None,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.mailbox = Mailbox(transport, self._specs_of)
        self.timer = timer
        self.memory = memory
        self.current: Action | None = None
        self._pending = pending
        self._listener: GradientListener | None = None
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.BW: self._backward,
            Kind.W: self._weight,
            **dict.fromkeys(FINAL, self._declare_final),
            **dict.fromkeys(COPIES, self.memory.run_copy_action),
            **dict.fromkeys(SENDS, self.mailbox.send),
            **dict.fromkeys(RECVS, self.mailbox.post),
        }
        self._run = self._handlers
        self._is_marked = False
        self._results: dict[int, Any] = {}
        self._microbatches: dict[int, Microbatch] = {}
        self._regrouped: set[Action] = set()
        self._plan = Schedule.of(())
        self._rest: Iterator[Action] = iter(())
        self._costs = self._used_costs = Costs.unit()

    @property
    def results(self) -> list[Any]:
        """The return values of the user's step, by microbatch; see :meth:`run`."""
        return [self._results[index] for index in sorted(self._results)]

    @property
    def plan(self) -> Schedule:
        """The plan of the last step."""
        return self._plan

    @property
    def transport(self) -> Transport:
        """The object that sends and receives the messages."""
        return self.mailbox.transport

    @property
    def microbatches(self) -> Sequence[Microbatch]:
        """The microbatches of the last step."""
        return [*self._microbatches.values()]

    def set_rank(self, rank: int, transport: Transport) -> None:
        """From the next plan on, be pipeline rank ``rank``, which sends through ``transport``."""
        self.rank = rank
        self.mailbox.set_transport(transport)

    def set_timer(self, timer: ActionTimer) -> None:
        """Measure the next steps with another timer; the times so far stay with the old one."""
        self.timer = timer

    def run(self, plan: Schedule, microbatches: Sequence[Microbatch]) -> list[Any]:
        """Execute the rank's actions of a lowered plan; one without backwards evaluates.

        Returns:
            The return values of the user's step, by microbatch; empty without the last stage.
        """
        self.run_to_backward(plan, microbatches)
        return self.run_rest()

    def run_to_backward(
        self,
        plan: Schedule,
        microbatches: Sequence[Microbatch],
        wait_for_weights: WaitForWeights | None = None,
        listener: GradientListener | None = None,
    ) -> list[Any]:
        """Execute the rank's actions before its first backward; :meth:`run_rest` executes the rest.

        Args:
            plan: A lowered plan.
            microbatches: The microbatches of the batch.
            wait_for_weights: Called after the actions that may run with weights that an optimizer
                step still changes. Returns whether the weights have changed, so that these actions
                run again. None: the weights are final.
            listener: Averages gradients over replicas, or steps them, when they are final.

        Returns:
            The results of :meth:`run` that exist by then.
        """
        self.start(plan, microbatches, listener)
        actions = self._actions
        if wait_for_weights is not None:
            actions = self._run_ahead(wait_for_weights, actions)
        self.expect_messages(actions)
        self._rest = iter(actions)
        for action in self._rest:
            if action.kind in _BACKWARD:
                self._rest = chain((action,), self._rest)
                break
            self.current = action
            self._run[action.kind](action)  # as execute(), with one frame less
        return self.results

    def run_rest(self) -> list[Any]:
        """Execute the actions from the first backward on, end the step; return as :meth:`run`."""
        for action in self._rest:
            self.current = action
            self._run[action.kind](action)
        self.end()
        return self.results

    def start(
        self,
        plan: Schedule,
        microbatches: Sequence[Microbatch],
        listener: GradientListener | None = None,
    ) -> None:
        """Begin a step whose actions :meth:`execute` runs one by one."""
        # By identity: every step passes the same object, and comparing all actions takes time.
        is_other = plan is not self._plan or self._costs is not self._used_costs
        if is_other or is_profiled() is not self._is_marked:
            self._switch_plan(plan)
        self._listener = listener
        self._microbatches = {microbatch.index: microbatch for microbatch in microbatches}
        self._results.clear()
        self.mailbox.start_step()
        if self._has_backward:
            self.timer.start_step(plan.num_sequence_slices)
            self.memory.start_step(self._actions, self.stages, plan.num_sequence_slices)

    def set_message_limits(self, schedule: Schedule, costs: Costs) -> None:
        """Set how many sends to each rank may be pending, and when receives are posted.

        Args:
            schedule: The schedule of a training step, or its lowered plan.
            costs: The costs of its stages; times in any unit.
        """
        self.mailbox.limit_pending_sends(schedule, self.rank)
        self._costs = costs

    def expect_messages(self, actions: Sequence[Action]) -> None:
        """Announce the next actions, whose messages each edge delivers in this order."""
        self.mailbox.expect_messages(actions)

    def execute(self, action: Action) -> None:
        """Run the next action of a step that has started."""
        self.current = action
        self._run[action.kind](action)

    def end(self) -> None:
        """End a step after its last action."""
        self.current = None
        if self._has_backward:
            self.timer.end_step()
        self.mailbox.end_step()

    def _switch_plan(self, plan: Schedule) -> None:
        self._plan, self._used_costs = plan, self._costs
        self._actions: Sequence[Action] = plan[self.rank]
        self._has_backward = not plan.is_forward_only
        self.mailbox.use_plan(plan, self.rank, self._costs)
        by_tail = (tail.weights for tail in tails(self._actions))
        self._tails = {weights[0]: weights for weights in by_tail if weights}
        self._ahead: list[Action] | None = None
        self._run, self._is_marked = self._handlers, is_profiled()
        if self._is_marked:
            self._run = {k: partial(_run_marked, run) for k, run in self._handlers.items()}

    def _run_ahead(
        self, wait_for_weights: WaitForWeights, actions: Sequence[Action]
    ) -> list[Action]:
        """Run the actions that need no final weights, again if weights change; return the rest."""
        if self._ahead is None:
            self._ahead = speculative_actions(self._plan)[self.rank]
        there = {*actions}
        ahead = [action for action in self._ahead if action in there]
        there.difference_update(ahead)
        restore = next(iter(self.stages.values())).save_written_state()
        self._run_forwards(ahead)
        if wait_for_weights():
            self._undo_forwards()
            restore()
            self._run_forwards(ahead)
        return [action for action in actions if action in there]

    def _run_forwards(self, actions: Sequence[Action]) -> None:
        self.expect_messages(actions)
        for action in actions:
            self.execute(action)
        self.current = None

    def _undo_forwards(self) -> None:
        """Undo this step's forwards on all ranks, after receiving their messages."""
        self.mailbox.discard_forwards()
        self._results.clear()
        self.memory.discard_forwards()
        for stage in self.stages.values():
            stage.discard_forwards()
        self.timer.start_step(self._plan.num_sequence_slices)
        forget_casts()

    def abandon(self) -> None:
        """Drop an unfinished step, after an error."""
        self.current = None
        self._regrouped.clear()
        self.mailbox.abandon()
        self.memory.abandon()
        for stage in self.stages.values():
            stage.abandon()

    # What each kind of action does

    def _await_reloads(self, *actions: Action) -> None:
        # Before the clock starts: the time of an action does not include waits.
        for action in actions if self.memory.offloads else ():
            self.memory.wait_for_reload(action)
        self.timer.start_action()

    def _record_and_free(self, *actions: Action) -> None:
        if not self._has_backward:
            return
        self.timer.end_action(*actions)
        for action in actions:
            stage = self.stages[action.stage]
            store = stage.in_flight[action.microbatch].store
            self.memory.ledger.record(action, None if store is None else store.measure_held_bytes())
            if action.kind in _LAST:
                stage.drop_microbatch(self._microbatches[action.microbatch])

    def _forward(self, action: Action) -> None:
        if action in self.mailbox.receives.during:
            self.mailbox.receives.post_expected_receives(action)
        self.timer.start_action()  # nothing that an F needs is offloaded
        stage, microbatch = self.stages[action.stage], self._microbatches[action.microbatch]
        store = self.memory.open_store(action, microbatch) if self._has_backward else None
        # The stage takes the message as late as possible, after the beginning of the step; before
        # that where weights are pending, which the beginning may read.
        receive: Callable[[], list[Tensor]] = partial(self.mailbox.receive, action, self.timer)
        if self._pending is not None and self._pending:
            receive = self._await_pending_parameters(receive)
        output = stage.forward(microbatch, receive, self._has_backward, store)
        if not self.mailbox.put(action, output) and microbatch.has_result:
            self._results[action.microbatch] = output
        self._record_and_free(action)

    def _await_pending_parameters(
        self, receive: Callable[[], list[Tensor]]
    ) -> Callable[[], list[Tensor]]:
        """Wait for the message, if there is one, then for the pending parameters."""
        assert self._pending is not None
        received = receive()
        self.timer.pause()
        self._pending.wait()
        self.timer.resume()
        return lambda: received

    def _backward(self, action: Action) -> None:
        if action in self.mailbox.receives.during:
            self.mailbox.receives.post_expected_receives(action)
        self._await_reloads(action)
        stage, microbatch = self.stages[action.stage], self._microbatches[action.microbatch]
        gradients = self.mailbox.receive(action, self.timer)
        gradients = stage.backward(microbatch, gradients, fused=action.kind is Kind.BW)
        self.mailbox.put(action, gradients)
        self._record_and_free(action)

    def _weight(self, action: Action) -> None:
        """Run a W; the first W of a REDUCE's or STEP's tail runs all of it, by parameter."""
        if action in self.mailbox.receives.during:
            self.mailbox.receives.post_expected_receives(action)
        tail = self._tails.get(action, ())
        if action in self._regrouped:
            self._regrouped.remove(action)
        elif self._listener is not None and tail:
            self._run_tail([each for each in tail if each.microbatch in self._microbatches])
        else:
            self._await_reloads(action)
            self.stages[action.stage].backward_weight(self._microbatches[action.microbatch])
            self._record_and_free(action)

    def _run_tail(self, actions: list[Action]) -> None:
        assert self._listener is not None
        first, *others = actions
        microbatches = [self._microbatches[action.microbatch] for action in actions]
        self._await_reloads(*actions)
        self.stages[first.stage].run_regrouped_weights(microbatches, self._listener)
        self._record_and_free(*actions)
        self._regrouped.update(others)

    def _declare_final(self, action: Action) -> None:
        """Declare all gradients of the stage final; waits for no replica and no step."""
        if self._listener is not None:
            self._listener.mark_gradients_final(action.stage)

    def _specs_of(self, receive: Action) -> list[TensorSpec]:
        microbatch = self._microbatches[receive.microbatch]
        record = self.stages[receive.stage].record_of(microbatch)
        return record.specs_in if receive.kind is Kind.RECV_F else record.gradient_specs


def _run_marked(run: Callable[[Action], None], action: Action) -> None:
    with profiler_range(str(action)):
        run(action)
