"""All that one rank keeps of its microbatches: a store for each that needs one, and the ledger.

A store is opened where the plan offloads, and once for each stage to measure it; everywhere else
autograd keeps its tensors without hooks, and the ledger counts what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.memory.host_copies import Rooms
from lightning_pipeoffload.runtime.memory.host_memory import HostBudget, HostMemory
from lightning_pipeoffload.runtime.memory.ledger import Held, Ledger
from lightning_pipeoffload.runtime.memory.stage_store import (
    ActivationStore,
    OffloadSettings,
    address_of,
)
from lightning_pipeoffload.runtime.memory.streams import CopyError, CopyLanes, make_lanes
from lightning_pipeoffload.runtime.microbatch import batch_leaves
from lightning_pipeoffload.runtime.step.batch_slice import Microbatch
from lightning_pipeoffload.runtime.step.stage import StageRunner
from lightning_pipeoffload.schedule import Action, Kind
from lightning_pipeoffload.schedule.actions import (
    ACTIVATION,
    HOST_EFFECTS,
    MEMORY_EFFECTS,
    WAITING,
    MemoryEffect,
    Part,
)

_MOVES: dict[Kind, Callable[[ActivationStore], None]] = {
    Kind.OFFLOAD: ActivationStore.offload,
    Kind.FREE: ActivationStore.free,
    Kind.RELOAD: lambda store: store.reload(ACTIVATION),
    Kind.RELOAD_B: lambda store: store.reload(Part.FOR_B),
    Kind.RELOAD_W: lambda store: store.reload(WAITING),
    Kind.OFFLOAD_W: ActivationStore.offload,
    Kind.FREE_W: ActivationStore.free,
}
_STARTS = {Kind.OFFLOAD, Kind.OFFLOAD_W}
_NEEDS = {Kind.B: Part.FOR_B, Kind.BW: ACTIVATION, Kind.W: WAITING}


class ActivationMemory:
    """The stores of one rank.

    Args:
        settings: Where activations go.

    Attributes:
        ledger: The ledger of what is kept.
        measures_rooms: Whether to measure what every microbatch would take of the host.
    """

    measures_rooms = False

    def __init__(self, settings: OffloadSettings) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self._stages: Mapping[int, StageRunner] = {}
        self._offloaded: set[tuple[int, int]] = set()
        self._stores: dict[tuple[int, int], ActivationStore] = {}
        self._owned: set[int] = set()
        self._rooms: defaultdict[int, Rooms] = defaultdict(dict)
        self._reserved: tuple[Sequence[Action], dict[int, Rooms]] = (), {}

    @classmethod
    def on(cls, device: torch.device, budget: HostBudget | None = None) -> ActivationMemory:
        """Make one for a device, whose directions take turns until its copies were measured.

        Args:
            device: The device of the rank.
            budget: The most host memory; None: what the machine has.
        """
        host = HostMemory(pinned=device.type != "cpu", budget=budget)
        return cls(OffloadSettings(device, make_lanes(device, count=1), host))

    def use_lanes(self, lanes: CopyLanes) -> None:
        """Copy on other lanes from the next step on.

        Args:
            lanes: The lanes, as many as the plan counts on.
        """
        self.settings = replace(self.settings, lanes=lanes)

    def start_step(self, actions: Sequence[Action], stages: Mapping[int, StageRunner]) -> None:
        """Look at what a step is going to offload.

        Args:
            actions: The actions of the rank.
            stages: The stages of the rank.
        """
        self._stages = stages
        self._stores.clear()
        self._measured: set[tuple[int, int]] = set()
        self._owned.clear()  # parameters may have moved
        self._offloaded = {(a.stage, a.microbatch) for a in actions if a.kind in _STARTS}
        self._reserve(actions)
        self.ledger.start_step()

    def _reserve(self, actions: Sequence[Action]) -> None:
        """Have the host's room for a plan, as far as sizes are known: none is allocated in it."""
        planned, rooms = self._reserved
        if self._offloaded and (actions is not planned or rooms != self._rooms):
            self.settings.host.reserve(_slabs(actions, self._rooms))
            self._reserved = actions, {stage: {**of} for stage, of in self._rooms.items()}

    def abandon(self) -> None:
        """Keep nothing after an error, once the device has waited for the copies under way."""
        for store in self._stores.values():
            with suppress(CopyError):  # it is known, for the step has failed
                store.drop()
        self._stores.clear()

    def take_back(self) -> None:
        """Keep nothing of what has run in this step, which starts anew."""
        for store in self._stores.values():
            store.drop()
        self._stores.clear()
        self.ledger.start_step()

    def open(self, action: Action, microbatch: Microbatch) -> ActivationStore | None:
        """Return a store for what an F keeps, if one is needed."""
        key = action.stage, action.microbatch
        stage = self._stages[action.stage]
        is_measured = self.measures_rooms or stage.memory.is_due
        if key not in self._offloaded and not is_measured:
            return None
        if not self._owned:
            self._owned = {address_of(tensor) for tensor in stage.owned_tensors()}
        # Parameters, and the microbatch itself, stay on the device whatever is offloaded.
        leaves = (leaf for leaf in batch_leaves(microbatch.part) if isinstance(leaf, Tensor))
        resident = self._owned.union(map(address_of, leaves))
        name = f"stage {action.stage}, microbatch {action.microbatch}"
        rooms = self._rooms[action.stage]
        self._stores[key] = ActivationStore(name, resident, self.settings, rooms)
        if is_measured:
            self._measured.add(key)
        return self._stores[key]

    def arrive(self, action: Action) -> None:
        """Let a B, BW or W wait for what comes back of what it needs."""
        store = self._stores.get((action.stage, action.microbatch))
        if store and action.kind in _NEEDS:
            store.arrive(_NEEDS[action.kind])

    def move(self, action: Action) -> None:
        """Run an action that copies, or drops what was copied."""
        _MOVES[action.kind](self._stores[action.stage, action.microbatch])

    def record(self, action: Action) -> None:
        """Count what is kept after an action."""
        store = self._stores.get((action.stage, action.microbatch))
        if store:
            if (action.stage, action.microbatch) in self._measured:
                store.measure_rooms()
            held = Held(store.device_bytes(), store.host_bytes(), store.moving_bytes())
        else:
            held = Held(self._measured_bytes(action))
        self.ledger.record(action, held)

    def _measured_bytes(self, action: Action) -> int:
        memory = self._stages[action.stage].memory
        if action.kind is Kind.F:
            return memory.activation_bytes or 0
        return (memory.residue_bytes or 0) if action.kind is Kind.B else 0


def _slabs(
    actions: Sequence[Action], rooms: Mapping[int, Rooms]
) -> Iterator[tuple[tuple[int, int, Part], int]]:
    """Yield what a rank's actions take of the host, and 0 for what they give back."""
    on_device: defaultdict[tuple[int, int], Part] = defaultdict(lambda: Part(0))
    for kind, stage, microbatch in actions:
        key = stage, microbatch
        here = on_device[key] if kind in _STARTS else Part(0)
        drops = HOST_EFFECTS.get(kind, MemoryEffect()).drops
        for part in Part:
            if part & (here | drops):
                yield (*key, part), rooms.get(stage, {}).get(part, 0) if part & here else 0
        effect = MEMORY_EFFECTS.get(kind, MemoryEffect())
        on_device[key] = (on_device[key] | effect.puts) & ~effect.drops
