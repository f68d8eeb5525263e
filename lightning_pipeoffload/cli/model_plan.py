"""``pipeoffload-plan model=...``: what each rank needs of memory, and the plan for a device.

A model is planned by the bytes of its shapes and by its operations, divided by the rate that the
device reaches. Without a device operations are the unit of time, and a copy there and back takes as
long as its stage's computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status
from rich.table import Column, Table

from lightning_pipeoffload.cli.devices import Device, device_named, kind_of_precision
from lightning_pipeoffload.cli.given_plan import has_barrier, parse_name
from lightning_pipeoffload.cli.model_probe import ModelProbe
from lightning_pipeoffload.cli.plan_output import described, print_choice, print_json
from lightning_pipeoffload.planning.figures import MEASURED, PlannedStep, bare_table
from lightning_pipeoffload.planning.limits import parse_bytes
from lightning_pipeoffload.planning.memory_needs import (
    ON_DEVICE,
    HostedOptimizer,
    MemoryNeeds,
    RankNeeds,
    describe_needs,
)
from lightning_pipeoffload.planning.plan_request import first_plan
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.transport import MOST_MICROBATCHES
from lightning_pipeoffload.schedule import (
    Costs,
    Kind,
    MemoryLimitError,
    Schedule,
    ScheduleError,
    lower,
    split_fused_backward,
)
from lightning_pipeoffload.schedule.candidates import Candidate, Option, options
from lightning_pipeoffload.schedule.families import FAMILIES
from lightning_pipeoffload.schedule.make_plan import Plan, PlanRequest, make_plan
from lightning_pipeoffload.schedule.placement import stages_on
from lightning_pipeoffload.schedule.quantities import bytes_text, seconds_text, share_text
from lightning_pipeoffload.schedule.recipe import check_sizes

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["ModelPlanner", "estimate_model", "plan_for_device"]

_COMPUTE = ("forward", "backward_input", "backward_weight")
_RECOMPUTES = ("none", "cheap", "full")
_ABOUT_EQUAL = 1.01  # of plans that take so little longer, that with the fewest changes is named
_MORE_RANKS = (1, 2, 4, 8, 16)
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Estimate:
    """The memory needs of a plan's ranks, and its figures by counted operations."""

    settings: PipelineSettings
    num_ranks: int
    num_microbatches: int
    needs: Sequence[RankNeeds]
    step: PlannedStep

    @property
    def name(self) -> str:
        """The plan as it is named on the command line."""
        amount = self.settings.offload
        copies = "" if amount in ("none", "auto") else f"+{amount}"
        return f"{self.settings.schedule}{copies}"

    @property
    def largest(self) -> RankNeeds:
        """The needs of the rank that needs most on its device."""
        return max(self.needs, key=lambda rank: rank.device)


@dataclass(frozen=True)
class _Found:
    """A plan that fits, and the words of the command line that ask for it."""

    candidate: Candidate
    settings: PipelineSettings
    num_ranks: int
    words: Sequence[str]

    @property
    def order(self) -> tuple[int, float]:
        assert self.candidate.peak_memory is not None
        return len(self.words), self.candidate.peak_memory


class ModelPlanner:
    """Plans the model that conf/plan.yaml and the command line describe.

    Attributes:
        device: The device with the rates that it reaches; None: none is named.
        settings: The strategy's arguments that are given.

    Raises:
        ValueError: The device is unknown, or the model cannot be built.
    """

    def __init__(self, config: DictConfig) -> None:
        self.device: Device | None = None
        if config.device is not None:
            self.device = device_named(config.device, config.efficiency)
        self._config, strategy = config, config.strategy
        self._num_chunks, self._count = config.num_chunks, config.num_microbatches
        chunks = {} if self._num_chunks is None else {"num_chunks": self._num_chunks}
        check_sizes(num_microbatches=self._count, **chunks)
        self.settings = PipelineSettings(
            num_microbatches=self._count,
            num_chunks="auto" if self._num_chunks is None else self._num_chunks,
            blocks=strategy.get("blocks"),
            split=strategy.get("split", "auto"),
            offload=strategy.offload,
            recompute=strategy.recompute,
            data_parallel_size=strategy.get("data_parallel_size", 1),
            sharding=strategy.get("sharding", "none"),
            optimizer_offload=strategy.get("optimizer_offload", False),
            master_weights=strategy.get("master_weights"),
            host_memory_limit=strategy.get("host_memory_limit"),
        )
        self._has_barrier = has_barrier(config)
        self._needs: dict[Any, MemoryNeeds] = {}

    @cached_property
    def probe(self) -> ModelProbe:
        return ModelProbe(self._config)

    @cached_property
    def memory(self) -> float | None:
        """Bytes of a device; None: not known."""
        if self._config.device_memory is not None:
            return parse_bytes(self._config.device_memory, "device_memory")
        return None if self.device is None else self.device.memory

    @property
    def flops(self) -> float:
        """Operations of the device in a second."""
        assert self.device is not None
        return self.device.flops[kind_of_precision(self.probe.precision)]

    def needs_of(self, option: Option, num_ranks: int) -> MemoryNeeds:
        """Return what the stages of an option need; the model is traced once for all options.

        Raises:
            ScheduleError: The model cannot be cut so.
        """
        placement = option.placement(num_ranks)
        key = placement, option.num_microbatches, option.recompute
        if key not in self._needs:
            settings = replace(self.settings, recompute=option.recompute)
            try:
                needs = self.probe.joined_needs(placement, self._count, settings)
            except ScheduleError:
                raise
            except ValueError as error:
                raise ScheduleError(str(error)) from error
            self._needs[key] = needs.scaled(self._count / option.num_microbatches)
        return self._needs[key]

    def costs_of(self, option: Option, num_ranks: int) -> Costs:
        """Return the costs of an option's stages: bytes, and seconds or average blocks' work."""
        needs = self.needs_of(option, num_ranks)
        num_stages = len(needs.owned)
        unit = needs.flops_of_one / (self.flops if self.device else 1e12)
        compute: dict[str, Any] = {
            name: [unit * work for work in needs.costs.per_stage(name, num_stages)]
            for name in _COMPUTE
        }
        if option.recompute == "full":
            pairs = zip(compute["backward_input"], compute["forward"], strict=True)
            compute["backward_input"] = [b + f for b, f in pairs]
        if self.device is None:
            copies = [sum(work) / 2 for work in zip(*compute.values(), strict=True)]
            return replace(needs.costs, **compute, offload=copies, reload=copies, copy_lanes=2)
        sizes = needs.costs.per_stage("activation", num_stages)
        copies = [size / self.device.copy_rate for size in sizes]
        compute["communication"] = [
            sent / self.device.link_rate for sent in needs.sent[Kind.SEND_F]
        ]
        return replace(needs.costs, **compute, offload=copies, reload=copies, copy_lanes=2)

    def taken(self, option: Option, num_ranks: int, settings: PipelineSettings) -> float:
        """Return the bytes of the fullest rank besides activations."""
        needs = self._with_optimizer(self.needs_of(option, num_ranks), settings)
        placement = option.placement(num_ranks)
        return max(needs.kept_by(stages_on(placement, rank)) for rank in range(num_ranks))

    def _with_optimizer(self, needs: MemoryNeeds, settings: PipelineSettings) -> MemoryNeeds:
        """Return the needs with optimizer states where the settings have them."""
        num_sharing, hosted = settings.num_sharing(int(settings.data_parallel_size)), None
        if settings.optimizer_offload:
            by_bucket, obstacle = self.probe.host_step
            if obstacle:
                raise ScheduleError(obstacle)
            hosted = HostedOptimizer(by_bucket, settings.master_weights is not None)
        return replace(needs, num_sharing=num_sharing, hosted=hosted)

    @property
    def host_memory(self) -> float:
        """Bytes of host memory that a rank may take."""
        given = self.settings.host_memory_limit
        return inf if given is None else parse_bytes(given, "host_memory_limit")

    def request(
        self, wanted: Sequence[Option], num_ranks: int, settings: PipelineSettings, **more: Any
    ) -> PlanRequest:
        """Return the request for some options; offload and sharding are those of the settings."""
        return PlanRequest(
            num_ranks,
            wanted,
            lambda option: self.costs_of(option, num_ranks),
            self.memory,
            settings.offload,
            lambda option: self.taken(option, num_ranks, settings),
            lambda option: self._has_barrier,
            **more,
        )

    def settings_named(self, schedule: str, offload: str | float = "") -> PipelineSettings:
        """Return the settings with a schedule by its name, and an amount of offload if given."""
        offload = self.settings.offload if offload == "" else offload
        return replace(self.settings, schedule=schedule, offload=offload)

    def estimate(self, settings: PipelineSettings, num_ranks: int) -> Estimate:
        """Estimate the first plan of a run.

        Raises:
            ValueError: The plan cannot be, or the model cannot be cut so.
        """
        count = settings.choose_num_microbatches(num_ranks, self.probe.batch_size)

        def needs_of(plan: Schedule) -> MemoryNeeds:
            needs = self.probe.joined_needs(plan.placement, count, settings)
            return self._with_optimizer(needs, settings)

        if settings.offload == "auto" and self.memory is not None:
            request = self.request([settings.option(count)], num_ranks, settings, must_fit=False)
            plan = lower(make_plan(request).schedule)
            # The planner counts no messages.
            messages = max(rank.messages for rank in needs_of(plan).of_ranks(plan))
            request = replace(request, memory_limit=self.memory - messages)
            plan = lower(make_plan(request).schedule)
        else:
            plan = lower(first_plan(settings, num_ranks, count)[0])
        needs = needs_of(plan)
        step = PlannedStep(plan, needs.costs, self._has_barrier)
        return Estimate(settings, num_ranks, count, needs.of_ranks(plan), step)

    def advice(self, asked: PipelineSettings, num_ranks: int) -> str:
        """Return the words that ask for the fastest plan that fits.

        Schedules, chunks, recomputation, offload, microbatches and sharding may change; where no
        plan fits the optimizer steps on the host, and where none fits then the number of ranks is
        another. Of plans that take about as long it is that with the fewest changes.
        """
        can_step_on_host = not self.probe.host_step[1]
        places = dict.fromkeys([asked.optimizer_offload, can_step_on_host or False])
        for times, on_host in product(_MORE_RANKS, places):
            found = [*self._search(asked, num_ranks, times, on_host)]
            while found:
                fastest = min(each.candidate.score for each in found)
                near = [f for f in found if f.candidate.score <= fastest * _ABOUT_EQUAL]
                best = min(near, key=lambda each: each.order)
                if self._fits(best):
                    return f"use {' '.join(best.words)}: {self._step_time(best, asked, num_ranks)}"
                found.remove(best)
        return "use a smaller model, batch or data type"

    def _fits(self, found: _Found) -> bool:
        """Whether a plan fits with its messages too."""
        try:
            estimate = self.estimate(found.settings, found.num_ranks)
        except ValueError:
            return False
        on_host = max(rank.host for rank in estimate.needs)
        return estimate.largest.device <= (self.memory or inf) and on_host <= self.host_memory

    def _step_time(self, found: _Found, asked: PipelineSettings, num_ranks: int) -> str:
        period = found.candidate.period
        assert period is not None
        if self.device is not None:
            on_top = " and the optimizer's on the host" * found.settings.optimizer_offload
            return f"a step takes {seconds_text(period)}{on_top}"
        try:
            wanted = [self._option(asked)]
            free = replace(self.request(wanted, num_ranks, asked), memory_limit=None)
            before = make_plan(free).best.period or period
        except ScheduleError:
            return "it fits"
        return f"a step takes {period / before:.2f} times as long as {asked.schedule} would"

    def _option(self, asked: PipelineSettings) -> Option:
        count = asked.num_microbatches
        return asked.option(count if isinstance(count, int) else self._count)

    def _search(
        self, asked: PipelineSettings, num_ranks: int, times: int, on_host: bool
    ) -> Iterator[_Found]:
        """Yield plans that fit on so many times the ranks."""
        counts = [self._count * n for n in (1, 2, 4)]
        counts = [c for c in counts if c <= MOST_MICROBATCHES and self.probe.batch_size % c == 0]
        wanted = [
            option
            for option in options(counts, recompute=_RECOMPUTES)
            if not FAMILIES[option.schedule].takes_seconds
        ]
        shardings = ["none"] if asked.data_parallel_size == 1 else ["none", "optimizer"]
        best = inf
        for sharding in dict.fromkeys([asked.sharding, *shardings]):
            settings = replace(
                asked,
                schedule="auto",
                offload="auto",
                sharding=sharding,
                optimizer_offload=on_host,
            )
            request = self.request(wanted, times * num_ranks, settings, omits_above=best)
            try:
                plan = make_plan(request)
            except ScheduleError:
                continue
            best = min(best, plan.best.score)
            for candidate in plan.candidates:
                if candidate.fits:
                    yield self._found(candidate, asked, settings, num_ranks, times)

    def _found(
        self,
        candidate: Candidate,
        asked: PipelineSettings,
        settings: PipelineSettings,
        num_ranks: int,
        times: int,
    ) -> _Found:
        option, before = candidate.option, self._option(asked)
        offload = asked.offload if candidate.offload == "its own" else settings.offload
        settings = replace(
            settings,
            schedule=option.schedule,
            num_chunks=option.num_chunks,
            num_microbatches=option.num_microbatches,
            recompute=option.recompute,
            offload="none" if candidate.offload == "none" else offload,
        )
        is_default = option.num_chunks == FAMILIES[option.schedule].num_chunks
        changes = {
            f"num_ranks={times * num_ranks}": times > 1,
            f"schedule={option.schedule}": option.schedule != before.schedule,
            f"num_chunks={option.num_chunks}": not is_default
            or (self._num_chunks not in (None, option.num_chunks)),
            f"num_microbatches={option.num_microbatches}": option.num_microbatches != self._count,
            f"offload={settings.offload}": settings.offload != asked.offload,
            f"strategy.recompute={option.recompute}": option.recompute != asked.recompute,
            f"+strategy.sharding={settings.sharding}": settings.sharding != asked.sharding,
            "+strategy.optimizer_offload=true": settings.optimizer_offload
            and not asked.optimizer_offload,
        }
        words = [word for word, is_changed in changes.items() if is_changed]
        return _Found(candidate, settings, times * num_ranks, words)


def plan_for_device(config: DictConfig) -> tuple[PlannedStep, dict[str, Any]]:
    """Return the fastest plan that fits a device, and what JSON says of it.

    Raises:
        ValueError: The device is unknown, the model cannot be built, or nothing fits.
    """
    check_sizes(num_ranks=config.num_ranks)
    planner = ModelPlanner(config)
    with _progress(f"Planning {config.strategy.schedule} for {config.num_ranks} ranks"):
        plan = _plan(planner, config)
    device, precision = planner.device, planner.probe.precision
    assert device is not None
    assert planner.memory is not None
    if config.format == "text":
        print_choice(plan, MEASURED)
        Console().out(
            f"{device.name} at {config.efficiency:g} of its data sheet's rates: "
            f"{planner.flops / 1e12:.4g} TFLOP/s dense (precision {precision}), copies "
            f"{device.copy_rate / 1e9:.4g} GB/s each way, messages {device.link_rate / 1e9:.4g} "
            f"GB/s, memory {bytes_text(planner.memory)} less weights, gradients and optimizer "
            f"states of the stages\n",
            highlight=False,
        )
    told = {
        "device": device.name,
        "precision": precision,
        "efficiency": config.efficiency,
        "flops_per_second": planner.flops,
        "copy_rate": device.copy_rate,
        "link_rate": device.link_rate,
        "device_memory": planner.memory,
        "taken_by_weights": planner.taken(plan.best.option, config.num_ranks, planner.settings),
    }
    step = PlannedStep(split_fused_backward(plan.schedule), plan.costs, has_barrier(config))
    return step, described(plan, with_candidates=True) | told


def _progress(text: str) -> Status:
    """Show on a terminal what takes seconds."""
    return Console(stderr=True).status(text)


def _plan(planner: ModelPlanner, config: DictConfig) -> Plan:
    name = config.strategy.schedule
    if name != "auto" and name not in FAMILIES:
        raise ScheduleError(
            f"schedule ({name}) cannot be planned for a device; use auto or one of "
            f"{', '.join(FAMILIES)}"
        )
    sizes = [config.num_microbatches], None, config.num_chunks, [config.strategy.recompute]
    wanted = [option for option in options(*sizes) if name in ("auto", option.schedule)]
    if not wanted:
        raise ScheduleError(f"num_chunks ({config.num_chunks}) is none that {name} takes")
    try:
        return make_plan(planner.request(wanted, config.num_ranks, planner.settings))
    except MemoryLimitError as error:
        _, memory, needed = error.args
        raise ScheduleError(
            f"{config.device} has {bytes_text(memory)}, and any such plan needs "
            f"{bytes_text(needed)} or more of a device; "
            f"{planner.advice(planner.settings_named(name), config.num_ranks)}"
        ) from None


def estimate_model(config: DictConfig) -> None:
    """Print what each rank needs for the model of ``config``, in one plan or several.

    Raises:
        ValueError: The model, its data or a plan cannot be; or no plan fits ``device_memory``.
    """
    planner = ModelPlanner(config)
    limit = planner.memory
    names = [str(name) for name in _as_list(config.compare) or [config.strategy.schedule]]
    ranks = _as_list(config.num_ranks)
    for num_ranks in ranks:
        check_sizes(num_ranks=num_ranks)
    found: list[Estimate] = []
    refusals: list[str] = []
    with _progress("Counting what the model needs"):
        for num_ranks, name in product(ranks, names):
            try:
                found.append(planner.estimate(planner.settings_named(*parse_name(name)), num_ranks))
            except ValueError as error:
                reason = str(error).partition("\n")[0]
                is_one = len(ranks) * len(names) == 1
                refusals.append(reason if is_one else f"{name}, {num_ranks} ranks: {reason}")
    if not found:
        raise ScheduleError(refusals[0])
    least = min(found, key=lambda plan: plan.largest.device)
    if limit is not None and least.largest.device > limit:
        with _progress("It does not fit; searching for the fastest plan that does"):
            advice = planner.advice(least.settings, least.num_ranks)
        raise ScheduleError(_refusal(least, limit, advice))
    taken = min(max(rank.host for rank in plan.needs) for plan in found)
    if taken > planner.host_memory:
        raise ScheduleError(
            f"a rank needs {bytes_text(taken)} of its host, and strategy.host_memory_limit is "
            f"{planner.settings.host_memory_limit}; use more ranks, "
            f"+strategy.sharding=optimizer or less offload"
        )
    if config.format == "json":
        figures = [_describe(plan) for plan in found]
        is_one = not config.compare and len(found) == 1
        print_json(figures[0] if is_one else {"estimates": figures, "refused": refusals})
        return
    _print_estimates(found, refusals, limit, bool(config.compare))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _refusal(plan: Estimate, limit: float, advice: str) -> str:
    needs = plan.largest
    name, size = _unit([needs])
    parts = ", ".join(f"{part} {getattr(needs, part) / size:.1f} {name}" for part in ON_DEVICE)
    fullest = f"rank {plan.needs.index(needs)} of {plan.num_ranks}"
    return (
        f"{fullest} needs {needs.device / size:.1f} {name} "
        f"for {plan.name} ({parts}), and device_memory is {limit / size:.1f} {name}; {advice}"
    )


def _describe(plan: Estimate) -> dict[str, Any]:
    return {
        "schedule": plan.name,
        "num_ranks": plan.num_ranks,
        "num_microbatches": plan.num_microbatches,
        "recompute": plan.settings.recompute,
        "bubble": plan.step.timeline.bubble,
        "period_bubble": plan.step.bubble,
        "memory": describe_needs(plan.needs),
    }


def _print_estimates(
    found: Sequence[Estimate], refusals: Sequence[str], limit: float | None, are_compared: bool
) -> None:
    is_one = not are_compared and len(found) == 1
    console = Console()
    console.print(_table_of_ranks(found[0].needs) if is_one else _table_of_plans(found, limit))
    for plan in found:
        console.out(
            f"{plan.name}: {plan.num_ranks} ranks, {plan.num_microbatches} microbatches, bubble "
            f"{share_text(plan.step.bubble)} by the operations that are counted",
            highlight=False,
        )
    for line in refusals:
        console.out(line, highlight=False)


def _table_of_ranks(needs: Sequence[RankNeeds]) -> Table:
    name, size = _unit(needs)
    columns = _columns(needs)
    table = bare_table("rank", *columns, title=f"{name} of each rank", is_narrow=True)
    for index, rank in enumerate(needs):
        table.add_row(str(index), *_cells(rank, size, columns))
    return table


def _table_of_plans(found: Sequence[Estimate], limit: float | None) -> Table:
    """Return a table with the needs of each plan's fullest rank."""
    name, size = _unit([plan.largest for plan in found])
    fits = () if limit is None else ("fits",)
    title = f"{name} of the rank that needs most"
    shown = _columns([plan.largest for plan in found])
    columns = (Column("schedule", no_wrap=True), "ranks", *shown, *fits)
    table = bare_table(*columns, title=title, is_narrow=True)
    for plan in found:
        row = [plan.name, str(plan.num_ranks), *_cells(plan.largest, size, shown)]
        if limit is not None:
            row.append("yes" if plan.largest.device <= limit else "no")
        table.add_row(*row)
    return table


def _unit(needs: Sequence[RankNeeds]) -> tuple[str, int]:
    """Return the unit of figures side by side, and its bytes: GiB where a device needs 10 GiB."""
    return ("GiB", _GIB) if max(rank.device for rank in needs) >= 10 * _GIB else ("MiB", _MIB)


def _columns(needs: Sequence[RankNeeds]) -> dict[str, str]:
    """Return the headings, each with the name of its figure."""
    names = {name: name for name in (*ON_DEVICE, "device", "host")}
    if any(rank.host_optimizer for rank in needs):
        names["optimizer\non host"] = "host_optimizer"
    return names


def _cells(needs: RankNeeds, size: int, columns: Mapping[str, str]) -> list[str]:
    return [f"{getattr(needs, name) / size:.1f}" for name in columns.values()]
