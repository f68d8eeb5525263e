"""The devices of a pipeline, and how much slower some are than others."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import mean
from typing import Any, NamedTuple

import torch

from lightning_pipeoffload.runtime.device.accelerator import accelerator_module
from lightning_pipeoffload.schedule import device_indices

# Between devices of one name a smaller ratio counts as none; ranks on CPUs share these.
_NOISE, _NOISE_OF_CPUS = 1.1, 1.5
_CPU = "CPU"


class Device(NamedTuple):
    """What is known of a device before it computes.

    Attributes:
        name: By which its speed is known; of a CPU its architecture.
        uuid: By which ``CUDA_VISIBLE_DEVICES`` selects it; "" where there is none.
        node: Its machine.
        memory: Bytes; 0 of a CPU, whose ranks share it.
    """

    name: str
    uuid: str
    node: str
    memory: int = 0

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Describe a device of this process."""
        if device.type == "cpu":
            return cls(f"{_CPU} {platform.machine()}", "", platform.node())
        module: Any = accelerator_module()
        uuid = getattr(module.get_device_properties(device), "uuid", "")
        memory = torch.accelerator.get_memory_info(device)[1]
        return cls(module.get_device_name(device), str(uuid), platform.node(), memory)


@dataclass(frozen=True)
class Devices:
    """The devices of a pipeline, by place: in the order in which the user counts them.

    Attributes:
        each: Each device; of several replicas the first one's, with the names of all.
        slowness: The time of a block on each, as a multiple of that on the fastest; a replica is as
            slow as its slowest device at a place. Of alike devices all are 1.
    """

    each: tuple[Device, ...]
    slowness: tuple[float, ...]

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Devices:
        """Return the devices before it is known how fast they are."""
        return cls((*devices,), (1.0,) * len(devices))

    def with_slowness_from(self, seconds: Sequence[float]) -> Devices:
        """Return the devices with ratios of times; small ones between equal names are noise.

        Args:
            seconds: What equal work takes on each, in any unit.
        """
        times = [*seconds]
        for name in {*self.names}:
            alike = [place for place, other in enumerate(self.names) if other == name]
            of_name = [times[place] for place in alike]
            noise = _NOISE_OF_CPUS if name.startswith(_CPU) else _NOISE
            if len(alike) > 1 and max(of_name) < noise * min(of_name):
                typical = exp(mean(map(log, of_name)))
                for place in alike:
                    times[place] = typical
        least = min(times)
        return replace(self, slowness=(*(time / least for time in times),))

    def reordered(self, places: Sequence[int]) -> Devices:
        """Return the same devices in another order: at each place that of ``places``."""
        each, slowness = ((*(of[p] for p in places),) for of in (self.each, self.slowness))
        return Devices(each, slowness)  # type: ignore[arg-type]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each."""
        return tuple(device.name for device in self.each)

    @property
    def are_equally_fast(self) -> bool:
        """Whether all are about as fast."""
        return max(self.slowness) == 1.0

    @property
    def have_one_name(self) -> bool:
        return len({*self.names}) == 1

    def memory_per_stage(self, placement: Sequence[int]) -> tuple[float, ...]:
        """Return the bytes of its device that each stage may have; () where devices are alike."""
        sizes = [device.memory for device in self.each]
        has_alike_memory = max(sizes) < _NOISE * min(sizes)
        if (self.are_equally_fast and has_alike_memory) or not min(sizes):
            return ()
        places = device_indices(placement)
        return tuple(sizes[places[rank]] / [*placement].count(rank) for rank in placement)

    def slowness_per_stage(self, placement: Sequence[int]) -> tuple[float, ...]:
        """Return the slowness of each stage's device; () where all are alike."""
        if self.are_equally_fast:
            return ()
        places = device_indices(placement)
        return tuple(self.slowness[places[rank]] for rank in placement)
