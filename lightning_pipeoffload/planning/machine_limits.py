"""What the ranks' machines have left for a plan: on the devices, and on the hosts.

Known in bytes once a few steps have run, so that a plan for which they have not enough is refused
before it runs, not in the middle of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pipeoffload.runtime.memory.host_memory import HostBudget, slab_bytes
from lightning_pipeoffload.schedule import Costs, Schedule, peak_host_memory
from lightning_pipeoffload.schedule.quantities import bytes_text


@dataclass(frozen=True)
class MachineLimits:
    """How much memory the ranks have for what a plan keeps.

    Attributes:
        device: Bytes that each device has left for a plan; None: no limit.
        hosts: What each rank may take of its host's memory; None, or no entry: anything.
    """

    device: float | None = None
    hosts: Sequence[HostBudget | None] = ()

    def shortage(self, schedule: Schedule, costs: Costs) -> str:
        """Say which rank would take more of its host than it may; empty where none does.

        Args:
            schedule: A schedule with its copies.
            costs: Costs in seconds and bytes.
        """
        peaks = peak_host_memory(schedule, _in_pieces(costs, schedule.num_stages))
        for rank, (peak, budget) in enumerate(zip(peaks, self.hosts, strict=False)):
            if budget is not None and peak > budget.num_bytes:
                return (
                    f"rank {rank} of the pipeline would take {bytes_text(peak)} of host memory "
                    f"for what {schedule.name} offloads, and {budget.origin}"
                )
        return ""


def _in_pieces(costs: Costs, num_stages: int) -> Costs:
    """Return the costs with the memory that the host's pool takes for each part of a stage.

    Where stages are of different sizes the pool may take more: one does not fit another's pieces.
    """
    names = ("activation", "weight_input", "weight_residue")
    parts = [
        (slab_bytes(kept - for_w), slab_bytes(for_w), slab_bytes(residue - for_w))
        for kept, for_w, residue in zip(
            *(costs.per_stage(name, num_stages) for name in names), strict=True
        )
    ]
    return replace(
        costs,
        activation=[for_b + for_w for for_b, for_w, _ in parts],
        weight_input=[for_w for _, for_w, _ in parts],
        weight_residue=[for_w + gradient for _, for_w, gradient in parts],
    )
