"""The families of schedules: the names that need no solver, and how each is built and checked."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isnan
from typing import Any

from .actions import MemoryLimitError, ScheduleError
from .builders.classic import gpipe, interleaved_1f1b, late_weight_gradients, one_f_one_b
from .builders.grouped import equal_groups, grouped, offloaded
from .builders.sliced import seq_1f1b, seq_v, seq_zb
from .builders.v_shape import one_f_one_b_v, v, v_half, v_min
from .builders.zb import zb, zb_memory_multiple
from .builders.zb_v import zb_v
from .costs import Costs
from .schedule import Schedule, loop_placement, v_placement
from .search.problem import ROUNDING
from .simulation.memory import peak_memory
from .validate import validate

log = logging.getLogger(__name__)

_MANY_PASSES = 100_000


@dataclass(frozen=True)
class Recipe:
    """How a name becomes a schedule.

    Attributes:
        builder: ``(num_ranks, num_microbatches, num_chunks) -> Schedule``. Options beyond these,
            ``costs`` and ``memory_limit`` among them, are its keyword-only parameters.
        num_chunks: The default and minimum of stages per rank.
        max_chunks: The maximum of stages per rank; None for no limit.
        placement: Returns the rank of every stage, for a number of ranks and of stages per rank.
        takes_seconds: Whether the builder searches for longer than all others together.
        fixed_options: Options that the name implies.
        order: The name of the same order without copies, for a schedule that copies of its own
            accord; "": it does not.
    """

    builder: Callable[..., Schedule]
    num_chunks: int = 1
    max_chunks: int | None = 1
    placement: Callable[[int, int], tuple[int, ...]] = loop_placement
    takes_seconds: bool = False
    fixed_options: Mapping[str, Any] = field(default_factory=dict)
    order: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that may be given."""
        parameters = inspect.signature(self.builder).parameters.values()
        names = (p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        return tuple(name for name in names if name not in self.fixed_options)

    @property
    def respects_memory_limit(self) -> bool:
        """Whether the builder adapts the order to the memory limit."""
        return "memory_limit" in self.options

    @property
    def can_slice(self) -> bool:
        """Whether the builder runs slices of sequences, in a number that is given."""
        return "num_sequence_slices" in self.options


def build_from_recipe(
    recipe: Recipe,
    name: str,
    sizes: tuple[int, int, int | None],
    costs: Costs | None = None,
    memory_limit: float | None = None,
    **options: Any,
) -> Schedule:
    """Build a schedule by its recipe, and check it.

    Args:
        name: The name of the schedule.
        sizes: Ranks of the pipeline, microbatches of one step, and stages per rank; None: the
            schedule's default.
        costs: The costs of the stages; builders that do not search ignore the times.
        memory_limit: The most memory of a rank, in the unit of ``costs``; without costs the
            activation of a stage and microbatch is 1.
        **options: Other options of the builder, such as ``group_size``.

    Raises:
        ScheduleError: The schedule does not accept a size or an option, or the order is not valid.
        MemoryLimitError: The schedule needs more memory than ``memory_limit``.
    """
    num_ranks, num_microbatches, num_chunks = sizes
    check_positive_integers(num_ranks=num_ranks, num_microbatches=num_microbatches)
    num_chunks = _checked_chunks(name, recipe, num_chunks)
    num_slices = options.pop("num_sequence_slices", 1)
    check_slices(name, recipe, num_slices)
    if num_slices > 1:
        options["num_sequence_slices"] = num_slices
    for option in options:
        if option not in recipe.options:
            takes = ", ".join(recipe.options) or "no options"
            raise ScheduleError(
                f"option {option!r} is unknown to schedule {name}, it takes {takes}"
            )
    check_limit(memory_limit)
    offered = {"costs": costs, "memory_limit": memory_limit, **options}
    accepted = {option: offered[option] for option in recipe.options if option in offered}
    checked_sizes = num_ranks, num_microbatches, num_chunks
    _warn_of_long_build(*checked_sizes)
    schedule = replace(
        _built(recipe.builder, *checked_sizes, **recipe.fixed_options, **accepted), name=name
    )
    _check_memory(schedule, costs or Costs.unit(), memory_limit)
    return schedule


def _warn_of_long_build(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    num_passes = num_ranks * num_microbatches * num_chunks
    if num_passes > _MANY_PASSES:
        log.warning(
            "building a schedule of %s microbatches over %s stages, %s passes of each kind: that "
            "takes a minute or more for every million",
            f"{num_microbatches:,}",
            num_ranks * num_chunks,
            f"{num_passes:,}",
        )


def _built(builder: Callable[..., Schedule], *sizes: int, **options: Any) -> Schedule:
    # An unhashable value is a mistake, which the builder explains better than the cache.
    is_askable = all(isinstance(value, Hashable) for value in options.values())
    make = _build_once if is_askable else _build_once.__wrapped__
    return make(builder, *sizes, **options)


@lru_cache(maxsize=64)  # A run asks for the same one several times, and some take seconds.
def _build_once(builder: Callable[..., Schedule], *sizes: int, **options: Any) -> Schedule:
    schedule = builder(*sizes, **options)
    validate(schedule)
    return schedule


def check_schedule(
    schedule: Schedule, costs: Costs | None = None, memory_limit: float | None = None
) -> None:
    """Validate a schedule of any origin, and check its memory against a limit.

    Args:
        costs: The memory of its stages; None: an activation is 1.
        memory_limit: The most memory of a rank; None: any.

    Raises:
        ScheduleError: A rule is broken.
        MemoryLimitError: A rank needs more memory than ``memory_limit``.
    """
    check_limit(memory_limit)
    validate(schedule)
    _check_memory(schedule, costs or Costs.unit(), memory_limit)


def check_positive_integers(**sizes: Any) -> None:
    """Check numbers of ranks, microbatches or stages.

    Raises:
        ScheduleError: A size is no positive integer.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ScheduleError(f"{name} ({size!r}) must be a whole number from 1 on; use {name}=4")


def _checked_chunks(name: str, recipe: Recipe, num_chunks: int | None) -> int:
    if num_chunks is None:
        return recipe.num_chunks
    check_positive_integers(num_chunks=num_chunks)
    at_most = recipe.max_chunks or num_chunks
    if recipe.num_chunks <= num_chunks <= at_most:
        return num_chunks
    allowed = f"{recipe.num_chunks}" if recipe.max_chunks else f"{recipe.num_chunks} or more"
    other = "interleaved_1f1b" if num_chunks > 1 else "1f1b"
    raise ScheduleError(
        f"num_chunks ({num_chunks}) must be {allowed} for {name}; use that, or schedule={other}"
    )


def check_slices(name: str, recipe: Recipe, num_sequence_slices: Any) -> None:
    """Check a number of slices of sequences for a schedule.

    Raises:
        ScheduleError: It is no positive integer, or the schedule runs whole sequences only.
    """
    check_positive_integers(num_sequence_slices=num_sequence_slices)
    if num_sequence_slices > 1 and not recipe.can_slice:
        can = ", ".join(other for other, each in FAMILIES.items() if each.can_slice)
        raise ScheduleError(
            f"num_sequence_slices ({num_sequence_slices}) must be 1 for {name}, which runs whole "
            f"sequences; use that, or schedule={can}"
        )


def check_limit(memory_limit: Any) -> None:
    """Check the type of a memory limit.

    Raises:
        ScheduleError: It is no number.
    """
    is_number = isinstance(memory_limit, (int, float)) and not isnan(memory_limit)
    if memory_limit is not None and not is_number:
        raise ScheduleError(
            f"memory_limit ({memory_limit!r}) must be a number, in the unit of costs.activation"
        )


def _check_memory(schedule: Schedule, costs: Costs, memory_limit: float | None) -> None:
    peaks = peak_memory(schedule, costs)
    if memory_limit is not None and max(peaks) > memory_limit * (1 + ROUNDING):
        rank = peaks.index(max(peaks))
        sentence = (
            f"{{limit}} is less than the {{needed}} that {schedule.name} needs on rank {rank}; "
            f"raise the limit, or use a schedule that needs less"
        )
        raise MemoryLimitError(sentence, memory_limit, max(peaks))


FAMILIES = {
    "gpipe": Recipe(gpipe),
    "1f1b": Recipe(one_f_one_b),
    "interleaved_1f1b": Recipe(interleaved_1f1b, 2, None),
    "zb_h1": Recipe(late_weight_gradients, fixed_options={"depth": 1}),
    "zb_h2": Recipe(late_weight_gradients, fixed_options={"depth": 2}),
    "zb_1p": Recipe(zb_memory_multiple, fixed_options={"multiple": 1}),
    "zb_2p": Recipe(zb_memory_multiple, fixed_options={"multiple": 2}),
    "zb": Recipe(zb),
    "zb_v": Recipe(zb_v, 2, 2, v_placement),
    "1f1b_v": Recipe(one_f_one_b_v, 2, 2, v_placement),
    "v_min": Recipe(v_min, 2, 2, v_placement, takes_seconds=True),
    "v_half": Recipe(v_half, 2, 2, v_placement, takes_seconds=True),
    "v": Recipe(v, 2, 2, v_placement, takes_seconds=True),
    "gis": Recipe(equal_groups, 2, None, fixed_options={"group": "all"}),
    "gis_h": Recipe(equal_groups, 2, None, fixed_options={"group": "half"}),
    "grouped": Recipe(grouped, 2, None),
    "uniform": Recipe(equal_groups, 2, None, fixed_options={"group": "one"}),
    "po_h": Recipe(offloaded, 2, None, fixed_options={"amount": "half"}, order="uniform"),
    "po_f": Recipe(offloaded, 2, None, fixed_options={"amount": "full"}, order="uniform"),
    "seq_1f1b": Recipe(seq_1f1b),
    "seq_zb": Recipe(seq_zb),
    "seq_v": Recipe(seq_v, 2, 2, v_placement),
}
