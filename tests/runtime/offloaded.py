"""Plans that offload everything, and places for activations that tests can look into."""

from __future__ import annotations

import torch

from lightning_pipeoffload.runtime.activation_memory import ActivationMemory
from lightning_pipeoffload.runtime.activation_store import OffloadSettings
from lightning_pipeoffload.runtime.host_memory import HostMemory
from lightning_pipeoffload.runtime.streams import CopyLanes, InlineLane, LateLane, make_lanes
from lightning_pipeoffload.schedule import COPIES, Action, Kind, Schedule, validate

# what to insert before and after actions of some kinds
Insertions = dict[Kind, tuple[str, str]]
FOR_B = {Kind.F: ("", "OFFLOAD FREE"), Kind.B: ("RELOAD", ""), Kind.BW: ("RELOAD", "")}
APART = {**FOR_B, Kind.B: ("RELOAD_B", ""), Kind.W: ("RELOAD_W", "")}
QUEUE = {Kind.B: ("", "OFFLOAD_W FREE_W"), Kind.W: ("RELOAD_W", "")}
EVERYTHING = {**FOR_B, Kind.B: ("RELOAD_B", "OFFLOAD_W FREE_W"), Kind.W: ("RELOAD_W", "")}


def offloaded(schedule: Schedule, insertions: Insertions) -> Schedule:
    """Put copies around the actions of every stage and microbatch, in place of those it has."""
    ranks = [
        [new for a in actions if a.kind not in COPIES for new in _surrounded(a, insertions)]
        for actions in schedule
    ]
    plan = Schedule.of(ranks, f"{schedule.name} offloaded")
    validate(plan)
    return plan


def _surrounded(action: Action, insertions: Insertions) -> list[Action]:
    before, after = insertions.get(action.kind, ("", ""))
    names = [*before.split(), action.kind.name, *after.split()]
    return [Action(Kind[name], action.stage, action.microbatch) for name in names]


def memory_of_all(
    device: torch.device, budget: int | None = None, late: float = 0.0, lanes: int = 2
) -> ActivationMemory:
    """Keep small tensors too; copies begin ``late`` seconds after their turn."""
    host = HostMemory(pinned=device.type != "cpu", budget=budget)
    made = make_lanes(device, lanes)
    if late:
        first = LateLane(late)
        made = CopyLanes(first, LateLane(late) if lanes == 2 else first)
    return ActivationMemory(OffloadSettings(made, host, smallest=1))


class FailingLane(InlineLane):
    """Fails at one of its copies."""

    def __init__(self, place: int) -> None:
        self.left = place

    def copy(self, target, source, what):  # type: ignore[no-untyped-def]
        self.left -= 1
        super().copy(target[:-1] if self.left == 0 else target, source, what)
