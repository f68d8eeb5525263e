"""Passes: functions ``Schedule -> Schedule`` that add transfers or remove actions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

from ..actions import COMPUTE, FINAL, Action, Kind, ScheduleError
from ..costs import Costs
from ..messages import recv_before, recv_of, send_after, send_of
from ..schedule import Schedule
from ..validate import validate
from .last_weights import add_final_actions, add_final_actions_by_cost


def lower(schedule: Schedule) -> Schedule:
    """Turn a schedule of compute actions into the plan that every rank executes."""
    return add_transfers(split_fused_backward(schedule))


def split_fused_backward(schedule: Schedule) -> Schedule:
    """Split BW into B and W wherever another rank waits for the input gradient.

    The transfer pass then gives B, SEND_B, W: the neighbour never waits for a weight gradient.
    """
    return _split(schedule, lambda action: schedule.crosses_ranks(action.stage - 1))


def as_executed(schedule: Schedule, costs: Costs, steps_early: bool) -> Schedule:
    """Return a schedule as a run with these costs executes it, without transfers.

    Args:
        schedule: A schedule that trains.
        costs: Its costs.
        steps_early: Whether an optimizer on the host steps as gradients become final.
    """
    return add_final_actions_by_cost(split_fused_backward(schedule), costs, steps_early)


def split_every_backward(schedule: Schedule) -> Schedule:
    """Split every BW, so that the inputs of B and of W can be copied at separate times."""
    return _split(schedule, lambda action: True)


def _split(schedule: Schedule, is_wanted: Callable[[Action], bool]) -> Schedule:
    def parts(action: Action) -> tuple[Action, ...]:
        if action.kind is Kind.BW and is_wanted(action):
            return action._replace(kind=Kind.B), action._replace(kind=Kind.W)
        return (action,)

    ranks = ([part for action in rank for part in parts(action)] for rank in schedule)
    return schedule.with_actions(ranks)


def add_transfers(schedule: Schedule) -> Schedule:
    """Put a SEND right after the action whose result it sends, and a RECV right before its user.

    Only between stages of different ranks. A directed edge between two ranks is a queue: where the
    sender sends another message before the one that is needed, the RECV of that one comes first. It
    arrived earlier, so nothing waits longer for it.

    Raises:
        ScheduleError: The schedule is not valid, or has transfers already.
    """
    if schedule.has_transfers:
        raise ScheduleError(f"schedule {schedule.name} has transfers already; lower it only once")
    validate(schedule)
    inbox = _messages_by_receiver(schedule)
    ranks = (_with_transfers(schedule, rank, inbox[rank]) for rank in range(schedule.num_ranks))
    return schedule.with_actions(ranks)


def forward_only(schedule: Schedule) -> Schedule:
    """Drop everything but forwards, for evaluation; ``lower`` adds their transfers.

    Evaluations run whole sequences: of a microbatch in slices each stage has one F.
    """
    whole = keep_microbatches(schedule, schedule.num_microbatches, num_slices=1)
    return _keep(whole, lambda action: action.kind is Kind.F)


def keep_microbatches(schedule: Schedule, count: int, num_slices: int | None = None) -> Schedule:
    """Drop the actions of microbatches from ``count`` on, for a batch that is shorter.

    With ``num_slices`` those of slices from ``num_slices`` on too, for sequences that are too short
    for all. A stage's REDUCE or STEP stays, after what is then the last.

    Raises:
        ScheduleError: Fewer than one microbatch or slice would stay.
    """
    of_all = schedule.num_sequence_slices
    num_slices = of_all if num_slices is None else num_slices
    for number, name in ((count, "microbatches"), (num_slices, "slices")):
        if number < 1:
            raise ScheduleError(f"count ({number}) of {name} to keep must be at least 1")

    def kept(actions: Iterable[Action]) -> Iterator[Action]:
        for action in actions:
            microbatch, place = divmod(action.microbatch, of_all)
            if microbatch < count and place < num_slices and action.kind not in FINAL:
                yield action._replace(microbatch=microbatch * num_slices + place)

    fewer = Schedule.of(map(kept, schedule), schedule.name, num_slices)
    return add_final_actions(fewer, schedule.final_kind) if schedule.final_kind else fewer


def serialize_microbatches(schedule: Schedule) -> Schedule:
    """Return an order in which ranks finish each microbatch before the next one, without copies.

    No order needs less memory, and none is slower: for steps that measure memory.
    """
    count = schedule.num_sequence_slices

    def by_microbatch(action: Action) -> tuple[int, bool, int, int, bool]:
        kind, stage, unit = action
        is_backward, sign = kind is not Kind.F, 1 if kind is Kind.F else -1
        return unit // count, is_backward, sign * unit, sign * stage, kind is Kind.W

    ranks = (sorted((a for a in rank if a.kind in COMPUTE), key=by_microbatch) for rank in schedule)
    return schedule.with_actions(ranks)


def _keep(schedule: Schedule, wanted: Callable[[Action], bool]) -> Schedule:
    return schedule.with_actions(filter(wanted, rank) for rank in schedule)


Inbox = dict[int, deque[Action]]


def _messages_by_receiver(schedule: Schedule) -> defaultdict[int, Inbox]:
    """Give every rank the RECVs of each rank that sends to it, in the order of the SENDs."""
    inboxes: defaultdict[int, Inbox] = defaultdict(lambda: defaultdict(deque))
    for sender, actions in enumerate(schedule):
        for action in actions:
            if send := send_after(schedule, action):
                recv = recv_of(send)
                inboxes[schedule.rank_of(recv.stage)][sender].append(recv)
    return inboxes


def _with_transfers(schedule: Schedule, rank: int, inbox: Inbox) -> Iterator[Action]:
    received: set[Action] = set()
    for action in schedule[rank]:
        needed = recv_before(schedule, action)
        while needed and needed not in received:
            recv = inbox[schedule.rank_of(send_of(needed).stage)].popleft()
            received.add(recv)
            yield recv
        yield action
        if send := send_after(schedule, action):
            yield send
