"""When the copies of one rank run, so that each is back in time and none is long on the device.

As in the paper (Wan et al., "PipeOffload", ICML 2025): copies back take the latest slot that is
early enough, from the last to the first; then copies to the host take the earliest that is free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from .actions import Action, Kind

__all__ = ["Copied", "Copy", "place_copies"]

TOLERANCE = 1e-9


class Copied(NamedTuple):
    """An activation that is to go to the host and come back.

    Attributes:
        stage: Its stage.
        microbatch: Its microbatch.
        saved: When F has saved it.
        needed: When B starts.
        offload: Seconds to the host.
        reload: Seconds back.
    """

    stage: int
    microbatch: int
    saved: float
    needed: float
    offload: float
    reload: float

    @property
    def lifespan(self) -> float:
        """Seconds between F and B."""
        return self.needed - self.saved


class Copy(NamedTuple):
    """A copy and when it runs."""

    start: float
    end: float
    action: Action


def place_copies(wanted: Iterable[Copied], num_lanes: int) -> tuple[list[Copy], list[Copied]]:
    """Return the copies of one rank by their start, and the activations that cannot be copied.

    Where there is no time for all of them, those with the shortest lifespans stay on the device.

    Args:
        wanted: What is to be copied.
        num_lanes: 1 where both directions take turns, 2 where each has a lane.
    """
    chosen = list(wanted)
    left: list[Copied] = []
    while chosen:
        copies, late = _place(chosen, num_lanes)
        if not late:
            return sorted(copies), left
        gone = set(sorted(late, key=lambda copied: copied.lifespan)[: max(1, len(late) // 4)])
        left += sorted(gone)
        chosen = [copied for copied in chosen if copied not in gone]
    return [], left


def _place(chosen: list[Copied], num_lanes: int) -> tuple[list[Copy], list[Copied]]:
    reloads: dict[Copied, Copy] = {}
    limit = float("inf")
    for copied in sorted(chosen, key=lambda copied: copied.needed, reverse=True):
        end = min(limit, copied.needed)
        limit = end - copied.reload
        reloads[copied] = Copy(limit, end, _action(Kind.RELOAD, copied))
    taken = sorted(reloads.values()) if num_lanes == 1 else []
    offloads, late, free = [], [], 0.0
    for copied in sorted(chosen, key=lambda copied: copied.saved):
        start = _earliest(max(free, copied.saved), copied.offload, taken)
        if start + copied.offload > reloads[copied].start + TOLERANCE:
            late.append(copied)
            continue
        free = start + copied.offload
        offloads.append(Copy(start, free, _action(Kind.OFFLOAD, copied)))
    return [*offloads, *reloads.values()], late


def _earliest(start: float, seconds: float, taken: list[Copy]) -> float:
    """Return the first time from ``start`` on at which a lane is free for so long."""
    index = max(0, bisect_left(taken, (start,)) - 1)
    for copy in taken[index:]:
        if start + seconds <= copy.start + TOLERANCE:
            break
        start = max(start, copy.end)
    return start


def _action(kind: Kind, copied: Copied) -> Action:
    return Action(kind, copied.stage, copied.microbatch)
