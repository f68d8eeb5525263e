"""The strategy's arguments, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pipeoffload.planning.argument_checks import (
    check_blocks,
    check_count,
    check_decides_offload,
    check_flag,
    check_microbatch_weight,
    check_num_microbatches,
    check_offload,
    check_optimizer_sync,
    check_plan_cache,
    check_rank_order,
    check_schedule,
    check_sharding,
    check_split,
    is_name,
)
from lightning_pipeoffload.planning.memory_limit import parse_bytes
from lightning_pipeoffload.runtime.compiled.block_compiler import check_compile
from lightning_pipeoffload.runtime.cut.partition import CutSettings
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.memory.host_memory import HostBudget
from lightning_pipeoffload.runtime.memory.recompute import check_recompute
from lightning_pipeoffload.runtime.transport import MOST_MICROBATCHES
from lightning_pipeoffload.schedule import (
    TRANSFERS,
    Kind,
    Schedule,
    ScheduleError,
    accept,
)
from lightning_pipeoffload.schedule.build import DEFAULT_SCHEDULE
from lightning_pipeoffload.schedule.candidates import Option
from lightning_pipeoffload.schedule.families import FAMILIES
from lightning_pipeoffload.schedule.recipe import Recipe, build_by
from lightning_pipeoffload.schedule.solver.hinted_model import check_solver
from lightning_pipeoffload.schedule.solver.optpipe import check_solver_seconds

ScheduleLike = str | PathLike[str] | Schedule | Callable[[int, int], Schedule]


@dataclass(frozen=True)
class PipelineSettings:
    """How to pipeline; each attribute is an argument of PipeOffloadStrategy.

    Raises:
        ValueError: A value cannot be.
    """

    pipeline_parallel_size: int | str = "auto"
    data_parallel_size: int | str = 1
    rank_order: str = "pipeline_inner"
    sharding: str = "none"
    num_microbatches: int | str = "auto"
    num_chunks: int | str = "auto"
    schedule: ScheduleLike = "auto"
    blocks: str | Sequence[str] | None = None
    split: str | Sequence[int] = "auto"
    microbatch_weight: str | Callable[[Any], float] = "samples"
    optimizer_sync: str = "barrier"
    per_parameter_optimizer: bool = False
    offload: str | float = "auto"
    recompute: str = "none"
    memory_limit: int | str | None = None
    host_memory_limit: int | str | None = None
    compile: bool | Mapping[str, Any] = False
    solver_seconds: float = 60.0
    plan_cache: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("pipeline_parallel_size", "data_parallel_size", "num_chunks"):
            check_count(name, getattr(self, name))
        check_rank_order(self.rank_order)
        check_sharding(self.sharding)
        check_num_microbatches(self.num_microbatches)
        check_blocks(self.blocks)
        check_split(self.split)
        check_microbatch_weight(self.microbatch_weight)
        check_optimizer_sync(self.optimizer_sync)
        check_flag("per_parameter_optimizer", self.per_parameter_optimizer)
        check_recompute(self.recompute)
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
        if self.host_memory_limit is not None:
            parse_bytes(self.host_memory_limit, "host_memory_limit")
        check_offload(self.offload)
        check_schedule(self.schedule)
        check_compile(self.compile)
        check_solver_seconds(self.solver_seconds)
        check_plan_cache(self.plan_cache)
        if self.is_solved:
            check_solver()
            check_decides_offload(self.offload)

    @property
    def is_chosen(self) -> bool:
        """Whether the first batch decides which schedule is taken."""
        return self.schedule in ("auto", "optpipe")

    @property
    def is_solved(self) -> bool:
        """Whether a solver improves the plan while it is in use."""
        return self.schedule == "optpipe"

    @property
    def cache_folder(self) -> str | None:
        """The folder of plans that were found; None: the user's."""
        return None if self.plan_cache is None else str(Path(self.plan_cache).expanduser())

    def num_ranks(self, world_size: int) -> int:
        """Return the ranks of one pipeline.

        Raises:
            ValueError: The devices do not make that many pipelines of that many ranks.
        """
        return self._sizes(world_size)[1]

    def num_replicas(self, world_size: int) -> int:
        """Return the number of pipelines.

        Raises:
            ValueError: The devices do not make that many pipelines of that many ranks.
        """
        return self._sizes(world_size)[0]

    def num_sharing(self, num_replicas: int) -> int:
        """Return how many replicas share out what an optimizer keeps; 1: each has all of it."""
        return num_replicas if self.sharding == "optimizer" else 1

    def _sizes(self, world_size: int) -> tuple[int, int]:
        """Return replicas, and ranks of each."""
        replicas, ranks = self.data_parallel_size, self.pipeline_parallel_size
        if not isinstance(replicas, int):
            replicas = world_size // ranks or 1 if isinstance(ranks, int) else 1
        if not isinstance(ranks, int):
            ranks = world_size // replicas or 1
        if replicas * ranks != world_size:
            raise ValueError(self._explain_sizes(world_size, replicas, ranks))
        return replicas, ranks

    def _explain_sizes(self, world_size: int, replicas: int, ranks: int) -> str:
        sizes = {"pipeline_parallel_size": ranks, "data_parallel_size": replicas}
        instead = [f"devices={replicas * ranks}"]
        for name, size in sizes.items():
            if world_size % (replicas * ranks // size) == 0:
                instead.append(f"{name}={world_size // (replicas * ranks // size)}")
        product = " times ".join(f"{name} ({size})" for name, size in sizes.items())
        return f"devices ({world_size}) are not {product}; use {' or '.join(instead)}"

    @property
    def default_schedule(self) -> str:
        """What "auto" and "optpipe" stand for until a schedule is chosen, and if none may be."""
        return DEFAULT_SCHEDULE if self.num_chunks in ("auto", 1) else "uniform"

    def cut_settings(self, group: PipelineGroup) -> CutSettings:
        """Return how to cut a module for the ranks of a pipeline, as they are placed now."""
        return CutSettings(
            group.stage_ranks,
            self.blocks,
            self.split,
            self.recompute,
            tuple(group.global_ranks[rank] for rank in group.stage_ranks),
            group.replicas.first,
            self.compile,
        )

    @property
    def limit_bytes(self) -> int | None:
        """The most memory of a device that a plan may take; None: any."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def limit_on(self, device_limit: float | None) -> float | None:
        """Return the same for a device that has so much; what is given counts before that."""
        return device_limit if self.limit_bytes is None else self.limit_bytes

    def host_budget(self, num_local_ranks: int) -> HostBudget | None:
        """Return the most host memory of a rank, before any has taken some; None: any.

        Args:
            num_local_ranks: Ranks on this machine.
        """
        if self.host_memory_limit is None:
            return HostBudget.share_of_machine(num_local_ranks)
        return HostBudget.given(parse_bytes(self.host_memory_limit, "host_memory_limit"))

    def is_limited(self, on_accelerator: bool) -> bool:
        """Whether a plan has a memory limit to keep, given or the devices' own.

        Args:
            on_accelerator: Whether the devices have a memory of their own.
        """
        return self.memory_limit is not None or self.keeps_device_limit(on_accelerator)

    def keeps_device_limit(self, on_accelerator: bool) -> bool:
        """Whether a plan is to fit what the devices have left, for want of a limit.

        Args:
            on_accelerator: Whether the devices have a memory of their own.
        """
        return on_accelerator and self.memory_limit is None and self.offload == "auto"

    def plans_memory(self, on_accelerator: bool) -> bool:
        """Whether what is kept on the device is to be planned."""
        return self.is_limited(on_accelerator) or self.offload not in ("auto", "none")

    def option(self, num_microbatches: int) -> Option:
        """Return the schedule that was named, or stands for "auto" until one is chosen."""
        name, recipe = self._recipe
        is_asked = is_name(self.schedule) and isinstance(self.num_chunks, int)
        num_chunks = int(self.num_chunks) if is_asked else recipe.num_chunks
        return Option(name, num_chunks, num_microbatches, self.recompute)

    @property
    def own_recipe(self) -> dict[str, Recipe]:
        """How a schedule is built that was given in place of a name; empty: none was."""
        return {} if is_name(self.schedule) else dict([self._recipe])

    def make_schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Build the schedule for that many microbatches, without regard to costs and limits.

        Raises:
            ScheduleError: There is no schedule, or a given one is of another size.
        """
        option = self.option(num_microbatches)
        sizes = num_ranks, num_microbatches, option.num_chunks
        return build_by(self._recipe[1], option.schedule, sizes)

    def provisional_schedule(self, num_ranks: int) -> Schedule:
        """Build a schedule before the batch is known: it tells which rank holds which stage."""
        if isinstance(self.num_microbatches, int):
            return self.make_schedule(num_ranks, self.num_microbatches)
        fixed = self._fixed_schedule()
        return self.make_schedule(num_ranks, fixed.num_microbatches if fixed else 2 * num_ranks)

    def choose_num_microbatches(
        self, num_ranks: int, batch_size: int, least_samples: int = 1
    ) -> int:
        """Choose how many microbatches the first batch is cut into.

        Args:
            num_ranks: The number of ranks of the pipeline.
            batch_size: The samples of the batch.
            least_samples: The samples that a microbatch needs, where the number is chosen.

        Raises:
            ValueError: The batch cannot be cut so.
        """
        if isinstance(self.num_microbatches, int):
            wanted = self.num_microbatches
        else:
            fixed = self._fixed_schedule()
            wanted = (
                fixed.num_microbatches
                if fixed
                else self._legal_divisor(num_ranks, batch_size, least_samples)
            )
        if batch_size % wanted:
            raise ValueError(
                f"a first batch of {batch_size} samples cannot be cut into {wanted} equal "
                f"microbatches; use a batch_size that is a multiple of {wanted}, or another "
                f"num_microbatches"
            )
        return wanted

    def more_microbatches(self, num_microbatches: int, batch_size: int) -> int | None:
        """Return the next number of microbatches worth trying: twice as many or more; None: none.

        Args:
            num_microbatches: What :meth:`choose_num_microbatches` has chosen.
            batch_size: The samples of the batch.
        """
        if self.num_microbatches != "auto":
            return None
        most = min(batch_size, MOST_MICROBATCHES) + 1
        counts = range(2 * num_microbatches, most)
        return next((count for count in counts if batch_size % count == 0), None)

    def _legal_divisor(self, num_ranks: int, batch_size: int, least_samples: int) -> int:
        most = min(max(batch_size // least_samples, 1), MOST_MICROBATCHES)
        divisors = [n for n in range(1, most + 1) if batch_size % n == 0]
        enough = [n for n in divisors if n >= 2 * num_ranks]
        for count in (*enough, *(n for n in reversed(divisors) if n < 2 * num_ranks)):
            try:
                self.make_schedule(num_ranks, count)
            except ScheduleError:
                continue
            return count
        raise ValueError(
            f"a batch of {batch_size} samples cannot be cut into microbatches for schedule "
            f"{self.schedule} on {num_ranks} ranks; use a batch_size that is a multiple of "
            f"{num_ranks}"
        )

    def _fixed_schedule(self) -> Schedule | None:
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if callable(self.schedule) or is_name(self.schedule):
            return None
        return Schedule.from_csv(self.schedule)

    @property
    def _recipe(self) -> tuple[str, Recipe]:
        """The schedule's name, and how it is built."""
        if is_name(self.schedule):
            name = self.default_schedule if self.is_chosen else str(self.schedule)
            return name, FAMILIES[name]
        given = self._fixed_schedule()
        if given is not None:
            return given.name, _recipe_of(given)
        assert callable(self.schedule)
        name = getattr(self.schedule, "__name__", "")
        return name if name.isidentifier() else "given", _recipe_calling(self.schedule)


def _recipe_of(given: Schedule) -> Recipe:
    """Return how to build a schedule that is there."""

    def build(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
        return _checked(given, num_ranks, num_microbatches)

    return Recipe(build, given.num_chunks, None, lambda num_ranks, num_chunks: given.placement)


def _recipe_calling(function: Callable[[int, int], Schedule]) -> Recipe:
    """Return how to build what a user's function returns."""

    def build(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
        given = function(num_ranks, num_microbatches)
        if not isinstance(given, Schedule):
            raise ScheduleError(
                f"schedule={function!r} returned {given!r} for {num_ranks} ranks and "
                f"{num_microbatches} microbatches; it must return a Schedule"
            )
        return _checked(given, num_ranks, num_microbatches)

    return Recipe(build, 1, None)


def _checked(given: Schedule, num_ranks: int, num_microbatches: int) -> Schedule:
    if (given.num_ranks, given.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"schedule {given.name} is for {given.num_ranks} ranks and {given.num_microbatches} "
            f"microbatches; this run has {num_ranks} and {num_microbatches}: set devices and "
            f"num_microbatches to fit, or make it anew"
        )
    accept(given)
    _refuse_no_schedule(given)
    return given


def _refuse_no_schedule(given: Schedule) -> None:
    """Refuse what is valid, but no schedule to train by."""
    if given.is_forward_only:
        raise ScheduleError(
            f"schedule {given.name} has no backward, and trains nothing; give each stage BW, or B "
            f"and W, for each microbatch (evaluations leave them out)"
        )
    for action in chain.from_iterable(given):
        if action.kind in TRANSFERS or action.kind is Kind.REDUCE:
            raise ScheduleError(
                f"schedule {given.name} has {action}, which is put in when it is lowered; "
                f"give it as it was before lower()"
            )
