"""Plans that offload everything, and places for activations that tests can look into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lightning_pipeoffload.runtime.device import Lane, make_lanes
from lightning_pipeoffload.runtime.memory import HostMemory, OffloadSettings
from lightning_pipeoffload.runtime.run import ActivationMemory
from lightning_pipeoffload.schedule import COPIES, Action, Kind, MemoryPart, Schedule, validate

# what to insert before and after actions of some kinds
Insertions = dict[Kind, tuple[str, str]]
FOR_B = {Kind.F: ("", "OFFLOAD FREE"), Kind.B: ("RELOAD", ""), Kind.BW: ("RELOAD", "")}
APART = {**FOR_B, Kind.B: ("RELOAD_B", ""), Kind.W: ("RELOAD_W", "")}
QUEUE = {Kind.B: ("", "OFFLOAD_W FREE_W"), Kind.W: ("RELOAD_W", "")}
EVERYTHING = {**FOR_B, Kind.B: ("RELOAD_B", "OFFLOAD_W FREE_W"), Kind.W: ("RELOAD_W", "")}


def offloaded(schedule, insertions):
    """Put copies around the actions of every stage and microbatch, in place of those it has."""
    ranks = [
        [new for a in actions if a.kind not in COPIES for new in _surrounded(a, insertions)]
        for actions in schedule
    ]
    plan = Schedule.of(ranks, f"{schedule.name} offloaded")
    validate(plan)
    return plan


def _surrounded(action, insertions):
    before, after = insertions.get(action.kind, ("", ""))
    names = [*before.split(), action.kind.name, *after.split()]
    return [Action(Kind[name], action.stage, action.microbatch) for name in names]


EVERYTHING_SAVED = MemoryPart.FOR_B | MemoryPart.FOR_W | MemoryPart.GRADIENT


def there_and_back(store):
    """Copy what a stage's store has to the host, free it, and copy it back."""
    store.start_offload()
    store.free()
    assert store.held.device == 0
    store.start_reload(EVERYTHING_SAVED)
    store.wait_for_reload(EVERYTHING_SAVED)


def memory_of_all(device, budget=None, lanes=None):
    """Keep small tensors too."""
    host = HostMemory(pinned=device.type != "cpu", budget=budget)
    return ActivationMemory(
        OffloadSettings(device, lanes or make_lanes(device), host, largest_to_stay=0)
    )


@dataclass
class Moment:
    """A place in the row of a lane."""

    lane: LastMomentLane
    place: int


class LastMomentLane:
    """Copies when somebody waits for it and no sooner; until then there is garbage.

    Attributes:
        num_late: how often the compute lane had to wait for a copy.
    """

    def __init__(self):
        self.num_late = 0
        self._row = []
        self._done = 0

    def wait_for_compute(self):
        """The CPU has computed what it was given."""

    def wait_for(self, moment):
        self._row.append(lambda: moment.lane.run(moment.place))

    def copy(self, target, source, what):
        target.fill_(255)
        self._row.append(partial(target.copy_, source))

    def record_event(self):
        return Moment(self, len(self._row))

    def synchronize(self, moment):
        self.run(moment.place)

    def make_compute_wait(self, moment):
        self.num_late += self._done < moment.place
        self.run(moment.place)

    def run(self, place):
        while self._done < place:
            self._row[self._done]()
            self._done += 1


class FailingLane(Lane):
    """Fails at one of its copies."""

    def __init__(self, place):
        self.left = place

    def copy(self, target, source, description):  # type: ignore[no-untyped-def]
        self.left -= 1
        super().copy(target[:-1] if self.left == 0 else target, source, description)
