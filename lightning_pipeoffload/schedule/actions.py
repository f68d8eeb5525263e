"""The actions of a schedule, and the table of the effects of each kind of action.

An action prints and parses as ``2F0`` (stage 2, forward, microbatch 0), so that a whole plan fits
in a test, a CSV file or a profiler label. :data:`KINDS` defines the lane, the memory effects and
the allowed predecessors of every kind; validation, simulation, search and the runtime's ledger read
that table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntFlag
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule, or a request for one, is not possible; the message names an alternative."""


class MemoryLimitError(ScheduleError):
    """No order of a schedule fits a memory limit.

    Args:
        sentence: The message, with the fields ``{limit}`` and ``{needed}``.
        limit: The given limit, in the unit of the costs.
        needed: The smallest limit that is possible.
    """

    def __init__(self, sentence: str, limit: float, needed: float) -> None:
        super().__init__(sentence, limit, needed)

    def __str__(self) -> str:
        return self.message("{:.10g}".format)

    def message(self, write: Callable[[float], str]) -> str:
        """Return the message.

        Args:
            write: Formats an amount of memory, with its unit if that is known.
        """
        sentence, limit, needed = self.args
        return str(sentence).format(limit=f"memory_limit ({write(limit)})", needed=write(needed))


class Kind(str, Enum):
    """The kind of an action.

    Attributes:
        F: Forward.
        B: Gradient of the stage's input.
        W: Gradient of the stage's weights.
        BW: Both gradients at once.
        REDUCE: Averages the gradients of the action's stage over the replicas, after its last W.
        STEP: Steps the optimizer on the host with the gradients of the action's stage, after its
            last W.
        SEND_F: Sends the output of the action's stage downstream.
        RECV_F: Waits for the input of the action's stage.
        SEND_B: Sends the input gradient of the action's stage upstream.
        RECV_B: Waits for the output gradient of the action's stage.
        OFFLOAD: Starts the copy of the saved activation to the host.
        FREE: Waits for that copy and frees the activation on the device.
        RELOAD: Allocates the activation on the device and starts the copy back.
        RELOAD_B: The same for the part that B needs.
        RELOAD_W: The same for the part that W needs and that is not on the device.
        OFFLOAD_W: Between B and W, starts the copy of the part that W needs to the host.
        FREE_W: Waits for that copy and frees that part on the device.
    """

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    REDUCE = "REDUCE"
    STEP = "STEP"
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


class Action(NamedTuple):
    """One entry of a schedule; ``str(action)`` is ``2F0``, and ``Action.parse("2F0")`` reads it."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action from its printed form.

        Raises:
            ScheduleError: The text does not consist of stage, kind and microbatch.
        """
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text.strip())
        if match is None or match[2] not in Kind.__members__:
            kinds = ", ".join(Kind.__members__)
            raise ScheduleError(
                f"{text!r} is no action; write stage, kind and microbatch as in 2F0; kinds: {kinds}"
            )
        return cls(Kind[match[2]], int(match[1]), int(match[3]))


class MemoryPart(IntFlag):
    """A part of one stage's memory for one microbatch, by the action that needs it.

    Attributes:
        FOR_B: The values that F saves and B needs.
        FOR_W: The values that F saves and only W needs: inputs of deferred linear layers.
        GRADIENT: The output gradients of those layers, from B to W.
    """

    FOR_B = 1
    FOR_W = 2
    GRADIENT = 4


NOTHING = MemoryPart(0)

ACTIVATION = MemoryPart.FOR_B | MemoryPart.FOR_W
"""What F saves."""

WAITING = MemoryPart.FOR_W | MemoryPart.GRADIENT
"""What W needs: there from the end of B on."""

COMPUTE_LANE, OFFLOAD_LANE, RELOAD_LANE = "compute", "d2h", "h2d"
REDUCE_LANE, HOST_LANE = "reduce", "host"
COPY_LANES = frozenset({OFFLOAD_LANE, RELOAD_LANE})


@dataclass(frozen=True)
class KindEffects:
    """The effects of one kind of action, on one stage and microbatch.

    Attributes:
        lane: The lane on which it takes time. Each lane of a rank runs its actions in order; only
            the compute lane blocks the rank. Empty: it takes no time.
        seconds: The fields of ``Costs`` whose sum is its duration; for a copy, multiplied by the
            share of the activation that it moves.
        needs: Parts that must be on the device; it waits for their copies.
        puts: Parts that are on the device after it.
        drops: Parts that are not on the device after it.
        host_puts: Parts that are on the host after it, of those that are on the device.
        host_drops: Parts that are not on the host after it.
        follows: The kinds that may come directly before it. Empty for F, which comes first, and for
            kinds that are checked otherwise (messages, REDUCE, STEP).
        rule: The sentence of the error if another kind comes before it, or a part is missing.
    """

    lane: str = ""
    seconds: tuple[str, ...] = ()
    needs: MemoryPart = NOTHING
    puts: MemoryPart = NOTHING
    drops: MemoryPart = NOTHING
    host_puts: MemoryPart = NOTHING
    host_drops: MemoryPart = NOTHING
    follows: tuple[Kind, ...] = ()
    rule: str = ""


KINDS: dict[Kind, KindEffects] = {
    Kind.F: KindEffects(COMPUTE_LANE, ("forward",), puts=ACTIVATION),
    Kind.B: KindEffects(
        COMPUTE_LANE,
        ("backward_input",),
        needs=MemoryPart.FOR_B,
        puts=MemoryPart.GRADIENT,
        drops=MemoryPart.FOR_B,
        host_drops=MemoryPart.FOR_B,
        follows=(Kind.F, Kind.RELOAD, Kind.RELOAD_B),
        rule="B needs what is on the host; put FREE and RELOAD or RELOAD_B before it",
    ),
    Kind.W: KindEffects(
        COMPUTE_LANE,
        ("backward_weight",),
        needs=WAITING,
        drops=WAITING,
        host_drops=WAITING,
        follows=(Kind.B, Kind.RELOAD_W),
        rule="W needs what is on the host; put RELOAD_W before it",
    ),
    Kind.BW: KindEffects(
        COMPUTE_LANE,
        ("backward_input", "backward_weight"),
        needs=ACTIVATION,
        drops=ACTIVATION,
        host_drops=ACTIVATION,
        follows=(Kind.F, Kind.RELOAD),
        rule="BW needs what is on the host; put FREE and RELOAD before it",
    ),
    Kind.REDUCE: KindEffects(REDUCE_LANE, ("reduce",)),
    Kind.STEP: KindEffects(HOST_LANE, ("step",)),
    Kind.SEND_F: KindEffects(),
    Kind.RECV_F: KindEffects(),
    Kind.SEND_B: KindEffects(),
    Kind.RECV_B: KindEffects(),
    Kind.OFFLOAD: KindEffects(
        OFFLOAD_LANE,
        ("offload",),
        host_puts=ACTIVATION,
        follows=(Kind.F,),
        rule="OFFLOAD copies what F saved, once, and before B or BW needs it",
    ),
    Kind.FREE: KindEffects(
        drops=ACTIVATION,
        follows=(Kind.OFFLOAD,),
        rule="FREE drops what OFFLOAD has copied, once; put OFFLOAD before it",
    ),
    Kind.RELOAD: KindEffects(
        RELOAD_LANE,
        ("reload",),
        puts=ACTIVATION,
        follows=(Kind.FREE,),
        rule="RELOAD brings back what FREE has dropped, once; put FREE before it",
    ),
    Kind.RELOAD_B: KindEffects(
        RELOAD_LANE,
        ("reload",),
        puts=MemoryPart.FOR_B,
        follows=(Kind.FREE,),
        rule="RELOAD_B brings back what FREE has dropped, for B; put FREE before it",
    ),
    Kind.RELOAD_W: KindEffects(
        RELOAD_LANE,
        ("reload",),
        puts=WAITING,
        follows=(Kind.B, Kind.FREE_W),
        rule="RELOAD_W brings back what W needs, after B; put RELOAD_B or FREE_W before it",
    ),
    Kind.OFFLOAD_W: KindEffects(
        OFFLOAD_LANE,
        ("offload",),
        host_puts=WAITING,
        follows=(Kind.B,),
        rule="OFFLOAD_W copies what waits for W; put it after B, and not after RELOAD",
    ),
    Kind.FREE_W: KindEffects(
        drops=WAITING,
        follows=(Kind.OFFLOAD_W,),
        rule="FREE_W drops what OFFLOAD_W has copied, once; put OFFLOAD_W before it",
    ),
}
"""One line for each kind of action."""

SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECVS = frozenset({Kind.RECV_F, Kind.RECV_B})
TRANSFERS = SENDS | RECVS
COMPUTE = frozenset(kind for kind, row in KINDS.items() if row.lane == COMPUTE_LANE)
FINAL = frozenset({Kind.REDUCE, Kind.STEP})
"""Kinds that begin with the final gradients of a stage."""
RELOADS = frozenset(kind for kind, row in KINDS.items() if row.lane == RELOAD_LANE)
COPIES = frozenset(kind for kind, row in KINDS.items() if row.follows) - COMPUTE
"""Kinds between the compute actions of one stage and microbatch."""


class MemoryEffect(NamedTuple):
    """The parts that an action adds to a memory, and those that it removes."""

    puts: MemoryPart = NOTHING
    drops: MemoryPart = NOTHING


MEMORY_EFFECTS = {
    kind: MemoryEffect(row.puts, row.drops) for kind, row in KINDS.items() if row.puts | row.drops
}
"""The table's columns on the memory of the device; other kinds do not change it."""

HOST_EFFECTS = {
    kind: MemoryEffect(row.host_puts, row.host_drops)
    for kind, row in KINDS.items()
    if row.host_puts | row.host_drops
}
"""The columns on the memory of the host, which has a copy until its last user has run."""
