"""How much memory each action of a rank takes or gives back, on the device or on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from ..actions import HOST_EFFECTS, MEMORY_EFFECTS, Action, Kind, MemoryEffect, Part, ScheduleError
from ..costs import Costs
from ..schedule import Schedule

__all__ = ["memory_changes", "part_sizes", "peak_host_memory", "peak_memory"]

PartSizes = list[float]
"""Memory of every set of parts of a stage, by the set's number."""


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the largest sum of live activations and residues on each rank's device.

    What an action adds in all counts at its start, what it takes away at its end. Only the order of
    a rank's actions matters, not when they run.
    """
    sizes = part_sizes(costs, schedule.num_stages)
    return tuple(_peak(memory_changes(rank, sizes, MEMORY_EFFECTS)) for rank in schedule)


def peak_host_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the largest sum of what each rank has on the host."""
    if not schedule.has_copies:
        return (0.0,) * schedule.num_ranks
    sizes = part_sizes(costs, schedule.num_stages)
    return tuple(_peak(memory_changes(rank, sizes, HOST_EFFECTS)) for rank in schedule)


def part_sizes(costs: Costs, num_stages: int) -> list[PartSizes]:
    """Return the memory of every set of parts, for every stage.

    Raises:
        ScheduleError: What W needs is more than the activation or the residue that it is part of.
    """
    names = ("activation", "weight_input", "weight_residue")
    stages = zip(*(costs.per_stage(name, num_stages) for name in names), strict=True)
    return [_sizes_of_stage(*stage) for stage in stages]


def _sizes_of_stage(activation: float, weight_input: float, residue: float) -> PartSizes:
    if weight_input > min(activation, residue):
        raise ScheduleError(
            f"costs.weight_input ({weight_input:g}) is part of activation ({activation:g}) and of "
            f"weight_residue ({residue:g}); use at most {min(activation, residue):g}"
        )
    sizes = {
        Part.FOR_B: activation - weight_input,
        Part.FOR_W: weight_input,
        Part.GRADIENT: residue - weight_input,
    }
    every_set = range(sum(Part) + 1)
    return [sum(size for part, size in sizes.items() if part & parts) for parts in every_set]


def memory_changes(
    actions: Iterable[Action],
    sizes: list[PartSizes],
    effects: Mapping[Kind, MemoryEffect],
) -> Iterator[float]:
    """Yield what each action of a rank adds to its memory, negative for what it takes away.

    Args:
        actions: The actions of one rank, in order.
        sizes: What ``part_sizes`` gave.
        effects: ``MEMORY_EFFECTS`` or ``HOST_EFFECTS``.
    """
    masks = {kind: (int(puts), ~int(drops)) for kind, (puts, drops) in effects.items()}
    there: dict[tuple[int, int], int] = {}
    for kind, stage, microbatch in actions:
        effect = masks.get(kind)
        if effect is None:
            yield 0.0
            continue
        puts, keeps = effect
        before = there.get((stage, microbatch), 0)
        after = there[stage, microbatch] = (before & keeps) | puts
        yield sizes[stage][after] - sizes[stage][before]


def _peak(changes: Iterator[float]) -> float:
    return max(accumulate(changes, initial=0.0))
