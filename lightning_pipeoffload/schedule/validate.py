"""Checks a whole schedule before it runs.

A send never waits in the runtime, and a rank posts the receives of a step at its start, in the
order of the plan. So even a send that waits for its receive (rendezvous) finds it posted, provided
that each directed edge between two ranks has the same order of sends and receives. The replay finds
all other deadlocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from .actions import (
    COMPUTE_LANE,
    FINAL,
    KINDS,
    NOTHING,
    OFFLOAD_LANE,
    RECVS,
    RELOAD_LANE,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
    ScheduleError,
)
from .messages import recv_of, send_after, send_of
from .replay import grid_around, replay
from .schedule import Schedule

_FORWARD_ALONE = ((Kind.F,),)
_FORWARD_AND_BACKWARD = ((Kind.F, Kind.BW), (Kind.F, Kind.B, Kind.W))
_COMPUTED = {Kind.F, Kind.B, Kind.W, Kind.BW}


def validate(schedule: Schedule) -> None:
    """Check a schedule of compute actions, or a lowered plan.

    Every stage is on one rank. Every stage runs F, then BW or B and W, once for each microbatch; or
    every stage runs only F. An offloaded part is freed and reloaded, in this order, before the
    action that needs it. Every stage has one REDUCE or one STEP after its last gradients, or none
    has. Every message that is sent is received, in the same order on every directed edge. There is
    no deadlock. Of sequences in slices every stage runs a microbatch's F's in the order of the
    slices, and its B's in reverse: a slice attends to earlier ones, whose gradients it adds to.

    Raises:
        ScheduleError: A rule is broken; the message names rank, action and rule, and marks the
            action in a grid.
    """
    _check_placement(schedule)
    _check_compute(schedule)
    if schedule.num_sequence_slices > 1:
        _check_slices(schedule)
    if any(KINDS[kind].follows for kind in schedule.kinds - _COMPUTED):
        _check_copies(schedule)
    if schedule.final_kind is not None:
        _check_reduce_or_step(schedule, schedule.final_kind)
    if schedule.has_transfers:
        _check_transfers(schedule)
    replay(schedule)


class _Place(NamedTuple):
    rank: int
    step: int
    action: Action


def _places(schedule: Schedule) -> Iterator[_Place]:
    for rank, actions in enumerate(schedule):
        for step, action in enumerate(actions):
            yield _Place(rank, step, action)


def _rule_error(schedule: Schedule, place: _Place, rule: str) -> ScheduleError:
    grid = grid_around(schedule, place.rank, place.step)
    return ScheduleError(f"rank {place.rank}, {place.action}: {rule}\n{grid}")


def _check_placement(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule):
        if not actions:
            raise ScheduleError(f"rank {rank} of {schedule!r} has no action; use fewer ranks")
    if not len(schedule):
        raise ScheduleError(f"{schedule!r} has no ranks; give at least one list of actions")
    owner: dict[int, int] = {}
    for place in _places(schedule):
        stage = place.action.stage
        if owner.setdefault(stage, place.rank) != place.rank:
            rule = f"stage {stage} is on rank {owner[stage]} as well; a stage belongs to one rank"
            raise _rule_error(schedule, place, rule)
    if missing := sorted(set(range(schedule.num_stages)) - owner.keys()):
        raise ScheduleError(f"no rank has stages {missing}; number the stages from 0 without gaps")


def _check_compute(schedule: Schedule) -> None:
    allowed = _FORWARD_ALONE if schedule.is_forward_only else _FORWARD_AND_BACKWARD
    unit = "microbatch" if schedule.num_sequence_slices == 1 else "unit"
    computed: defaultdict[tuple[int, int], list[_Place]] = defaultdict(list)
    for place in _places(schedule):
        if place.action.kind in _COMPUTED:
            computed[place.action.stage, place.action.microbatch].append(place)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_units):
            places = computed[stage, microbatch]
            kinds = tuple(place.action.kind for place in places)
            if kinds in allowed:
                continue
            rule = (
                f"stage {stage} has {_names(kinds)} for {unit} {microbatch}, in this order; "
                f"it must be {' or '.join(map(_names, allowed))}, each once"
            )
            if not places:
                raise ScheduleError(f"rank {schedule.rank_of(stage)}: {rule}")
            raise _rule_error(schedule, places[_first_fault(kinds, allowed)], rule)


def _check_slices(schedule: Schedule) -> None:
    count = schedule.num_sequence_slices
    num_run: Counter[tuple[int, bool, int]] = Counter()  # by stage, direction and microbatch
    for place in _places(schedule):
        kind, stage, unit = place.action
        if kind not in (Kind.F, Kind.B, Kind.BW):
            continue
        is_forward, first = kind is Kind.F, unit // count * count
        before = num_run[stage, is_forward, first]
        num_run[stage, is_forward, first] += 1
        following = first + (before if is_forward else count - 1 - before)
        if unit != following:
            names = ("forwards", "in order") if is_forward else ("backwards", "in reverse")
            rule = (
                f"a microbatch's {names[0]} run {names[1]} of its {count} slices; "
                f"{place.action._replace(microbatch=following)} comes first"
            )
            raise _rule_error(schedule, place, rule)


def _first_fault(kinds: tuple[Kind, ...], allowed: tuple[tuple[Kind, ...], ...]) -> int:
    """Return the index of the first action that no allowed order matches; else of the last."""
    for end in range(len(kinds)):
        if not any(order[: end + 1] == kinds[: end + 1] for order in allowed):
            return end
    return len(kinds) - 1


def _names(kinds: Sequence[Kind]) -> str:
    return " ".join(kind.value for kind in kinds) or "nothing"


def _check_copies(schedule: Schedule) -> None:
    """Check the copies of each stage and microbatch against the table of kinds."""
    lives: defaultdict[tuple[int, int], list[_Place]] = defaultdict(list)
    for place in _places(schedule):
        if place.action.kind is Kind.F or KINDS[place.action.kind].follows:
            lives[place.action.stage, place.action.microbatch].append(place)
    for places in lives.values():
        kinds = tuple(place.action.kind for place in places)
        fault = _first_fault_of_life(kinds)
        if fault is not None:
            rule = f"{KINDS[kinds[fault]].rule} (this stage has {_names(kinds)})"
            raise _rule_error(schedule, places[fault], rule)


@lru_cache(maxsize=1024)  # most stages and microbatches have the same life
def _first_fault_of_life(kinds: tuple[Kind, ...]) -> int | None:
    """Return the first action with a wrong predecessor, a missing part, or a useless copy."""
    device = host = NOTHING
    previous = None
    for place, kind in enumerate(kinds):
        row = KINDS[kind]
        copied = row.host_puts & device
        if (
            (previous is not None and previous not in row.follows)
            or row.needs & ~device
            or (row.lane == OFFLOAD_LANE and (not copied or copied & host))
            or (row.lane == RELOAD_LANE and not row.puts & ~device)
        ):
            return place
        host = (host & ~row.host_drops) | row.host_puts
        device = (device & ~row.drops) | row.puts
        previous = kind
    return None if KINDS[kinds[-1]].lane == COMPUTE_LANE else len(kinds) - 1


def _check_reduce_or_step(schedule: Schedule, kind: Kind) -> None:
    last = {p.action.stage: p for p in _places(schedule) if p.action.kind in (Kind.W, Kind.BW)}
    finished: set[int] = set()
    for place in _places(schedule):
        if place.action.kind not in FINAL:
            continue
        stage, completed = place.action.stage, last.get(place.action.stage)
        wanted = completed and completed.action._replace(kind=kind)
        rule = ""
        if completed is None:
            rule = "there are no gradients without a backward; take it out"
        elif stage in finished:
            rule = f"stage {stage} has one {kind.value}; take it out"
        elif completed.step > place.step:
            rule = f"the gradients are complete after {completed.action}; put {wanted} after it"
        elif place.action != wanted:
            rule = f"it stands after {completed.action}; call it {wanted}"
        if rule:
            raise _rule_error(schedule, place, rule)
        finished.add(stage)
    for stage, place in last.items():
        if stage not in finished:
            add = place.action._replace(kind=kind)
            rule = f"other stages have {kind.value}, stage {stage} has none; add {add} after it"
            raise _rule_error(schedule, place, rule)


def _check_transfers(schedule: Schedule) -> None:
    there = {place.action for place in _places(schedule)}
    needed: set[Action] = set()
    for place in _places(schedule):
        if send := send_after(schedule, place.action):
            needed |= {send, recv_of(send)}
            if missing := sorted(str(end) for end in {send, recv_of(send)} - there):
                rule = f"another rank needs its result; add {' and '.join(missing)}"
                raise _rule_error(schedule, place, rule)
    for place in _places(schedule):
        if place.action.kind in TRANSFERS:
            if place.action not in needed:
                raise _rule_error(schedule, place, "nothing waits for this transfer; take it out")
            needed.remove(place.action)
    _check_edges(schedule)


def _check_edges(schedule: Schedule) -> None:
    """Check that messages do not overtake each other between two ranks."""
    sent: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, _, action in _places(schedule):
        if action.kind in SENDS:
            recv = recv_of(action)
            sent[rank, schedule.rank_of(recv.stage)].append(recv)
    for place in _places(schedule):
        if place.action.kind in RECVS:
            sender = schedule.rank_of(send_of(place.action).stage)
            expected = sent[sender, place.rank].popleft()
            if place.action != expected:
                rule = f"rank {sender} sends first what {expected} waits for; receive in that order"
                raise _rule_error(schedule, place, rule)
