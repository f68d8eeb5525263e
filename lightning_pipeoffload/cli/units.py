"""In what the figures of a plan are counted: what its costs were given in."""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipeoffload.schedule import Costs
from lightning_pipeoffload.schedule.mebibytes import mebibytes

__all__ = ["MEASURED", "UNITS", "Units"]

_TIMES = ("forward", "backward_input", "backward_weight")


class Units(NamedTuple):
    """What one second and one byte stand for.

    Attributes:
        time: "s", or "units" where F, B and W all take 1.
        memory: "activations of a rank", what a microbatch keeps on a rank's stages together,
            "unit of costs.activation" where that is given, or "bytes".
    """

    time: str = "units"
    memory: str = "activations of a rank"

    @classmethod
    def of(cls, costs: Costs) -> Units:
        """Return the units of costs as the user gave them, of a rank's part of the model."""
        is_unit = all(getattr(costs, name) == 1 for name in _TIMES)
        time = "units" if is_unit else "s"
        return cls(time, cls().memory if costs.activation == 1 else "unit of costs.activation")

    def write_time(self, value: float) -> str:
        """Write a time, whose unit stands elsewhere; one that was measured with four digits."""
        return f"{value:.4g}" if self.memory == MEASURED.memory else f"{value:g}"

    def write_memory(self, value: float) -> str:
        """Write an amount of memory, bytes with their unit."""
        return mebibytes(value) if self.memory == MEASURED.memory else f"{value:g}"

    def write_limit(self, value: float) -> str:
        """Write a limit of memory above a column."""
        return mebibytes(value) if self.memory == MEASURED.memory else f"{value:.4g}"

    def name(self, heading: str) -> str:
        """Return a heading of a table with the unit below it, where it has one."""
        unit = {
            "busy": self.time,
            "idle": self.time,
            "peak memory": None if self.memory == MEASURED.memory else self.memory,
        }.get(heading)
        return heading if unit is None else f"{heading}\n({unit})"


UNITS = Units()
"""Of costs that are not given."""

MEASURED = Units("s", "bytes")
"""Of a device's data sheet, and of what was measured."""
