"""Memory limits of plans: as users write them, and as devices and hosts have memory left."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import torch

from lightning_pipeoffload.runtime.device import Device
from lightning_pipeoffload.runtime.memory import HostBudget, slab_bytes
from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    bytes_text,
    device_indices,
    peak_host_memory,
)

log = logging.getLogger(__name__)

SHARE_PLANNED = 0.9
"""Of a device's memory; the rest is for fragments, and for what no plan counts: CUDA and NCCL."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", start=1)}

_LEAST = 1 << 10  # fewer bytes are a unit that was left out

Limit = int | str | Sequence[int | str] | None
"""A limit as users write it: of every rank, a list in the order of their devices, or None."""


def parse_bytes(value: int | str, name: str = "memory_limit", is_rate: bool = False) -> int:
    """Read an amount of memory: bytes, or a number with a unit, "40GiB" or "500 MB".

    With ``is_rate`` it is bytes per second, which messages then say.

    Raises:
        ValueError: It is neither, or its unit was left out; the message begins with ``name``.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
    unit = _UNITS.get(match[2]) if match else None
    amount = int(float(match[1]) * unit) if match and unit else 0
    if not match or not amount:
        right = (
            "rate; use bytes per second, such as 50GB, which is 400 Gbit/s"
            if is_rate
            else 'amount of memory; use bytes, or a text such as "40GiB"'
        )
        raise ValueError(f"{name}={value!r} is no {right}")
    if not match[2] and amount < _LEAST:
        size, meant = ("bytes per second", "GB") if is_rate else ("bytes", "GiB")
        raise ValueError(
            f'{name}={value!r} is {amount} {size}; did you mean "{match[1]}{meant}"? If not, write '
            f'"{match[1]}B"'
        )
    return amount


def parse_limits(
    value: Limit, name: str, num_ranks: int, rank_order: str = "pipeline_inner"
) -> list[int] | None:
    """Return the limit of the device at each place of a pipeline; None: there is none.

    Args:
        value: Of a list each entry is of one global rank, or, where it has as many entries as a
            pipeline has ranks, of this place in each replica. Several replicas have the least.
        name: The argument's name, for errors.
        num_ranks: Ranks of a pipeline.
        rank_order: See :class:`.RankMesh`.

    Raises:
        ValueError: An entry is no amount of memory.
    """
    if value is None:
        return None
    if isinstance(value, (int, str)):
        return [parse_bytes(value, name)] * num_ranks
    sizes = [parse_bytes(entry, f"{name}[{place}]") for place, entry in enumerate(value)]
    num_replicas = len(sizes) // num_ranks
    is_inner = rank_order == "pipeline_inner"
    steps = (1, num_ranks) if is_inner else (num_replicas, 1)  # to the next place and replica
    return [
        min(sizes[place * steps[0] + replica * steps[1]] for replica in range(num_replicas))
        for place in range(num_ranks)
    ]


def bytes_formatter(limit: Limit) -> Callable[[float], str]:
    """Return a function that writes bytes in the unit of ``limit``, and in MiB or GiB next to it.

    So a message on ``memory_limit="10GB"`` has "10.00 GB = 9,536.75 MiB". None: in MiB or GiB only;
    of a list the first entry counts.
    """
    if isinstance(limit, Sequence) and not isinstance(limit, str):
        limit = limit[0]
    unit = "".join(filter(str.isalpha, str(limit))) if limit is not None else "MiB"

    def write(num_bytes: float) -> str:
        amount, text = num_bytes / _UNITS[unit], bytes_text(num_bytes)
        if limit is None or text.split()[-1] == unit:
            return text
        is_whole = unit in ("", "B")
        in_unit = f"{ceil(amount)} bytes" if is_whole else f"{ceil(amount * 100) / 100:,.2f} {unit}"
        return f"{in_unit} = {text}"

    return write


class DeviceMemory(NamedTuple):
    """The memory of a rank's device, measured by that rank.

    Attributes:
        shared_by: The machine and UUID, equal on ranks that compute on one device; () where
            devices have no UUID, so that each rank counts as the only one on its device.
        free: Bytes that no process has allocated.
        reserved: Bytes that the allocator of this rank holds.
    """

    shared_by: tuple[str, ...]
    free: int
    reserved: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory | None:
        """Measure the memory of this rank's device; None on CPU."""
        if device.type == "cpu":
            return None
        known = Device.of(device)
        free, _ = torch.accelerator.get_memory_info(device)
        shared_by = (known.node, known.uuid) if known.uuid else ()
        return cls(shared_by, free, torch.accelerator.memory_reserved(device))

    def plannable_bytes(self, of_all: Iterable[DeviceMemory]) -> int:
        """Return the bytes that plans may use: ranks on one device get equal parts of what is free.

        Args:
            of_all: The memory that each rank of the run has measured, this one included.
        """
        sharing = [each for each in of_all if self.shared_by and each.shared_by == self.shared_by]
        free = min((each.free for each in sharing), default=self.free) // max(1, len(sharing))
        # The driver, NCCL and other processes have memory that torch does not count.
        return int(SHARE_PLANNED * (free + self.reserved))


def reserve_memory(device: torch.device, missing: int) -> int:
    """Let torch's allocator take what plans may use of a device, all at once.

    Later it would take it piece by piece, and where a piece is refused it frees others and waits
    for the device, open receives of messages included: two ranks that do may wait for ever.

    Args:
        device: The device of this rank.
        missing: Bytes that the allocator does not have yet; nothing happens where none are.

    Returns:
        The bytes that were taken.
    """
    if missing <= 0:
        return 0
    try:
        torch.empty(missing, dtype=torch.uint8, device=device)  # the allocator keeps it
    except torch.OutOfMemoryError as error:
        log.warning(
            "%s does not give %s: %s", device, bytes_text(missing), str(error).split("\n")[0]
        )
        return 0
    return missing


@dataclass(frozen=True)
class MachineLimits:
    """The memory of a pipeline's devices and hosts for a plan, in the order of the user's devices.

    Attributes:
        devices: Bytes that each device has left for activations; None: no limit.
        hosts: The most host memory of each rank; None, or no entry: no limit.
        names: The devices' names; (): they need none.
    """

    devices: Sequence[float] | None = None
    hosts: Sequence[HostBudget | None] = ()
    names: Sequence[str] = ()

    def reordered(self, places: Sequence[int]) -> MachineLimits:
        """Return those of the same devices in another order, as :meth:`.Devices.reordered`."""
        devices = None if self.devices is None else [self.devices[place] for place in places]
        hosts = [self.hosts[place] for place in places] if self.hosts else ()
        names = [self.names[place] for place in places] if self.names else ()
        return MachineLimits(devices, hosts, names)

    def describe_host_shortage(self, schedule: Schedule, costs: Costs) -> str:
        """Name a rank that would take more of its host than it may; "" where none does."""
        if not self.hosts:
            return ""
        peaks = peak_host_memory(schedule, _in_slabs(costs, schedule.num_stages))
        for rank, place in enumerate(device_indices(schedule.placement)):
            peak, budget = peaks[rank], self.hosts[place]
            if budget is not None and peak > budget.num_bytes:
                return (
                    f"rank {rank} of the pipeline would take {bytes_text(peak)} of host memory "
                    f"for what {schedule.name} offloads, and {budget.origin}"
                )
        return ""


def _in_slabs(costs: Costs, num_stages: int) -> Costs:
    """Return the costs with memory rounded up to the slabs of the host's pool.

    Where stages differ in size the pool may take more, for slabs of one size fit no other.
    """
    names = ("activation", "weight_input", "weight_residue")
    sizes = [
        (slab_bytes(kept - for_w), slab_bytes(for_w), slab_bytes(residue - for_w))
        for kept, for_w, residue in zip(
            *(costs.per_stage(name, num_stages) for name in names), strict=True
        )
    ]
    return replace(
        costs,
        activation=[for_b + for_w for for_b, for_w, _ in sizes],
        weight_input=[for_w for _, for_w, _ in sizes],
        weight_residue=[for_w + gradient for _, for_w, gradient in sizes],
    )
