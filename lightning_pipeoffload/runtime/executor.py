"""Runs one rank's part of a plan, action by action.

What each kind does is one method, found in a table; where the plan came from makes no difference.
Of one stage in the middle and one microbatch::

    plan      RECV_F    F         SEND_F    RECV_B    B         SEND_B    W
    memory              [==== the activation ========][== what waits =====]

F and B wait for their messages; RECV itself does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime.gradient_reduction import GradientReduction
from lightning_pipeoffload.runtime.rank_memory import ActivationMemory
from lightning_pipeoffload.runtime.rank_messages import RankMessages
from lightning_pipeoffload.runtime.step.autocast import forget_casts
from lightning_pipeoffload.runtime.step.batch_slice import Microbatch
from lightning_pipeoffload.runtime.step.stage import StageRunner
from lightning_pipeoffload.runtime.timing import ActionTimer
from lightning_pipeoffload.runtime.transport import Transport
from lightning_pipeoffload.runtime.weights_under_way import WeightsUnderWay
from lightning_pipeoffload.schedule import Action, Kind, Schedule, tails
from lightning_pipeoffload.schedule.actions import COPIES
from lightning_pipeoffload.schedule.ahead import actions_ahead
from lightning_pipeoffload.schedule.messages import RECVS, SENDS

_BACKWARD = {Kind.B, Kind.BW}


BeforeBackward = Callable[[list[Any]], None]


class Executor:
    """One rank of a pipeline.

    Args:
        rank: The rank's place in the plan.
        stages: The stages of the rank, by index.
        transport: Moves messages to and from the other ranks.
        timer: Measures the actions.
        memory: Where activations are kept.

    Attributes:
        reduction: What gives the replicas one gradient; None where there is one replica.
        under_way: Weights that have to be there before the first F of a step.
        settle: A function that waits until the weights of the step that comes are final, and says
            whether they have changed by that and no message is under way; None: they are final.
    """

    reduction: GradientReduction | None = None
    under_way: WeightsUnderWay | None = None
    settle: Callable[[], bool] | None = None

    def __init__(
        self,
        rank: int,
        stages: dict[int, StageRunner],
        transport: Transport,
        timer: ActionTimer,
        memory: ActivationMemory,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.transport = transport
        self.memory = memory
        self.current: Action | None = None
        self._messages = RankMessages(timer)
        self._results: dict[int, Any] = {}
        self._computations: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.BW: self._backward,
            Kind.W: self._weight,
        }
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            **dict.fromkeys(self._computations, self._compute),
            **dict.fromkeys(COPIES, self._move),
            **dict.fromkeys(SENDS, self._messages.send),
            **dict.fromkeys(RECVS, self._messages.receive),
            Kind.W: self._weights,
            Kind.REDUCE: self._reduce,
        }
        self._tails: dict[Action, tuple[Action, ...]] = {}
        self._regrouped: set[Action] = set()
        self._plan = Schedule.of(())
        self._ahead: list[Action] | None = None

    @property
    def timer(self) -> ActionTimer:
        """What measures the actions; another may take its place between two steps."""
        return self._messages.timer

    @timer.setter
    def timer(self, timer: ActionTimer) -> None:
        self._messages.timer = timer

    def join(self, rank: int, transport: Transport) -> None:
        """Be another rank of the pipeline from the next step on.

        Args:
            rank: The rank's place in the plan.
            transport: Moves messages to and from the other ranks.
        """
        self.rank, self.transport = rank, transport

    @property
    def results(self) -> list[Any]:
        """What the user's step returned for each microbatch, in their order; see :meth:`run`."""
        return [self._results[index] for index in sorted(self._results)]

    @property
    def plan(self) -> Schedule:
        """The plan of the last step."""
        return self._plan

    @property
    def last_microbatch(self) -> Microbatch:
        """A microbatch of the last step."""
        return next(iter(self._microbatches.values()))

    def run(
        self,
        plan: Schedule,
        microbatches: Sequence[Microbatch],
        before_backward: BeforeBackward | None = None,
    ) -> list[Any]:
        """Execute the rank's actions.

        Args:
            plan: A lowered plan; one without backwards evaluates.
            microbatches: The microbatches of the batch.
            before_backward: Called once, before the first backward, with what steps have returned.

        Returns:
            What the user's step returned for each microbatch; empty without the last stage.
        """
        self._begin(plan)
        actions: Sequence[Action] = plan[self.rank]
        if self.settle is not None:
            actions = self._run_ahead(self.settle, actions, microbatches)
            self.settle = None
        for _ in self._go_on(actions, microbatches, before_backward):
            pass
        self._end()
        return self.results

    def steps(
        self,
        plan: Schedule,
        microbatches: Sequence[Microbatch],
        before_backward: BeforeBackward | None = None,
    ) -> Iterator[Action]:
        """Execute action by action; yields each before it runs, so that ranks can take turns."""
        self._begin(plan)
        yield from self._go_on(plan[self.rank], microbatches, before_backward)
        self._end()

    def _begin(self, plan: Schedule) -> None:
        # By identity: step after step it is the same object, and comparing all actions takes time.
        if plan is not self._plan:
            self._plan = plan
            self._messages.use(plan, self.rank)
            found = (tail.weights for tail in tails(plan[self.rank]))
            self._tails = {weights[0]: weights for weights in found if weights}
            self._ahead = None
        self._messages.start_step(self.transport, self.stages)
        self._keep = not plan.is_forward_only
        self._microbatches: dict[int, Microbatch] = {}
        if self._keep:
            self.timer.start_step()
            self.memory.start_step(plan[self.rank], self.stages)

    def _run_ahead(
        self,
        settle: Callable[[], bool],
        actions: Sequence[Action],
        microbatches: Sequence[Microbatch],
    ) -> list[Action]:
        """Run what needs no final weights, and again if they change; returns what is left."""
        if self._ahead is None:
            self._ahead = actions_ahead(self._plan)[self.rank]
        there = {*actions}
        ahead = [action for action in self._ahead if action in there]
        there.difference_update(ahead)
        put_back = next(iter(self.stages.values())).keep_writes()
        self._run_forwards(ahead, microbatches)
        if settle():
            self._take_back()
            put_back()
            self._run_forwards(ahead, microbatches)
        return [action for action in actions if action in there]

    def _run_forwards(self, actions: Sequence[Action], microbatches: Sequence[Microbatch]) -> None:
        for _ in self._go_on(actions, microbatches, None):
            pass

    def _take_back(self) -> None:
        """Be where the step has begun, as all ranks are then."""
        self._messages.take_back()
        for stage in self.stages.values():
            stage.take_back()
        self.memory.take_back()
        self.timer.start_step()
        forget_casts()

    def _end(self) -> None:
        if self._keep:
            self.timer.end_step()
        self.transport.finish_step()

    def abandon(self) -> None:
        """Leave a step where it is, after an error."""
        self.current = None
        self._regrouped.clear()
        self._messages.forget()
        self.memory.abandon()
        for stage in self.stages.values():
            stage.abandon()

    def _go_on(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[Microbatch],
        before_backward: BeforeBackward | None,
    ) -> Iterator[Action]:
        self._results.clear()
        self._microbatches.update((microbatch.index, microbatch) for microbatch in microbatches)
        self._messages.expect(actions, self._microbatches)
        for action in actions:
            yield action
            self.current = action
            if before_backward is not None and action.kind in _BACKWARD:
                before_backward(self.results)
                before_backward = None
            self._handlers[action.kind](action)
        self.current = None

    def _compute(self, action: Action) -> None:
        # Before the clock starts: as for messages, a wait is no part of what computing takes.
        self.memory.arrive(action)
        self.timer.start()
        self._computations[action.kind](action)
        if self._keep:
            self.timer.record(action)
            self.memory.record(action)

    def _move(self, action: Action) -> None:
        self.memory.move(action)
        self.memory.record(action)

    def _forward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        microbatch = self._microbatches[action.microbatch]
        store = self.memory.open(action, microbatch) if self._keep else None
        # Taken as late as the stage asks for it, which has prepared its F by then.
        receive: Callable[[], list[Tensor]] = partial(self._messages.take, _input_of(action))
        if self.under_way:
            receive = self._with_weights(stage, receive)
        output = stage.forward(microbatch, receive, self._keep, store)
        if stage.is_last:
            self._results[action.microbatch] = output
        else:
            send = Action(Kind.SEND_F, action.stage, action.microbatch)
            self._messages.pass_on(send, output)

    def _with_weights(
        self, stage: StageRunner, receive: Callable[[], list[Tensor]]
    ) -> Callable[[], list[Tensor]]:
        """Wait for the message first, where there is one, and then for weights on their way."""
        assert self.under_way is not None
        received = [] if stage.is_first else receive()
        self.timer.pause()
        self.under_way.settle()
        self.timer.resume()
        return lambda: received

    def _backward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        gradients = [] if stage.is_last else self._messages.take(_gradient_of(action))
        gradients = stage.backward(
            self._microbatches[action.microbatch], gradients, fused=action.kind is Kind.BW
        )
        if not stage.is_first:
            send = Action(Kind.SEND_B, action.stage, action.microbatch)
            self._messages.pass_on(send, gradients)

    def _weights(self, action: Action) -> None:
        """Run a W; the first of a REDUCE's tail with the others, regrouped by parameter."""
        tail = self._tails.get(action, ())
        if action in self._regrouped:
            self._regrouped.remove(action)
        elif self.reduction is None or not tail:
            self._compute(action)
        else:
            self._run_tail([each for each in tail if each.microbatch in self._microbatches])

    def _run_tail(self, actions: list[Action]) -> None:
        assert self.reduction is not None
        first, *others = actions
        microbatches = [self._microbatches[action.microbatch] for action in actions]
        for action in actions:
            self.memory.arrive(action)
        self.timer.start()
        self.stages[first.stage].last_weights(microbatches, self.reduction)
        self.timer.record(*actions)
        for action in actions:
            self.memory.record(action)
        self._regrouped.update(others)

    def _reduce(self, action: Action) -> None:
        """Take all gradients of the stage for final; nothing waits for the others' here."""
        if self.reduction is not None:
            self.reduction.expect(action.stage)

    def _weight(self, action: Action) -> None:
        self.stages[action.stage].weight(self._microbatches[action.microbatch])


def _input_of(forward: Action) -> Action:
    return Action(Kind.RECV_F, forward.stage, forward.microbatch)


def _gradient_of(backward: Action) -> Action:
    return Action(Kind.RECV_B, backward.stage, backward.microbatch)
