"""How fast this machine copies between device and host, measured rather than looked up.

Each direction alone, and both at once: where both together take about as long as one after the
other, the plan is better off with one lane that they share (PipeOffload, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from lightning_pipeoffload.runtime.memory.streams import make_lanes
from lightning_pipeoffload.runtime.timing import finished_at

_BYTES = 32 << 20
_REPETITIONS = 5
# Below this share of the time of one copy after the other, lanes of their own are worth it.
_WORTH_TWO_LANES = 0.8


@dataclass(frozen=True)
class CopySpeed:
    """Speeds of copies.

    Attributes:
        to_host: Bytes per second, device to host.
        to_device: Bytes per second, host to device.
        overlap: Time of a copy each way at once, over that of one after the other.
    """

    to_host: float
    to_device: float
    overlap: float

    @property
    def num_lanes(self) -> int:
        """Lanes to plan with: 1 where both directions take turns, 2 where they run at once."""
        return 2 if self.overlap < _WORTH_TWO_LANES else 1

    @property
    def slowed_by(self) -> float:
        """How much longer a copy takes in the plan than alone: with two lanes both are in use."""
        return max(1.0, 2 * self.overlap) if self.num_lanes == 2 else 1.0


def measure_copy_speed(
    device: torch.device, num_bytes: int = _BYTES, meet: Callable[[], None] = lambda: None
) -> CopySpeed:
    """Measure the copies between ``device`` and this host, in some milliseconds.

    Args:
        device: The device of the activations; on CPU the host copies within its own memory.
        num_bytes: The number of bytes of each copy.
        meet: Waits for the other devices that are to copy at the same time.
    """
    pinned = device.type != "cpu"
    on_device = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    lanes = make_lanes(device)

    def offload() -> None:
        lanes.d2h.copy(on_host[0], on_device[0], "a measurement")

    def reload() -> None:
        lanes.h2d.copy(on_device[1], on_host[1], "a measurement")

    def both() -> None:
        offload()
        reload()

    seconds = [_median_seconds(copy, meet) for copy in (offload, reload, both)]
    return CopySpeed(
        num_bytes / seconds[0], num_bytes / seconds[1], seconds[2] / (seconds[0] + seconds[1])
    )


def _median_seconds(copy: Callable[[], None], meet: Callable[[], None]) -> float:
    copy()  # touches the memory
    meet()
    return median(_seconds(copy) for _ in range(_REPETITIONS))


def _seconds(copy: Callable[[], None]) -> float:
    started = finished_at()
    copy()
    return finished_at() - started
