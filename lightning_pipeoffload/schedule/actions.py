"""The one entry of a schedule: what to do, for which stage, on which microbatch.

An action prints and parses as ``2F0`` (stage 2, forward, microbatch 0), so that a whole plan fits
in a test, a CSV file or a profiler label. The table of memory effects is here as well, because what
is simulated and what the runtime counts must be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, IntFlag
from typing import NamedTuple

__all__ = [
    "ACTIVATION",
    "COMPUTE",
    "COPIES",
    "HOST_EFFECTS",
    "MEMORY_EFFECTS",
    "RELOADS",
    "TRANSFERS",
    "WAITING",
    "Action",
    "Kind",
    "MemoryEffect",
    "MemoryLimitError",
    "Part",
    "ScheduleError",
]


class ScheduleError(ValueError):
    """A schedule, or what was asked of one, that cannot be; the message says what would do."""


class MemoryLimitError(ScheduleError):
    """No order of a schedule keeps within a memory limit.

    Args:
        sentence: The message, with the places ``{limit}`` and ``{needed}``.
        limit: What was asked for, in the unit of the costs.
        needed: The least that would do.
    """

    def __init__(self, sentence: str, limit: float, needed: float) -> None:
        super().__init__(sentence, limit, needed)

    def __str__(self) -> str:
        return self.told("{:.10g}".format)

    def told(self, write: Callable[[float], str]) -> str:
        """Return the message.

        Args:
            write: Writes an amount, with the unit if that is known.
        """
        sentence, limit, needed = self.args
        return str(sentence).format(limit=f"memory_limit ({write(limit)})", needed=write(needed))


class Kind(str, Enum):
    """What an action does.

    Attributes:
        F: Forward.
        B: Gradient of the stage's input.
        W: Gradient of the stage's weights.
        BW: Both gradients at once.
        REDUCE: Averages the gradients of the action's stage over the replicas, after its last W.
        SEND_F: Sends the output of the action's stage downstream.
        RECV_F: Waits for the input of the action's stage.
        SEND_B: Sends the input gradient of the action's stage upstream.
        RECV_B: Waits for the output gradient of the action's stage.
        OFFLOAD: Starts the copy of the saved activation to the host.
        FREE: Waits for that copy and drops the device's.
        RELOAD: Allocates the activation on the device and starts the copy back.
        RELOAD_B: The same for what B needs of it.
        RELOAD_W: The same for what W needs and is not there.
        OFFLOAD_W: Starts the copy of what waits for W to the host, between B and W.
        FREE_W: Waits for that copy and drops the device's.
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
    RELOAD_B = "RELOAD_B"
    RELOAD_W = "RELOAD_W"
    OFFLOAD_W = "OFFLOAD_W"
    FREE_W = "FREE_W"

    __hash__ = str.__hash__  # of actions in dicts: an Enum's own is written in Python


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W, Kind.BW})
TRANSFERS = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
RELOADS = frozenset({Kind.RELOAD, Kind.RELOAD_B, Kind.RELOAD_W})
COPIES = RELOADS | {Kind.OFFLOAD, Kind.FREE, Kind.OFFLOAD_W, Kind.FREE_W}


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


class Part(IntFlag):
    """A part of what one stage keeps of one microbatch, by who needs it.

    Attributes:
        FOR_B: What B needs of what F saved.
        FOR_W: What W alone needs of it: the inputs of deferred linear layers.
        GRADIENT: The output gradients of those layers, from B to W.
    """

    FOR_B = 1
    FOR_W = 2
    GRADIENT = 4


class MemoryEffect(NamedTuple):
    """Which parts are there after an action. What is there already is not put twice.

    Attributes:
        puts: Parts that it adds where they are not.
        drops: Parts that it takes away where they are.
    """

    puts: Part = Part(0)
    drops: Part = Part(0)


ACTIVATION = Part.FOR_B | Part.FOR_W
"""What F saves."""

WAITING = Part.FOR_W | Part.GRADIENT
"""What waits for W, from the end of B on."""

MEMORY_EFFECTS = {
    Kind.F: MemoryEffect(puts=ACTIVATION),
    Kind.B: MemoryEffect(puts=Part.GRADIENT, drops=Part.FOR_B),
    Kind.W: MemoryEffect(drops=WAITING),
    Kind.BW: MemoryEffect(drops=ACTIVATION),
    Kind.FREE: MemoryEffect(drops=ACTIVATION),
    Kind.RELOAD: MemoryEffect(puts=ACTIVATION),
    Kind.RELOAD_B: MemoryEffect(puts=Part.FOR_B),
    Kind.RELOAD_W: MemoryEffect(puts=WAITING),
    Kind.FREE_W: MemoryEffect(drops=WAITING),
}
"""What each kind does to the memory of the device; the others do nothing."""

HOST_EFFECTS = {
    Kind.OFFLOAD: MemoryEffect(puts=ACTIVATION),
    Kind.OFFLOAD_W: MemoryEffect(puts=WAITING),
    Kind.B: MemoryEffect(drops=Part.FOR_B),
    Kind.W: MemoryEffect(drops=WAITING),
    Kind.BW: MemoryEffect(drops=ACTIVATION),
}
"""What each kind does to the memory of the host, whose copy stays until what needs it has run."""
