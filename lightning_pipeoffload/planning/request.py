"""The one way to fill a request to the planner: what is planned, on what machines, what is fixed.

Runs, ``schedule="auto"``, commands and the search of layouts fill it so. Neither torch nor
lightning is imported, so that ``pipeoffload-plan`` answers in a second where costs are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any

from lightning_pipeoffload.schedule import (
    FAMILIES,
    Costs,
    PlanOption,
    PlanRequest,
    Recipe,
    Schedule,
    ScheduleError,
    bytes_text,
    check_slices,
    device_indices,
    options,
)


@dataclass(frozen=True)
class PlannedWork:
    """A step of a pipeline: by costs that are given, by a model's shapes, or as measured.

    Attributes:
        num_ranks: Ranks of the pipeline.
        costs_of: Returns the costs of an option's stages; it may raise ScheduleError.
        memory_without_activations: Returns that of the fullest rank, in an option; or of each rank.
        has_barrier: Returns whether all ranks must end a step of an option before any rank begins
            the next one.
        steps_early: Whether an optimizer on the host steps as gradients become final.
    """

    num_ranks: int
    costs_of: Callable[[PlanOption], Costs]
    memory_without_activations: Callable[[PlanOption], float | Sequence[float]] = lambda option: 0.0
    has_barrier: Callable[[PlanOption], bool] = lambda option: False
    steps_early: bool = False


@dataclass(frozen=True)
class PlanLimits:
    """The memory that a plan has to keep.

    Attributes:
        memory: The most memory of a rank, in the unit of the costs, or that of the device at each
            place of the pipeline (see :func:`.device_indices`); None: any.
        must_fit: Whether an option that does not fit is refused. If not, a single option gets the
            plan that offloads the most.
        describe_host_shortage: Returns why a schedule's offload exceeds host memory; "" if it does
            not.
        format_memory: Formats memory in refusals.
        names: The device at each place, for refusals; (): they are numbered.
    """

    memory: float | Sequence[float] | None = None
    must_fit: bool = True
    describe_host_shortage: Callable[[Schedule, Costs], str] = lambda schedule, costs: ""
    format_memory: Callable[[float], str] = bytes_text
    names: Sequence[str] = ()

    @property
    def largest(self) -> float | None:
        """The most memory of any rank; None: any."""
        return max(self.memory) if isinstance(self.memory, Sequence) else self.memory

    def memory_deficits(self, places: Sequence[int]) -> Sequence[float]:
        """Return what each rank has less than the largest, by its place; (): all have as much."""
        if not isinstance(self.memory, Sequence) or len({*self.memory}) == 1:
            return ()
        return [max(self.memory) - self.memory[place] for place in places]

    def name_of(self, place: int) -> str:
        """Return a device's number and name."""
        return f"device {place}" + (f" ({self.names[place]})" if self.names else "")


@dataclass(frozen=True)
class PlannerOptions:
    """What is given of a plan; the planner finds the rest.

    Attributes:
        options: The options to choose among, as of :func:`options_of`.
        offload: "auto", "none", or a share of the activations.
        recipes: How each schedule is built, by its name.
        builder_options: Other options of the builders.
    """

    options: Sequence[PlanOption]
    offload: str | float = "auto"
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: FAMILIES)
    builder_options: Mapping[str, Any] = field(default_factory=dict)


def make_plan_request(
    work: PlannedWork, machines: PlanLimits, fixed: PlannerOptions, **how: Any
) -> PlanRequest:
    """Return the request.

    Args:
        work: What is planned.
        machines: The memory that there is.
        fixed: What is given of the plan.
        **how: How to look for the plan: other attributes of :class:`PlanRequest`.
    """

    def places(option: PlanOption) -> list[int]:
        return device_indices(
            fixed.recipes[option.schedule].placement(work.num_ranks, option.num_chunks)
        )

    def memory_without_activations(option: PlanOption) -> float | Sequence[float]:
        memory = work.memory_without_activations(option)
        deficits = machines.memory_deficits(places(option))
        if isinstance(memory, Sequence):
            return [*map(add, memory, deficits or [0.0] * len(memory))]
        return [memory + less for less in deficits] or memory

    return PlanRequest(
        work.num_ranks,
        fixed.options,
        work.costs_of,
        machines.largest,
        fixed.offload,
        memory_without_activations=memory_without_activations,
        name_rank=lambda option, rank: f"rank {rank}, on {machines.name_of(places(option)[rank])},",
        has_barrier=work.has_barrier,
        steps_early=lambda option: work.steps_early,
        describe_host_shortage=machines.describe_host_shortage,
        must_fit=machines.must_fit,
        format_memory=machines.format_memory,
        recipes=fixed.recipes,
        builder_options=fixed.builder_options,
        **how,
    )


def options_of(
    schedule: str,
    num_microbatches: Sequence[int],
    num_chunks: int | str | None,
    recompute: Sequence[str] = ("none",),
    head_weight_grad: Sequence[str] = ("W",),
    num_sequence_slices: int = 1,
) -> list[PlanOption]:
    """Return the options of a schedule, or with "auto" of all families.

    Args:
        schedule: Its name, or "auto".
        num_microbatches: The numbers to choose among.
        num_chunks: Stages of a rank; "auto" or None: any number that the schedule takes.
        recompute: The values to choose among.
        head_weight_grad: The same of the head's weight gradient.
        num_sequence_slices: Slices of each sequence.

    Raises:
        ScheduleError: There is no such family, or it does not accept these sizes.
    """
    if schedule != "auto":
        if schedule not in FAMILIES:
            raise ScheduleError(
                f"schedule ({schedule}) cannot be planned for a device; use auto or one of "
                f"{', '.join(FAMILIES)}"
            )
        check_slices(schedule, FAMILIES[schedule], num_sequence_slices)
        if FAMILIES[schedule].can_slice and num_sequence_slices == 1:
            raise ScheduleError(f"{schedule} is for slices of sequences; set num_sequence_slices=8")
    chunks = num_chunks if isinstance(num_chunks, int) else None
    sizes = num_microbatches, None, chunks, recompute, head_weight_grad, num_sequence_slices
    wanted = [option for option in options(*sizes) if schedule in ("auto", option.schedule)]
    if not wanted and schedule != "auto":
        raise ScheduleError(f"{schedule} does not accept num_chunks ({chunks})")
    return wanted
