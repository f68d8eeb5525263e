"""In what the figures of a plan are counted: what its costs were given in."""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipeoffload.schedule import Costs
from lightning_pipeoffload.schedule.quantities import bytes_text, seconds_text

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

    @property
    def is_measured(self) -> bool:
        """Whether times are in seconds and memory is in bytes, so that cells have their units."""
        return self == MEASURED

    def write_time(self, value: float) -> str:
        """Write a time; where it is not measured its unit stands elsewhere."""
        return seconds_text(value) if self.is_measured else f"{value:.6g}"

    def write_memory(self, value: float) -> str:
        """Write an amount of memory; where it is not in bytes its unit stands elsewhere."""
        return bytes_text(value) if self.is_measured else f"{value:.6g}"

    def sentence(self, value: float) -> str:
        """Write a time with its unit."""
        return self.write_time(value) + ("" if self.is_measured else f" {self.time}")

    def name(self, heading: str) -> str:
        """Return a heading of a table with the unit below it, where cells have none."""
        units = {"busy": self.time, "idle": self.time, "peak memory": self.memory}
        if self.is_measured:
            return heading
        return f"{heading}\n({units[heading]})" if heading in units else heading

    @property
    def words(self) -> str:
        """What a table is in, for its title."""
        return "" if self.is_measured else f"; time in {self.time}, memory in {self.memory}"


UNITS = Units()
"""Of costs that are not given."""

MEASURED = Units("s", "bytes")
"""Of a device's data sheet, and of what was measured."""
