"""The saved activations of one rank: stores of saved tensors, and a ledger of their bytes.

F opens a store for a microbatch that the plan offloads, and for one microbatch of each stage to
measure it. Other microbatches run without saved-tensors hooks; for these the ledger adds and
removes the measured bytes as the schedule's table of actions defines.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.batch import batch_leaves
from lightning_pipeoffload.runtime.device import CopyError, CopyLanes, make_lanes
from lightning_pipeoffload.runtime.memory import (
    ActivationStore,
    HeldBytes,
    HostBudget,
    HostBytes,
    HostMemory,
    OffloadSettings,
    storage_address,
)
from lightning_pipeoffload.runtime.step import Microbatch, StageRunner
from lightning_pipeoffload.schedule import (
    ACTIVATION,
    COMPUTE,
    KINDS,
    NOTHING,
    RELOADS,
    WAITING,
    Action,
    MemoryPart,
)
from lightning_pipeoffload.schedule.simulation import key_value_changes

_OFFLOADS = {kind for kind, row in KINDS.items() if row.host_puts}

# The measured bytes of the parts on the device, where nothing is copied.
_BYTES = {ACTIVATION: "activation_bytes", WAITING: "residue_bytes"}

_Key = tuple[int, int]  # stage and microbatch

_NONE_HELD = HeldBytes()


class LedgerEntry(NamedTuple):
    """The bytes that a rank holds after ``action``, ``seconds`` after the start of the step."""

    seconds: float
    action: Action
    held: HeldBytes


class Ledger:
    """Counts one rank's saved bytes.

    Args:
        measured: Returns the bytes of a stage and microbatch after an action that copies nothing.
        unmeasured: Returns the bytes on the device that an action adds, apart from those measured.
    """

    def __init__(
        self,
        measured: Callable[[Action], HeldBytes],
        unmeasured: Callable[[Action], int] = lambda action: 0,
    ) -> None:
        self._measured, self._unmeasured = measured, unmeasured
        self._peak = self._total = HeldBytes()
        self._pending: list[tuple[float, Action, HeldBytes | None]] = []
        self._counted: tuple[list[Action], Any] = [], None
        self.start_step()

    def start_step(self, sizes: Any = None) -> None:
        """Clear the ledger for a new step; the peaks of earlier steps remain.

        Args:
            sizes: What the results of ``measured`` depended on in the last step. If its actions and
                sizes equal those of the step before, its peaks are the same and are not computed
                again. None: they are computed.
        """
        actions = [action for _, action, held in self._pending if held is None]
        if sizes is None or len(actions) < len(self._pending) or self._counted != (actions, sizes):
            self._process_pending()
            self._counted = actions, sizes
        self._pending.clear()
        self._entries: list[LedgerEntry] = []
        self._offloaded_bytes = 0
        self._held: dict[tuple[int, int], HeldBytes] = {}
        self._total = HeldBytes()
        self._started = time.perf_counter()

    def record(self, action: Action, held: HeldBytes | None) -> None:
        """Record the bytes that a microbatch holds after an action; None: those measured."""
        # Summed later: between two actions code runs slowly, with cold caches.
        self._pending.append((time.perf_counter() - self._started, action, held))

    @property
    def entries(self) -> list[LedgerEntry]:
        """The entries of the last step, one for each action that can change the sums."""
        self._process_pending()
        return self._entries

    @property
    def peak_device_bytes(self) -> int:
        """The peak on the device over all steps."""
        self._process_pending()
        return self._peak.device

    @property
    def peak_host_bytes(self) -> int:
        """The peak on the host over all steps."""
        self._process_pending()
        return self._peak.host

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to the host in the last step."""
        self._process_pending()
        return self._offloaded_bytes

    def _process_pending(self) -> None:
        device, host, moving = self._total
        for seconds, action, stored in self._pending:
            held = self._measured(action) if stored is None else stored
            key = action.stage, action.microbatch
            before, self._held[key] = self._held.get(key, _NONE_HELD), held
            self._offloaded_bytes += max(held.host - before.host, 0)
            device += held.device - before.device + self._unmeasured(action)
            host += held.host - before.host
            moving += held.moving - before.moving
            self._entries.append(LedgerEntry(seconds, action, HeldBytes(device, host, moving)))
        if self._pending:
            totals = zip(*(entry.held for entry in self._entries), strict=True)
            self._peak = HeldBytes(*map(max, self._peak, map(max, totals)))
            self._total = HeldBytes(device, host, moving)
            self._pending.clear()


class ActivationMemory:
    """The saved tensors of one rank: makes and moves the stores of microbatches in flight.

    Attributes:
        settings: The device, its copy lanes and the host's memory.
        offloads: Whether the step at hand moves any tensors to the host.
    """

    def __init__(self, settings: OffloadSettings) -> None:
        self.offloads = False
        self._measures_all = False
        self.settings = settings
        self._there: dict[_Key, MemoryPart] = {}
        self.ledger = Ledger(self._measured_after, self._bytes_for_later_slices)
        self._num_slices = 1
        self._stages: Mapping[int, StageRunner] = {}
        self._offloaded: set[_Key] = set()
        self._owned: set[int] = set()
        self._host_bytes: defaultdict[int, HostBytes] = defaultdict(dict)
        self._reserved: tuple[Sequence[Action], dict[int, HostBytes]] = (), {}

    @classmethod
    def for_device(cls, device: torch.device, budget: HostBudget | None = None) -> ActivationMemory:
        """Make the memory of a device; both copy directions share one lane at first."""
        host = HostMemory(pinned=device.type != "cpu", budget=budget)
        return cls(OffloadSettings(device, make_lanes(device, count=1), host))

    def set_measure_all(self, measures_all: bool) -> None:
        """Set whether every microbatch is measured, or only the first of each stage."""
        self._measures_all = measures_all

    def use_lanes(self, lanes: CopyLanes) -> None:
        """Use other streams for copies from and to the host from the next step on."""
        self.settings = replace(self.settings, lanes=lanes)

    def reset_peaks(self) -> None:
        """Reset the ledger, and with it the device's peak, which is compared with the ledger's."""
        self._there = {}
        self.ledger = Ledger(self._measured_after, self._bytes_for_later_slices)
        if self.settings.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.settings.device)

    @property
    def peak_without_activations(self) -> int:
        """The peak bytes on the device apart from activations, since the peak was reset."""
        device = self.settings.device
        if device.type == "cpu":
            return 0
        return torch.accelerator.max_memory_allocated(device) - self.ledger.peak_device_bytes

    def start_step(
        self, actions: Sequence[Action], stages: Mapping[int, StageRunner], num_slices: int = 1
    ) -> None:
        """Begin a step.

        Args:
            actions: The rank's actions in the plan.
            stages: The rank's stages, by index.
            num_slices: The number of slices into which sequences are cut.
        """
        memories = (m for stage in self._stages.values() for m in stage.memories.values())
        sizes = [(m.activation_bytes, m.residue_bytes, m.for_later) for m in memories]
        self.ledger.start_step(sizes)  # counts the last step, with its stages
        self._there.clear()
        self._stages, self._num_slices = stages, num_slices
        self._owned.clear()  # parameters may have moved
        self._offloaded = {(a.stage, a.microbatch) for a in actions if a.kind in _OFFLOADS}
        self.offloads = bool(self._offloaded)
        self._reserve(actions)

    def _reserve(self, actions: Sequence[Action]) -> None:
        """Allocate the plan's host memory before the step, for sizes that are known."""
        planned, host_bytes = self._reserved
        if self._offloaded and (actions is not planned or host_bytes != self._host_bytes):
            self.settings.host.preallocate(_slabs(actions, self._host_bytes))
            self._reserved = actions, {stage: {**of} for stage, of in self._host_bytes.items()}

    def abandon(self) -> None:
        """Discard everything after an error, once the device has waited for unfinished copies."""
        for store in self._stores():
            with suppress(CopyError):  # it is known, for the step has failed
                store.release_slabs()

    def discard_forwards(self) -> None:
        """Discard everything that this step has saved, because the step restarts."""
        for store in self._stores():
            store.release_slabs()
        self.ledger.start_step()
        self._there.clear()

    def open_store(self, action: Action, microbatch: Microbatch) -> ActivationStore | None:
        """Return a store for the tensors that an F saves, if it needs one."""
        key = action.stage, action.microbatch
        stage = self._stages[action.stage]
        memory = stage.memories[action.microbatch % self._num_slices]
        is_measured = self._measures_all or memory.is_measurement_due
        if key not in self._offloaded and not is_measured:
            return None
        if not self._owned:
            self._owned = {storage_address(tensor) for tensor in stage.owned_tensors()}
        # Parameters and the microbatch itself are never offloaded.
        leaves = (leaf for leaf in batch_leaves(microbatch.part) if isinstance(leaf, Tensor))
        resident = self._owned.union(map(storage_address, leaves))
        name = f"stage {action.stage}, microbatch {action.microbatch}"
        host_bytes = self._host_bytes[action.stage]
        return ActivationStore(name, resident, self.settings, host_bytes, is_measured)

    def _stores(self) -> Iterator[ActivationStore]:
        for stage in self._stages.values():
            yield from (flight.store for flight in stage.in_flight.values() if flight.store)

    def wait_for_reload(self, action: Action) -> None:
        """Make a B, BW or W wait until the offloaded tensors that it needs are back."""
        store = self._stages[action.stage].in_flight[action.microbatch].store
        if store is not None:
            store.wait_for_reload(KINDS[action.kind].needs)

    def run_copy_action(self, action: Action) -> None:
        """Run an OFFLOAD, FREE or RELOAD, and record it in the ledger."""
        store = self._stages[action.stage].in_flight[action.microbatch].store
        assert store is not None
        if action.kind in _OFFLOADS:
            store.start_offload()
        elif action.kind in RELOADS:
            store.start_reload(KINDS[action.kind].puts)
        else:
            store.free()
        self.ledger.record(action, store.measure_held_bytes())

    def _measured_after(self, action: Action) -> HeldBytes:
        key, row = (action.stage, action.microbatch), KINDS[action.kind]
        there = self._there[key] = (self._there.get(key, NOTHING) | row.puts) & ~row.drops
        measured = _BYTES.get(there)
        memory = self._stages[action.stage].memories[action.microbatch % self._num_slices]
        return HeldBytes(getattr(memory, measured) or 0 if measured else 0)

    def _bytes_for_later_slices(self, action: Action) -> int:
        """Return the bytes that an action adds: keys and values of slices, and their gradients."""
        count = self._num_slices
        if count == 1 or action.kind not in COMPUTE:
            return 0
        stage = self._stages[action.stage]
        kept = [stage.memories[place].for_later for place in range(count)]
        sizes = [of.num_bytes for of in kept], [of.gradient_bytes for of in kept]
        changes = key_value_changes(*sizes, count).get(action.kind)
        return int(changes[action.microbatch % count]) if changes else 0


def _slabs(
    actions: Sequence[Action], host_bytes: Mapping[int, HostBytes]
) -> Iterator[tuple[tuple[int, int, MemoryPart], int]]:
    """Yield the slabs of a rank's actions in order, for :meth:`HostMemory.preallocate`."""
    on_device: defaultdict[_Key, MemoryPart] = defaultdict(lambda: NOTHING)
    for kind, stage, microbatch in actions:
        key, row = (stage, microbatch), KINDS[kind]
        copied = on_device[key] & row.host_puts
        for part in MemoryPart:
            if part & (copied | row.host_drops):
                yield (*key, part), host_bytes.get(stage, {}).get(part, 0) if part & copied else 0
        on_device[key] = (on_device[key] | row.puts) & ~row.drops
