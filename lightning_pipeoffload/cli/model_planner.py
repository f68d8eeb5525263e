"""What ``pipeoffload-plan`` plans a model by: bytes of its shapes, and rates of a data sheet.

Operations are counted, and divided by what the device reaches; without a device they are the unit
of time, and a copy there and back takes as long as its stage's computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

from lightning_pipeoffload.cli.devices import Device, device_named, kind_of_precision
from lightning_pipeoffload.cli.given_plan import steps_of
from lightning_pipeoffload.cli.model_probe import ModelProbe
from lightning_pipeoffload.planning.limits import parse_bytes
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds, RankNeeds
from lightning_pipeoffload.planning.plan_request import first_plan
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.transport import MOST_MICROBATCHES
from lightning_pipeoffload.schedule import Costs, Kind, Schedule, ScheduleError, lower, simulate
from lightning_pipeoffload.schedule.candidates import Candidate, Option, options
from lightning_pipeoffload.schedule.families import FAMILIES
from lightning_pipeoffload.schedule.make_plan import Plan, PlanRequest, make_plan
from lightning_pipeoffload.schedule.placement import stages_on
from lightning_pipeoffload.schedule.quantities import seconds_text
from lightning_pipeoffload.schedule.recipe import check_sizes

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Estimate", "ModelPlanner"]

_COMPUTE = ("forward", "backward_input", "backward_weight")
_WAYS = ("none", "cheap", "full")  # to recompute
_ABOUT_EQUAL = 1.01  # Of plans that take so little longer, that with the fewest changes is named.


@dataclass(frozen=True)
class Estimate:
    """What a plan needs.

    Attributes:
        settings: The settings of the plan.
        num_ranks: The number of its ranks.
        num_microbatches: The number of its microbatches.
        needs: What each rank needs.
        bubble: The idle share of a step, by the operations that are counted.
    """

    settings: PipelineSettings
    num_ranks: int
    num_microbatches: int
    needs: Sequence[RankNeeds]
    bubble: float

    @property
    def name(self) -> str:
        """The plan in words, as they are on the command line."""
        amount = self.settings.offload
        copies = "" if amount in ("none", "auto") else f"+{amount}"
        return f"{self.settings.schedule}{copies}"

    @property
    def largest(self) -> RankNeeds:
        """What the rank needs that needs most on its device."""
        return max(self.needs, key=lambda rank: rank.device)

    @property
    def device(self) -> int:
        """The most that a rank needs on its device."""
        return self.largest.device


@dataclass(frozen=True)
class _Found:
    """A plan that fits, and what to write on the command line for it."""

    candidate: Candidate
    settings: PipelineSettings
    num_ranks: int
    words: Sequence[str]

    @property
    def rank(self) -> tuple[int, float]:
        assert self.candidate.peak_memory is not None
        return len(self.words), self.candidate.peak_memory


class ModelPlanner:
    """Plans one model.

    Args:
        config: Conf/plan.yaml with the command line's overrides.

    Attributes:
        device: The device with the rates that it reaches; None: none is named.
        batch_size: Samples of a batch.

    Raises:
        ValueError: The device is unknown, or the model cannot be built.
    """

    def __init__(self, config: DictConfig) -> None:
        self.device: Device | None = None
        if config.device is not None:
            self.device = device_named(config.device, config.efficiency)
        self._given, strategy = config.device_memory, config.strategy
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
        )
        self._has_barrier = steps_of(config).has_barrier
        self._needs: dict[Any, MemoryNeeds] = {}
        self._config = config

    @cached_property
    def probe(self) -> ModelProbe:
        """The model, whose shapes tell."""
        return ModelProbe(self._config)

    @cached_property
    def memory(self) -> float | None:
        """Bytes of a device; None: not known."""
        if self._given is not None:
            return parse_bytes(self._given, "device_memory")
        return None if self.device is None else self.device.memory

    @property
    def flops(self) -> float:
        """Operations that the device makes in a second."""
        assert self.device is not None
        return self.device.flops[kind_of_precision(self.probe.precision)]

    def needs_of(self, option: Option, num_ranks: int) -> MemoryNeeds:
        """Return what the stages of an option need; one look at the model tells it for all.

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
        """Return what the stages of an option cost: bytes, and seconds or average blocks' work.

        Raises:
            ScheduleError: The model cannot be cut so.
        """
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
        kept = needs.costs.per_stage("activation", num_stages)
        if self.device is None:
            copies = [sum(work) / 2 for work in zip(*compute.values(), strict=True)]
            return replace(needs.costs, **compute, offload=copies, reload=copies, copy_lanes=2)
        copies = [size / self.device.copy_rate for size in kept]
        messages = [sent / self.device.link_rate for sent in needs.sent[Kind.SEND_F]]
        times: dict[str, Any] = {
            "communication": messages, "offload": copies, "reload": copies
        }  # fmt: skip
        return replace(needs.costs, **compute, **times, copy_lanes=2)

    def taken(self, option: Option, num_ranks: int, num_sharing: int | None = None) -> float:
        """Return the bytes of what the fullest rank holds besides activations."""
        if num_sharing is None:
            num_sharing = self.settings.num_sharing(int(self.settings.data_parallel_size))
        needs = replace(self.needs_of(option, num_ranks), num_sharing=num_sharing)
        placement = option.placement(num_ranks)
        return max(needs.kept_by(stages_on(placement, rank)) for rank in range(num_ranks))

    def request(
        self, wanted: Sequence[Option], num_ranks: int, settings: PipelineSettings, **more: Any
    ) -> PlanRequest:
        """Return what is asked for a number of ranks; offload and sharding as settings have it."""
        num_sharing = settings.num_sharing(int(settings.data_parallel_size))
        return PlanRequest(
            num_ranks,
            wanted,
            lambda option: self.costs_of(option, num_ranks),
            self.memory,
            settings.offload,
            lambda option: self.taken(option, num_ranks, num_sharing),
            lambda option: self._has_barrier,
            **more,
        )

    def settings_named(self, schedule: str, offload: str | float | None = None) -> PipelineSettings:
        """Return the settings with a schedule by its name, and an amount of offload if given."""
        offload = self.settings.offload if offload is None else offload
        return replace(self.settings, schedule=schedule, offload=offload)

    def plan(self, wanted: Sequence[Option], num_ranks: int) -> Plan:
        """Plan the options, for the settings that are given."""
        return make_plan(self.request(wanted, num_ranks, self.settings))

    def estimate(self, settings: PipelineSettings, num_ranks: int) -> Estimate:
        """Estimate the first plan of a run.

        Raises:
            ValueError: The plan cannot be, or the model cannot be cut so.
        """
        count = settings.choose_num_microbatches(num_ranks, self.probe.batch_size)
        replicas = int(settings.data_parallel_size)

        def needs_of(plan: Schedule) -> Sequence[RankNeeds]:
            needs = self.probe.joined_needs(plan.placement, count, settings)
            return replace(needs, num_sharing=settings.num_sharing(replicas)).of_ranks(plan)

        if settings.offload == "auto" and self.memory is not None:
            request = self.request([settings.option(count)], num_ranks, settings, must_fit=False)
            plan = lower(make_plan(request).schedule)
            most = max(rank.messages for rank in needs_of(plan))  # which the planner leaves out
            request = replace(request, memory_limit=self.memory - most)
            plan = lower(make_plan(request).schedule)
        else:
            plan = lower(first_plan(settings, num_ranks, count)[0])
        needs = self.probe.joined_needs(plan.placement, count, settings)
        bubble = simulate(plan, needs.costs).bubble
        return Estimate(settings, num_ranks, count, needs_of(plan), bubble)

    def advice(self, asked: PipelineSettings, num_ranks: int) -> str:
        """Return what to write for the fastest plan that fits; more ranks only where none does.

        Of plans that take about as long it is that with the fewest changes of what was asked for.
        """
        for times in (1, 2, 4, 8, 16):
            found = [*self._search(asked, num_ranks, times)]
            while found:
                fastest = min(each.candidate.score for each in found)
                near = [f for f in found if f.candidate.score <= fastest * _ABOUT_EQUAL]
                best = min(near, key=lambda each: each.rank)
                if self._fits(best):
                    return f"use {' '.join(best.words)}: {self._step(best, asked, num_ranks)}"
                found.remove(best)
        return "use a smaller model, batch or data type"

    def _fits(self, found: _Found) -> bool:
        """Whether a plan fits with its messages too."""
        try:
            return self.estimate(found.settings, found.num_ranks).device <= (self.memory or inf)
        except ValueError:
            return False

    def _step(self, found: _Found, asked: PipelineSettings, num_ranks: int) -> str:
        period = found.candidate.period
        assert period is not None
        if self.device is not None:
            return f"a step takes {seconds_text(period)}"
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

    def _search(self, asked: PipelineSettings, num_ranks: int, times: int) -> Iterator[_Found]:
        """Yield plans that fit on so many times the ranks."""
        total = self.probe.batch_size
        counts = [c for c in (self._count * n for n in (1, 2, 4)) if total % c == 0]
        counts = [c for c in counts if c <= MOST_MICROBATCHES]
        wanted = [o for o in options(counts, recompute=_WAYS) if self._is_quick(o)]
        shardings = ["none"] if asked.data_parallel_size == 1 else ["none", "optimizer"]
        best = inf
        for sharding in dict.fromkeys([asked.sharding, *shardings]):
            settings = replace(asked, schedule="auto", offload="auto", sharding=sharding)
            request = self.request(wanted, times * num_ranks, settings, omits_above=best)
            try:
                plan = make_plan(request)
            except ScheduleError:
                continue
            best = min(best, plan.best.score)
            for candidate in plan.candidates:
                if candidate.fits:
                    yield self._found(candidate, asked, settings, num_ranks, times)

    def _is_quick(self, option: Option) -> bool:
        return not FAMILIES[option.schedule].takes_seconds

    def _found(
        self,
        candidate: Candidate,
        asked: PipelineSettings,
        settings: PipelineSettings,
        num_ranks: int,
        times: int,
    ) -> _Found:
        option = candidate.option
        offload = settings.offload if candidate.offload != "none" else "none"
        offload = asked.offload if candidate.offload == "its own" else offload
        settings = replace(
            settings,
            schedule=option.schedule,
            num_chunks=option.num_chunks,
            num_microbatches=option.num_microbatches,
            recompute=option.recompute,
            offload=offload,
        )
        before = self._option(asked)
        is_default = option.num_chunks == FAMILIES[option.schedule].num_chunks
        changes = {
            f"num_ranks={times * num_ranks}": times > 1,
            f"schedule={option.schedule}": option.schedule != before.schedule,
            f"num_chunks={option.num_chunks}": not is_default
            or (self._num_chunks not in (None, option.num_chunks)),
            f"num_microbatches={option.num_microbatches}": option.num_microbatches != self._count,
            f"offload={offload}": offload != asked.offload,
            f"strategy.recompute={option.recompute}": option.recompute != asked.recompute,
            f"+strategy.sharding={settings.sharding}": settings.sharding != asked.sharding,
        }
        words = [word for word, is_changed in changes.items() if is_changed]
        return _Found(candidate, settings, times * num_ranks, words)
