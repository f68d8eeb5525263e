"""Memory limits that differ from rank to rank, as one limit that all of them keep.

The memory of each rank is counted in shares of its own limit, each of which stands for the same
share of the largest limit. A plan keeps the largest limit by these numbers exactly where each rank
keeps its own, so builders, searches, copies and the solver know one limit only::

    limits             3   2   1 GiB
    an activation     .5  .5  .5
    counted as        .5 .75 1.5    of 3 GiB on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .actions import MemoryLimitError
from .costs import Costs
from .schedule import device_indices

_SIZES = "activation", "weight_input", "weight_residue"
_LEAST = 1e-12  # of the largest limit, for a rank that has nothing left


@dataclass(frozen=True)
class RankLimits:
    """The most memory of each rank, in the unit of the costs.

    Attributes:
        limits: By rank.
        placement: The rank of every stage.
    """

    limits: tuple[float, ...]
    placement: tuple[int, ...]

    @property
    def common_limit(self) -> float:
        """The limit of every rank, by sizes as they are counted."""
        return max(self.limits)

    def scale_to_common_limit(self, costs: Costs) -> Costs:
        """Return the costs with the memory of each rank in shares of its limit."""
        if len({*self.limits}) == 1:
            return costs
        counted: dict[str, Any] = {
            name: [
                size / self._share(rank)
                for size, rank in zip(
                    costs.per_stage(name, len(self.placement)), self.placement, strict=True
                )
            ]
            for name in _SIZES
        }
        return replace(costs, **counted)

    def actual_memory(self, rank: int, counted: float) -> float:
        """Return the memory of a rank that was counted so."""
        return counted * self._share(rank)

    def _share(self, rank: int) -> float:
        largest = self.common_limit
        return max(self.limits[rank] / largest, _LEAST) if largest else 1.0

    def error_of_tightest_rank(
        self, error: MemoryLimitError, costs: Costs, device_names: Sequence[str] = ()
    ) -> MemoryLimitError:
        """Return a refusal by counted sizes as one of the rank that has least in proportion.

        Args:
            error: The refusal.
            costs: As they are, not counted.
            device_names: The device at each place of the pipeline; (): they are numbered.
        """
        if len({*self.limits}) == 1:
            return error
        sentence, _, needed = error.args
        rank = self.tightest(costs)
        name = self.name_rank(rank, device_names)
        named = sentence.replace("{limit}", f"{{limit}} of {name}", 1)
        return MemoryLimitError(named, self.limits[rank], self.actual_memory(rank, needed))

    def tightest(self, costs: Costs) -> int:
        """Return the rank on which one microbatch takes the largest share of the limit.

        Args:
            costs: As they are, not counted.
        """
        taken = [0.0] * len(self.limits)
        counted = self.scale_to_common_limit(costs).per_stage("activation", len(self.placement))
        for size, rank in zip(counted, self.placement, strict=True):
            taken[rank] += size
        return taken.index(max(taken))

    def name_rank(self, rank: int, device_names: Sequence[str]) -> str:
        """Return words for a rank and its device; without names a device has its number alone."""
        place = device_indices(self.placement)[rank]
        name = f" ({device_names[place]})" if device_names else ""
        return f"rank {rank}, on device {place}{name},"
