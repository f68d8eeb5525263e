"""The strategy's arguments, their checks, and what follows from them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipeoffload.planning.limits import Limit, bytes_formatter, parse_limits
from lightning_pipeoffload.runtime.comm import MOST_MICROBATCHES, PipelineGroup
from lightning_pipeoffload.runtime.compiled import check_compile, warn_once
from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.memory import HostBudget, check_recompute
from lightning_pipeoffload.runtime.weight_grad import supports_float32_accumulation
from lightning_pipeoffload.schedule import (
    DEFAULT_SCHEDULE,
    FAMILIES,
    FINAL,
    TRANSFERS,
    PlanOption,
    Recipe,
    Schedule,
    ScheduleError,
    build_from_recipe,
    check_name,
    check_schedule,
    parse_offload_amount,
)
from lightning_pipeoffload.schedule.solver import check_solver, check_solver_seconds

ScheduleLike = Callable[[int, int], Schedule] | Schedule | str | PathLike[str]

_CHOICES = {
    "rank_order": {
        "pipeline_inner": "neighbouring global ranks are of one pipeline",
        "data_inner": "they are replicas of one stage",
    },
    "head_weight_grad": {
        "W": "with all other weight gradients",
        "B": "with the gradient of the head's input, so that no logits wait in memory for W",
        "auto": 'W, or what schedule="auto" finds faster under a memory limit',
    },
    "sharding": {"none": "", "optimizer": "replicas share out its state and its step"},
    "optimizer_sync": {
        "barrier": "ranks wait where a norm, a loss scale or a hook needs all gradients",
        "post_validation": "a step that was wrong is taken back",
    },
}
_NO_FUSION = (
    "gradient_accumulation_fusion=True changes nothing here: a rank's device has no product of "
    "matrices that adds to float32, so gradients are added in a second pass"
)
# With several tensor ranks: what an argument has to be, and why it cannot be what was given.
_OF_TENSOR_RANKS: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer_sync": (("barrier",), "a step of shards is not taken back"),
    "num_sequence_slices": ((1,), "blocks of shards do not run on slices"),
}


@dataclass(frozen=True)
class PipelineSettings:
    """The arguments of PipeOffloadStrategy that decide how a module is pipelined.

    Raises:
        ValueError: An argument has a value that it cannot have.
    """

    pipeline_parallel_size: int | str = "auto"
    data_parallel_size: int | str = 1
    tensor_parallel_size: int = 1
    rank_order: str = "pipeline_inner"
    sharding: str = "none"
    num_microbatches: int | str = "auto"
    num_sequence_slices: int = 1
    num_chunks: int | str = "auto"
    schedule: ScheduleLike = "auto"
    blocks: str | Sequence[str] | None = None
    split: str | Sequence[int] = "auto"
    make_microbatches: Callable[[Any, int], list[Any]] | None = None
    microbatch_weight: str | Callable[[Any], float] = "samples"
    optimizer_sync: str = "barrier"
    per_parameter_optimizer: bool = False
    optimizer_offload: bool = False
    master_weights: str | None = None
    offload: str | float = "auto"
    recompute: str = "none"
    head_weight_grad: str = "auto"
    memory_limit: Limit = None
    host_memory_limit: Limit = None
    compile: bool | Mapping[str, Any] = False
    gradient_accumulation_fusion: bool | str = "auto"
    derive_lengths: bool = True
    solver_seconds: float = 60.0
    plan_cache: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_kinds()
        for name, meanings in _CHOICES.items():
            words = (f'"{o}"' + f" ({meaning})" * bool(meaning) for o, meaning in meanings.items())
            value = getattr(self, name)
            _require(value in [*meanings], name, " or ".join(words), value)
        check_flag("per_parameter_optimizer", self.per_parameter_optimizer)
        check_flag("optimizer_offload", self.optimizer_offload)
        fusion = self.gradient_accumulation_fusion
        is_known = fusion == "auto" or isinstance(fusion, bool)
        _require(is_known, "gradient_accumulation_fusion", '"auto", True or False', fusion)
        check_flag("derive_lengths", self.derive_lengths)
        is_known = self.master_weights in (None, "float32")
        _require(is_known, "master_weights", '"float32" or None', self.master_weights)
        check_recompute(self.recompute)
        for name in ("memory_limit", "host_memory_limit"):
            self._check_limit(name)
        if self.offload != "auto":
            parse_offload_amount(self.offload)
        if _is_name(self.schedule) and self.schedule != "auto":
            check_name(str(self.schedule), "auto", "the path of a .csv file")
        check_compile(self.compile)
        check_solver_seconds(self.solver_seconds)
        if self.uses_solver:
            check_solver()
            if self.offload != "auto":
                raise ValueError(
                    f"schedule='optpipe' plans what it offloads by memory_limit, and "
                    f"offload={self.offload!r} was asked for; leave that at 'auto'"
                )
        if self.tensor_parallel_size > 1:
            self._check_with_tensor_ranks()

    def _check_limit(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, (int, str, type(None))):
            parse_limits(value, name, 1)
            return
        is_list = _is_filled(value, lambda entry: isinstance(entry, (int, str)))
        _require(is_list, name, "bytes, a text such as '40GiB', a list of these or None", value)
        parse_limits(value, name, 1)
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"{name}={list(value)!r} is a list, and tensor_parallel_size="
                f"{self.tensor_parallel_size}: ranks that share a stage's layers need as much "
                f"memory each; write one number for all"
            )

    def check_world(self, world_size: int) -> None:
        """Check the sizes for a number of processes.

        Raises:
            ValueError: They do not make so many, or a list of limits has neither so many entries
                nor as many as a pipeline has ranks.
        """
        num_ranks = self.num_ranks(world_size)
        for name in ("memory_limit", "host_memory_limit"):
            value = getattr(self, name)
            if isinstance(value, (int, str, type(None))) or len(value) in (num_ranks, world_size):
                continue
            each = "" if num_ranks == world_size else f", or {num_ranks}, one for each of a replica"
            raise ValueError(
                f"{name}={list(value)!r} has {len(value)} entries; write {world_size}, one for "
                f"each device as trainer.devices counts them{each}"
            )

    def _check_with_tensor_ranks(self) -> None:
        size = f"tensor_parallel_size={self.tensor_parallel_size}"
        for name, (possible, why) in _OF_TENSOR_RANKS.items():
            value = getattr(self, name)
            if value not in possible:
                raise ValueError(
                    f"{name}={value!r} is not supported with {size}: {why}; set "
                    f"{name}={possible[0]!r}"
                )

    def _check_numbers(self) -> None:
        sizes = "pipeline_parallel_size", "data_parallel_size", "num_chunks", "num_microbatches"
        for name in sizes:
            value = getattr(self, name)
            is_count = _is_int(value) and value >= 1
            _require(value == "auto" or is_count, name, '"auto" or a positive int', value)
        size = self.tensor_parallel_size
        is_size = _is_int(size) and size >= 1
        _require(is_size, "tensor_parallel_size", "a positive int", size)
        slices = self.num_sequence_slices
        is_count = _is_int(slices) and slices >= 1
        _require(is_count, "num_sequence_slices", "a positive int", slices)
        if slices > 1 and self.uses_solver:
            raise ValueError(
                f"num_sequence_slices={slices} is not planned by a solver; leave out "
                f"schedule='optpipe', as schedule='auto' chooses among seq_1f1b, seq_zb and seq_v"
            )
        most = MOST_MICROBATCHES // slices
        if self.num_microbatches != "auto" and int(self.num_microbatches) > most:
            in_slices = f" in {slices} slices" if slices > 1 else ""
            raise ValueError(
                f"num_microbatches ({self.num_microbatches}{in_slices}) is more than {most}, the "
                f"most that messages between ranks can tell apart, and its plan would take long to "
                f"build; use fewer, larger microbatches: a few for each rank fill a pipeline"
            )

    def _check_kinds(self) -> None:
        schedule, blocks, split = self.schedule, self.blocks, self.split
        _require(
            isinstance(schedule, (str, PathLike, Schedule)) or callable(schedule),
            "schedule",
            "a name, a Schedule, a callable (num_ranks, num_microbatches) -> Schedule, or the path "
            "of a .csv file",
            schedule,
        )
        if callable(schedule):
            _check_signature(schedule)
        names = [blocks] if isinstance(blocks, str) else blocks
        _require(
            names is None or _is_filled(names, lambda name: isinstance(name, str) and name),
            "blocks",
            "the name of a ModuleList or Sequential, or a list of patterns of its blocks' names",
            blocks,
        )
        is_split = split in ("auto", "even") or _is_filled(split, _is_int)
        _require(is_split, "split", '"auto", "even" or a list of block counts', split)
        make, words = (
            self.make_microbatches,
            "a callable (batch, num_microbatches) -> list, or None",
        )
        _require(make is None or callable(make), "make_microbatches", words, make)
        weight = self.microbatch_weight
        is_weight = weight in ("samples", "tokens") or callable(weight)
        words = '"samples", "tokens" or a callable of the microbatch'
        _require(is_weight, "microbatch_weight", words, weight)
        is_folder = self.plan_cache is None or isinstance(self.plan_cache, (str, PathLike))
        _require(is_folder, "plan_cache", "the path of a folder, or None", self.plan_cache)

    @property
    def chooses_schedule(self) -> bool:
        """Whether the first batch decides which schedule is taken."""
        return self.schedule in ("auto", "optpipe")

    @property
    def uses_solver(self) -> bool:
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
        """Return the number of pipelines; refusals as above."""
        return self._sizes(world_size)[0]

    def num_optimizer_shards(self, num_replicas: int) -> int:
        """Return how many replicas share out the optimizer's state; 1: each has all of it."""
        return num_replicas if self.sharding == "optimizer" else 1

    def _sizes(self, world_size: int) -> tuple[int, int]:
        """Return replicas, and ranks of each pipeline."""
        replicas, ranks = self.data_parallel_size, self.pipeline_parallel_size
        num_cells = world_size // self.tensor_parallel_size
        if not isinstance(replicas, int):
            replicas = num_cells // ranks or 1 if isinstance(ranks, int) else 1
        if not isinstance(ranks, int):
            ranks = num_cells // replicas or 1
        if replicas * ranks * self.tensor_parallel_size != world_size:
            sizes = {"pipeline_parallel_size": ranks, "data_parallel_size": replicas}
            if self.tensor_parallel_size > 1:
                sizes["tensor_parallel_size"] = self.tensor_parallel_size
            raise ValueError(_explain_sizes(world_size, sizes))
        return replicas, ranks

    @property
    def default_schedule(self) -> str:
        """The schedule in place of "auto" and "optpipe" until one is chosen, or if none can be."""
        if self.num_sequence_slices > 1:
            return "seq_zb" if self.num_chunks in ("auto", 1) else "seq_v"
        return DEFAULT_SCHEDULE if self.num_chunks in ("auto", 1) else "uniform"

    def cut_settings(self, group: PipelineGroup) -> CutSettings:
        """Return how to cut a module for the ranks of a pipeline, as they are placed now."""
        return CutSettings(
            group.stage_ranks,
            self.blocks,
            self.split,
            self.recompute,
            tuple(group.global_ranks[rank] for rank in group.stage_ranks),
            group.replicas.broadcast_object,
            self.compile,
            self._agree_on_fusion(group),
            self.derive_lengths,
            self.head_weight_grad_choices[0],
            self.num_sequence_slices,
            group.devices.slowness_per_stage(group.stage_ranks),
            group.devices.memory_per_stage(group.stage_ranks),
        )

    def may_fuse(self, device: torch.device) -> bool:
        """Return whether a rank on ``device`` can add weight gradients in one pass, and may."""
        return self.gradient_accumulation_fusion is not False and supports_float32_accumulation(
            device
        )

    def _agree_on_fusion(self, group: PipelineGroup) -> bool:
        """Decide for all ranks alike whether they add weight gradients in one pass."""
        if self.gradient_accumulation_fusion is False:
            return False
        can = group.world.agree(self.may_fuse(group.device), unanimous=True)
        if self.gradient_accumulation_fusion is True and not can and group.is_global_zero:
            warn_once(_NO_FUSION)
        return can

    @property
    def head_weight_grad_choices(self) -> tuple[str, ...]:
        """The values of ``head_weight_grad`` to plan by under a memory limit; else the first."""
        return ("W", "B") if self.head_weight_grad == "auto" else (self.head_weight_grad,)

    def device_limits(
        self, num_ranks: int, devices: Sequence[float] | None = None
    ) -> Sequence[float] | None:
        """Return the memory limit of the device at each place of a pipeline; None: any.

        Args:
            num_ranks: Ranks of a pipeline.
            devices: What the devices have left, for where no limit was given.
        """
        given = parse_limits(self.memory_limit, "memory_limit", num_ranks, self.rank_order)
        return devices if given is None else given

    def host_budget(
        self, num_local_ranks: int, num_ranks: int = 1, place: int = 0
    ) -> HostBudget | None:
        """Return the most host memory of the rank at a place of its pipeline; None: any.

        Args:
            num_local_ranks: The ranks of its machine, which share its memory.
            num_ranks: Ranks of a pipeline.
            place: Its place among these.
        """
        name, value = "host_memory_limit", self.host_memory_limit
        given = parse_limits(value, name, num_ranks, self.rank_order)
        if given is None:
            return HostBudget.share_of_machine(num_local_ranks)
        return HostBudget.configured(given[place], bytes_formatter(value)(given[place]))

    # ``on_accelerator``: whether the devices have a memory of their own.

    def is_limited(self, on_accelerator: bool) -> bool:
        """Whether a plan has a memory limit to keep, given or the devices' own."""
        return self.memory_limit is not None or self.keeps_device_limit(on_accelerator)

    def keeps_device_limit(self, on_accelerator: bool) -> bool:
        """Whether the limit is the memory that the devices have left."""
        return on_accelerator and self.memory_limit is None and self.offload == "auto"

    def may_offload(self, on_accelerator: bool) -> bool:
        """Whether activations may be offloaded, for a limit or because that is asked for."""
        return self.is_limited(on_accelerator) or self.offload not in ("auto", "none")

    def option(self, num_microbatches: int) -> PlanOption:
        """Return the schedule that was named, or the default until one is chosen."""
        name, recipe = self._recipe
        is_asked = _is_name(self.schedule) and isinstance(self.num_chunks, int)
        num_chunks = int(self.num_chunks) if is_asked else recipe.num_chunks
        choice = (
            name,
            num_chunks,
            num_microbatches,
            self.recompute,
            self.head_weight_grad_choices[0],
        )
        return PlanOption(*choice, self.num_sequence_slices if _is_name(self.schedule) else 1)

    @property
    def user_recipe(self) -> dict[str, Recipe]:
        """The recipe of a schedule that was given and not named; empty: it was named."""
        return {} if _is_name(self.schedule) else dict([self._recipe])

    def make_schedule(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Build the schedule for that many microbatches, without regard to costs and limits.

        Raises:
            ScheduleError: It is invalid or of other sizes, or it has copies of its own while
                ``offload`` is neither "auto" nor "none".
        """
        option = self.option(num_microbatches)
        sizes = num_ranks, num_microbatches, option.num_chunks
        num_slices, recipe = option.num_sequence_slices, self._recipe[1]
        schedule = build_from_recipe(recipe, option.schedule, sizes, num_sequence_slices=num_slices)
        if schedule.num_sequence_slices != self.num_sequence_slices:
            raise ScheduleError(
                f"schedule {schedule.name} has {schedule.num_sequence_slices} slices of each "
                f"sequence; set num_sequence_slices={schedule.num_sequence_slices}"
            )
        has_copies = bool(recipe.order) or schedule.has_copies  # on one rank by measured costs only
        if has_copies and self.offload not in ("auto", "none"):
            raise ScheduleError(
                f"schedule {schedule.name} has copies of its own, and offload="
                f"{self.offload!r} was asked for; leave that at auto, or use a schedule without "
                f"copies, such as uniform"
            )
        return schedule

    def provisional_schedule(self, num_ranks: int) -> Schedule:
        """Build a schedule before the batch is known, for its placement of stages on ranks."""
        if isinstance(self.num_microbatches, int):
            return self.make_schedule(num_ranks, self.num_microbatches)
        fixed = self._fixed_schedule()
        return self.make_schedule(num_ranks, fixed.num_microbatches if fixed else 2 * num_ranks)

    def choose_num_microbatches(
        self,
        num_ranks: int,
        batch_size: int,
        least_samples: int = 1,
        has_packed_rows: bool = False,
    ) -> int:
        """Choose how many microbatches the first batch is cut into.

        Args:
            num_ranks: The number of ranks of the pipeline.
            batch_size: The samples of the batch; 0: ``make_microbatches`` cuts it, whatever it has.
            least_samples: The samples that a microbatch needs, where the number is chosen.
            has_packed_rows: Whether each sample is a row of packed texts, which is a microbatch.

        Raises:
            ValueError: The batch cannot be cut so.
        """
        fixed = None if isinstance(self.num_microbatches, int) else self._fixed_schedule()
        if isinstance(self.num_microbatches, int):
            wanted = self.num_microbatches
        elif fixed:
            wanted = fixed.num_microbatches
        elif has_packed_rows:
            wanted = batch_size
        else:
            wanted = self._legal_divisor(num_ranks, batch_size, least_samples)
        if batch_size % wanted:
            raise ValueError(
                f"a first batch of {batch_size} samples cannot be cut into {wanted} equal "
                f"microbatches; use a batch_size that is a multiple of {wanted}, or another "
                f"num_microbatches"
            )
        if has_packed_rows and wanted != batch_size:
            raise ValueError(
                f"the schedule has {wanted} microbatches, and a batch has {batch_size} packed "
                f"rows, each of which is one; set num_rows={wanted}"
            )
        return wanted

    def next_num_microbatches(self, num_microbatches: int, batch_size: int) -> int | None:
        """Return the next number of microbatches worth trying: at least twice as many."""
        if self.num_microbatches != "auto":
            return None
        counts = range(2 * num_microbatches, min(batch_size, MOST_MICROBATCHES) + 1)
        return next((count for count in counts if batch_size % count == 0), None)

    def _legal_divisor(self, num_ranks: int, batch_size: int, least_samples: int) -> int:
        most = min(max(batch_size // least_samples, 1), MOST_MICROBATCHES)
        if not batch_size:
            most = MOST_MICROBATCHES
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
        if callable(self.schedule) or _is_name(self.schedule):
            return None
        return Schedule.from_csv(self.schedule)

    @property
    def _recipe(self) -> tuple[str, Recipe]:
        """The schedule's name, and how it is built."""
        if _is_name(self.schedule):
            name = self.default_schedule if self.chooses_schedule else str(self.schedule)
            return name, FAMILIES[name]
        schedule = self._fixed_schedule()
        if schedule is not None:
            return schedule.name, _recipe_of(schedule)
        assert callable(self.schedule)
        name = getattr(self.schedule, "__name__", "")
        return name if name.isidentifier() else "given", _recipe_calling(self.schedule)


def check_flag(name: str, value: Any) -> None:
    _require(isinstance(value, bool), name, "True or False", value)


def check_timeout(timeout: Any) -> None:
    is_time = isinstance(timeout, timedelta) and timeout > timedelta()
    words = "a positive datetime.timedelta, such as timedelta(minutes=30)"
    _require(timeout is None or is_time, "timeout", words, timeout)


def check_start_method(start_method: str | None) -> None:
    """Raise a ValueError for an unknown way of starting ranks."""
    if start_method not in (None, "fork"):
        raise ValueError(
            f"start_method={start_method!r} is unknown; use 'fork', or leave it out: then scripts "
            f"are started again for each rank, and interactive interpreters fork"
        )


def check_backend(backend: Any) -> None:
    """Refuse a backend, or one of "cpu:gloo,cuda:nccl", that this torch does not have."""
    names = [part.split(":")[-1] for part in str(backend).split(",")]
    if backend is not None and not all(map(dist.is_backend_available, names)):
        raise ValueError(
            f"process_group_backend={backend!r} is not there in this torch.distributed; leave it "
            f"at None, which is gloo on CPUs and nccl on GPUs"
        )


def _check_signature(schedule: Callable[..., Any]) -> None:
    try:
        inspect.signature(schedule).bind(2, 4)
    except TypeError as error:
        raise ValueError(
            f"schedule={schedule!r} is called with (num_ranks, num_microbatches): {error}"
        ) from None
    except ValueError:  # a builtin shows no signature
        return


def _require(is_right: bool, name: str, words: str, value: Any) -> None:
    if not is_right:
        raise ValueError(f"{name} must be {words}, not {value!r}")


def _is_name(schedule: Any) -> bool:
    return isinstance(schedule, str) and not schedule.endswith(".csv")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_filled(values: Any, is_right: Callable[[Any], Any]) -> bool:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    return is_list and len(values) > 0 and all(map(is_right, values))


def _explain_sizes(world_size: int, sizes: Mapping[str, int]) -> str:
    num_devices = math.prod(sizes.values())
    instead = [f"devices={num_devices}"]
    for name, size in sizes.items():
        if world_size % (num_devices // size) == 0:
            instead.append(f"{name}={world_size // (num_devices // size)}")
    product = " times ".join(f"{name} ({size})" for name, size in sizes.items())
    return f"devices ({world_size}) are not {product}; use {' or '.join(instead)}"


def _recipe_of(schedule: Schedule) -> Recipe:
    def build(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
        return _check_user_schedule(schedule, num_ranks, num_microbatches)

    return Recipe(
        build, schedule.num_chunks, None, lambda num_ranks, num_chunks: schedule.placement
    )


def _recipe_calling(function: Callable[[int, int], Schedule]) -> Recipe:
    def build(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
        schedule = function(num_ranks, num_microbatches)
        if not isinstance(schedule, Schedule):
            raise ScheduleError(
                f"schedule={function!r} returned {schedule!r} for {num_ranks} ranks and "
                f"{num_microbatches} microbatches; it must return a Schedule"
            )
        return _check_user_schedule(schedule, num_ranks, num_microbatches)

    return Recipe(build, 1, None)


def _check_user_schedule(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return a user's schedule if it is of these sizes, valid, and one to train by."""
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"schedule {schedule.name} is for {schedule.num_ranks} ranks and "
            f"{schedule.num_microbatches} microbatches; this run has {num_ranks} and "
            f"{num_microbatches}: set devices and num_microbatches to fit, or make it anew"
        )
    check_schedule(schedule)
    if schedule.is_forward_only:
        raise ScheduleError(
            f"schedule {schedule.name} has no backward, and trains nothing; give each stage BW, or "
            f"B and W, for each microbatch (evaluations leave them out)"
        )
    for action in chain.from_iterable(schedule):
        if action.kind in TRANSFERS | FINAL:
            raise ScheduleError(
                f"schedule {schedule.name} has {action}, which is put in when it is lowered; "
                f"give it as it was before lower()"
            )
    return schedule
