"""The one entry of a schedule: what to do, for which stage, on which microbatch.

An action prints and parses as ``2F0`` (stage 2, forward, microbatch 0), so that a whole plan fits
in a test, a CSV file or a profiler label. The table of memory effects is here as well, because what
is simulated and what the runtime counts must be the same.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

__all__ = [
    "COMPUTE",
    "MEMORY_EFFECTS",
    "TRANSFERS",
    "Action",
    "Kind",
    "MemoryEffect",
    "ScheduleError",
]


class ScheduleError(ValueError):
    """A schedule, or what was asked of one, that cannot be; the message says what would do."""


class Kind(str, Enum):
    """What an action does.

    Attributes:
        F: Forward.
        B: Gradient of the stage's input.
        W: Gradient of the stage's weights.
        BW: Both gradients at once.
        REDUCE: Gradients of one stage over the replicas, after its last W.
        SEND_F: Sends the output of the action's stage downstream.
        RECV_F: Waits for the input of the action's stage.
        SEND_B: Sends the input gradient of the action's stage upstream.
        RECV_B: Waits for the output gradient of the action's stage.
        OFFLOAD: Starts the copy of the saved activation to the host.
        FREE: Waits for that copy and drops the device's.
        RELOAD: Allocates the activation on the device and starts the copy back.
    """

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    REDUCE = "REDUCE"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OFFLOAD = "OFFLOAD"
    FREE = "FREE"
    RELOAD = "RELOAD"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W, Kind.BW})
TRANSFERS = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})


class Action(NamedTuple):
    """One entry of a schedule; ``str(action)`` is ``2F0``, and ``Action.parse("2F0")`` reads it."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action as it prints.

        Raises:
            ScheduleError: The text is not stage, kind and microbatch.
        """
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text.strip())
        if match is None or match[2] not in Kind.__members__:
            kinds = ", ".join(Kind.__members__)
            raise ScheduleError(
                f"{text!r} is no action; write stage, kind and microbatch as in 2F0; kinds: {kinds}"
            )
        return cls(Kind[match[2]], int(match[1]), int(match[3]))


class MemoryEffect(NamedTuple):
    """What an action adds to a rank's memory, in activations and in weight residues of its stage.

    An activation is what F keeps; a residue is what lives from the end of B to the end of W.
    """

    activations: int
    residues: int


MEMORY_EFFECTS = {
    Kind.F: MemoryEffect(+1, 0),
    Kind.B: MemoryEffect(-1, +1),
    Kind.W: MemoryEffect(0, -1),
    Kind.BW: MemoryEffect(-1, 0),
    Kind.FREE: MemoryEffect(-1, 0),
    Kind.RELOAD: MemoryEffect(+1, 0),
}
