"""Memory of each rank's device and host: changes, peaks, curves over time, and messages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..actions import (
    COMPUTE_LANE,
    HOST_EFFECTS,
    MEMORY_EFFECTS,
    OFFLOAD_LANE,
    RECVS,
    SENDS,
    Action,
    Kind,
    MemoryEffect,
    MemoryPart,
    ScheduleError,
)
from ..costs import Costs
from ..messages import (
    OpenReceives,
    PendingSends,
    max_pending_sends,
    num_required_sends,
    recv_before,
    recv_of,
    send_of,
)
from ..schedule import Schedule
from ..slices import Slices
from ..timeline import Event, Timeline

PartSizes = list[float]
"""Memory of every set of parts of a unit, by the set's number."""


class UnitSizes(NamedTuple):
    """Memory of a stage's microbatches, or of their slices.

    Attributes:
        of: The parts of each unit; slice k of stage s is at ``s * num_slices + k``.
        num_slices: Slices of each microbatch.
        key_values: What F and B of each unit add to the parts, by their kinds: keys and values
            stay on the device, and from a microbatch's first B on their gradients are there too.
            Empty: nothing.
    """

    of: list[PartSizes]
    num_slices: int = 1
    key_values: Mapping[Kind, Sequence[float]] = {}

    def at(self, stage: int, microbatch: int) -> PartSizes:
        """Return the memory of the parts of a stage and microbatch, or of a unit of it."""
        return self.of[stage * self.num_slices + microbatch % self.num_slices]

    def key_value_change(self, action: Action) -> float:
        """Return the change of keys and values by an action."""
        changes = self.key_values.get(action.kind)
        unit = action.stage * self.num_slices + action.microbatch % self.num_slices
        return changes[unit] if changes else 0.0


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the largest sum of live activations and residues on each rank's device.

    An action's change counts at its start if it is positive, else at its end. So only the order of
    a rank's actions matters, not when they run.
    """
    sizes = part_sizes(costs, schedule.num_stages, schedule.num_sequence_slices)
    return tuple(_peak(memory_changes(rank, sizes, MEMORY_EFFECTS)) for rank in schedule)


def peak_host_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the largest memory of each rank on the host."""
    if not schedule.has_copies:
        return (0.0,) * schedule.num_ranks
    sizes = part_sizes(costs, schedule.num_stages, schedule.num_sequence_slices)
    return tuple(_peak(memory_changes(rank, sizes, HOST_EFFECTS)) for rank in schedule)


def part_sizes(costs: Costs, num_stages: int, num_slices: int = 1) -> UnitSizes:
    """Return the memory of every set of parts, for every stage and slice of a microbatch.

    Raises:
        ScheduleError: ``weight_input`` exceeds the activation or residue that it is part of.
    """
    names = ("activation", "weight_input", "weight_residue")
    stages = [*zip(*(costs.per_stage(name, num_stages) for name in names), strict=True)]
    for stage in stages:
        _check_weight_input(*stage)
    if num_slices == 1:
        return UnitSizes([_sizes_of_unit(*stage) for stage in stages])
    slices = costs.slices or Slices()
    held, gradients = slices.key_value_bytes([stage[0] for stage in stages], num_slices)
    activation, *others = (costs.per_slice(name, num_stages, num_slices) for name in names)
    movable = [max(0.0, a - of_unit) for a, of_unit in zip(activation, held, strict=True)]
    units = zip(movable, *others, strict=True)
    key_values = key_value_changes(held, gradients, num_slices) if any(held) else {}
    return UnitSizes([_sizes_of_unit(*unit) for unit in units], num_slices, key_values)


def key_value_changes(
    held: Sequence[float], gradients: Sequence[float], num_slices: int
) -> dict[Kind, list[float]]:
    """Return what F and B add by the keys and values of their unit, and by their gradients.

    The first B of a microbatch, the last slice's, makes gradients of all earlier slices' keys and
    values; each is used up by its own slice's B.
    """
    backward = [-(kept + gradient) for kept, gradient in zip(held, gradients, strict=True)]
    for last in range(num_slices - 1, len(held), num_slices):
        backward[last] = sum(gradients[last + 1 - num_slices : last]) - held[last]
    return {Kind.F: [*held], Kind.B: backward, Kind.BW: backward}


def _check_weight_input(activation: float, weight_input: float, residue: float) -> None:
    if weight_input > min(activation, residue):
        raise ScheduleError(
            f"costs.weight_input ({weight_input:g}) is part of activation ({activation:g}) and of "
            f"weight_residue ({residue:g}); use at most {min(activation, residue):g}"
        )


def _sizes_of_unit(activation: float, weight_input: float, residue: float) -> PartSizes:
    sizes = {
        MemoryPart.FOR_B: activation - weight_input,
        MemoryPart.FOR_W: weight_input,
        MemoryPart.GRADIENT: residue - weight_input,
    }
    every_set = range(sum(MemoryPart) + 1)
    return [sum(size for part, size in sizes.items() if part & parts) for parts in every_set]


def memory_changes(
    actions: Iterable[Action],
    sizes: UnitSizes,
    effects: Mapping[Kind, MemoryEffect],
) -> Iterator[float]:
    """Yield the change of a rank's memory by each of its actions.

    Args:
        actions: The actions of one rank, in order.
        sizes: The result of ``part_sizes``.
        effects: ``MEMORY_EFFECTS`` or ``HOST_EFFECTS``.
    """
    masks = {kind: (int(puts), ~int(drops)) for kind, (puts, drops) in effects.items()}
    there: dict[tuple[int, int], int] = {}
    of, count = sizes.of, sizes.num_slices
    key_values = sizes.key_values if effects is MEMORY_EFFECTS else {}
    for kind, stage, microbatch in actions:
        effect = masks.get(kind)
        if effect is None:
            yield 0.0
            continue
        puts, keeps = effect
        before = there.get((stage, microbatch), 0)
        after = there[stage, microbatch] = (before & keeps) | puts
        unit = stage * count + microbatch % count
        change = of[unit][after] - of[unit][before]
        yield change + key_values[kind][unit] if kind in key_values else change


def _peak(changes: Iterator[float]) -> float:
    return max(accumulate(changes, initial=0.0))


Curve = list[tuple[float, float]]
"""Times and the memory from then on."""


def memory_curves(timeline: Timeline, costs: Costs) -> list[Curve]:
    """Return for each rank the times at which its memory changes, and the memory from then on.

    An action's change counts at its start if it is positive, else at its end.

    Args:
        timeline: The timeline by ``simulate`` for these costs.
        costs: Memory of an activation and of a weight residue.
    """
    return _curves(timeline, costs, MEMORY_EFFECTS)


def host_memory_curves(timeline: Timeline, costs: Costs) -> list[Curve]:
    """Return the same for the host, where memory is taken from the start of a copy on."""
    return _curves(timeline, costs, HOST_EFFECTS)


def _curves(timeline: Timeline, costs: Costs, effects: Mapping[Kind, MemoryEffect]) -> list[Curve]:
    num_stages = 1 + max((event.action.stage for event in timeline.events), default=-1)
    sizes = part_sizes(costs, num_stages, timeline.num_sequence_slices)
    ranks: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if event.lane in (COMPUTE_LANE, OFFLOAD_LANE):
            ranks[event.rank].append(event)
    return [_summed(_changes_of_rank(events, sizes, effects)) for events in ranks]


def _changes_of_rank(
    events: list[Event], sizes: UnitSizes, effects: Mapping[Kind, MemoryEffect]
) -> Curve:
    changes = memory_changes((event.action for event in events), sizes, effects)
    timed = [
        (event.start if change > 0 else event.end, change)
        for event, change in zip(events, changes, strict=True)
        if event.action.kind in effects
    ]
    # A copy may start after what its rank does next.
    return sorted(timed, key=lambda change: change[0])


def _summed(changes: Curve) -> Curve:
    """Add up the changes; of those at one time the curve has the highest sum and the last."""
    curve = [(0.0, 0.0)]
    for time, change in changes:
        memory = curve[-1][1] + change
        if time == curve[-1][0] and change >= 0:
            curve.pop()
        curve.append((time, memory))
    return curve


def peak_message_memory(
    plan: Schedule, size: Callable[[Action], float], evaluation: Schedule | None = None
) -> tuple[float, ...]:
    """Return the largest sum of each rank's messages at a time.

    A message takes memory from its SEND until the rank knows that it has arrived, be it in the next
    step, or from its posted receive until the action that needs it.

    Args:
        size: Returns the memory of the message of a SEND.
        evaluation: The lowered plan of evaluations after training steps; None: there are none.
    """
    wanted = [plan] if evaluation is None else [plan, evaluation]
    plans = [(each, num_required_sends(each)) for each in wanted]
    return tuple(
        max(_MessageMemory(rank, size).memory_after_actions(plans, max_pending_sends(plan, rank)))
        for rank in range(plan.num_ranks)
    )


class _MessageMemory:
    """The memory of a rank's messages, step by step."""

    def __init__(self, rank: int, size: Callable[[Action], float]) -> None:
        self._rank, self._size = rank, size
        self._held = 0.0
        self._sent: defaultdict[int, deque[float]] = defaultdict(deque)

    def memory_after_actions(
        self, plans: Iterable[tuple[Schedule, Mapping[Action, int]]], most: Mapping[int, int]
    ) -> Iterator[float]:
        """Yield the memory after each action of two steps by each plan.

        With each plan come the SENDs before its messages, by :func:`num_required_sends`.
        """
        yield 0.0
        for plan, before in plans:
            receives = OpenReceives(plan, self._rank, self._post, before=before)
            sends = PendingSends(plan, self._rank, self._release, most)
            for _ in range(2):
                receives.start_step()
                sends.start_step()
                yield from self._in_step(plan, receives, sends)
                sends.end_step()

    def _post(self, receive: Action, source: int) -> None:
        self._held += self._size(send_of(receive))

    def _release(self, peer: int, left: int) -> None:
        sent = self._sent[peer]
        while len(sent) > left:
            self._held -= sent.popleft()

    def _send(self, action: Action, peer: int) -> None:
        self._sent[peer].append(self._size(action))
        self._held += self._size(action)

    def _in_step(
        self, plan: Schedule, receives: OpenReceives, sends: PendingSends
    ) -> Iterator[float]:
        receives.queue_receives(plan[self._rank])
        received: set[Action] = set()
        for action in plan[self._rank]:
            needed = recv_before(plan, action)
            if action.kind in SENDS:
                peer = plan.rank_of(recv_of(action).stage)
                sends.add(peer)
                self._send(action, peer)
                receives.count_send()
            elif action.kind in RECVS:
                receives.mark_reached(action)
            elif needed is not None:
                for receive in (
                    receives.pop_receives_up_to(needed) if needed not in received else ()
                ):
                    received.add(receive)
                    sends.release_delivered(receive)
                self._held -= self._size(send_of(needed))
            yield self._held
