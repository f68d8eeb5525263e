"""Plans of a model from its shapes: memory of each rank, times by counted operations, advice.

A model is planned by the bytes of its shapes and by its operations, divided by the rate that the
device reaches. Without a device operations are the unit of time, a copy there and back takes as
long as its stage's computing, and a byte to a tensor rank as long as ``OPERATIONS_PER_BYTE``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import mul, truediv
from statistics import mean
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from lightning_pipeoffload.cli.devices import Device, device_named, joined, kind_of_product
from lightning_pipeoffload.cli.given_plan import (
    SIZES_INSTEAD,
    has_barrier,
    needs_all_gradients,
)
from lightning_pipeoffload.cli.machine_links import Links
from lightning_pipeoffload.cli.model_probe import ModelProbe
from lightning_pipeoffload.cli.strategy_settings import settings_of
from lightning_pipeoffload.planning.figures import PlannedStep
from lightning_pipeoffload.planning.limits import SHARE_PLANNED, parse_bytes, parse_limits
from lightning_pipeoffload.planning.memory_needs import (
    OPERATIONS_PER_BYTE,
    MemoryNeeds,
    RankNeeds,
    StandIns,
)
from lightning_pipeoffload.planning.request import Fixed, Machines, Work, fill_request, options_of
from lightning_pipeoffload.planning.run_plans import first_plan
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.comm.transport import MOST_MICROBATCHES
from lightning_pipeoffload.runtime.device.devices import Device as KnownDevice
from lightning_pipeoffload.runtime.device.devices import Devices
from lightning_pipeoffload.schedule import Costs, Kind, Schedule, ScheduleError, Slices, lower
from lightning_pipeoffload.schedule.candidates import RECOMPUTATIONS, Candidate, Option, options
from lightning_pipeoffload.schedule.costs import COMPUTE_TIMES
from lightning_pipeoffload.schedule.families import FAMILIES, Recipe, check_sizes
from lightning_pipeoffload.schedule.make_plan import Plan, PlanRequest, make_plan
from lightning_pipeoffload.schedule.schedule import places_of, stages_on
from lightning_pipeoffload.schedule.slices import of_every_stage
from lightning_pipeoffload.schedule.text import seconds_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["ABOUT_EQUAL", "HOST_STEP", "MASTERS", "Estimate", "ModelPlanner", "Show"]

Show = Callable[[str], None]
"""Shows what is being done."""

ABOUT_EQUAL = 1.01
"""Of plans that take so little longer than the fastest, the simplest is taken."""
MASTERS = "++trainer.precision=bf16-true +strategy.master_weights=float32"
"""Words for weights in bfloat16 and their masters."""
HOST_STEP = "+strategy.optimizer_offload=true"
"""Words for an optimizer that steps on the host."""
_MORE_RANKS = (1, 2, 4, 8, 16)


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
        """The plan's name on the command line."""
        amount = self.settings.offload
        copies = "" if amount in ("none", "auto") else f"+{amount}"
        return f"{self.settings.schedule}{copies}"

    @property
    def largest(self) -> RankNeeds:
        """The needs of the rank that needs most on its device."""
        return max(self.needs, key=lambda rank: rank.device)


@dataclass(frozen=True)
class _Proposal:
    """A plan that fits, and the words of the command line that ask for it."""

    candidate: Candidate
    settings: PipelineSettings
    num_ranks: int
    words: Sequence[str]

    @property
    def order(self) -> tuple[int, float]:
        assert self.candidate.peak_memory is not None
        return len(self.words), self.candidate.peak_memory


# What memory and times of a rank follow from; schedules come from ``schedule`` and ``compare``.
_COUNTING = {
    *("schedule", "blocks", "split", "offload", "recompute", "head_weight_grad", "sharding"),
    *("data_parallel_size", "optimizer_offload", "optimizer_sync", "master_weights"),
    *("host_memory_limit", "rank_order"),
}
_INSTEAD = {
    "memory_limit": "write device_memory, of which weights and messages take their part",
    "tensor_parallel_size": "set tensor_parallel_size, without strategy.",
    **SIZES_INSTEAD,
}


class ModelPlanner:
    """Plans the model that conf/plan.yaml and the command line describe.

    Attributes:
        device: The device with the rates that it reaches; None: none is named.
        mixture: The device at each place of a pipeline, where they differ; else ().
        kind_of_product: The kind of its products, one of those of ``device.flops``.
        settings: The strategy's arguments that are given.

    Args:
        config: Conf/plan.yaml with the command line's overrides.
        show: Shows what is being done.
        like: The planner of the same model with another number of tensor ranks, which has traced
            it.

    Raises:
        ValueError: The device is unknown, or the model cannot be built.
    """

    def __init__(
        self,
        config: DictConfig,
        show: Show = lambda text: None,
        like: ModelPlanner | None = None,
    ) -> None:
        self.device: Device | None = None
        self.mixture: Sequence[Device] = ()
        self._show = show
        if config.device is not None:
            rates = {name: config[name] for name in ("host_bandwidth", "link", "network")}
            is_list = not isinstance(config.device, (str, int))
            named = [*config.device] if is_list else [config.device]
            devices = [device_named(name, config.efficiency, **rates) for name in named]
            self.device = joined(devices)
            self.mixture = devices if len({*named}) > 1 else ()
            check_sizes(devices_per_machine=config.devices_per_machine)
            precision = str((config.get("trainer") or {}).get("precision", "32-true"))
            self.kind_of_product = kind_of_product(self.device, precision, config.float16_sums)
        self._config, self._like = config, like
        self._num_chunks, self._count = config.num_chunks, config.num_microbatches
        self.num_slices = config.get("num_sequence_slices", 1)
        chunks = {} if self._num_chunks is None else {"num_chunks": self._num_chunks}
        counts = {"num_microbatches": self._count, "num_sequence_slices": self.num_slices}
        check_sizes(**counts, **chunks)
        size = {"tensor_parallel_size": config.get("tensor_parallel_size", 1)}
        PipelineSettings(num_sequence_slices=self.num_slices, **size)  # which it may refuse
        self.settings = settings_of(config, _COUNTING, _INSTEAD, schedule="auto", **size)
        self._has_barrier = has_barrier(config)
        self._is_clipped = needs_all_gradients(config)
        self._needs: dict[Any, MemoryNeeds] = {}

    @cached_property
    def probe(self) -> ModelProbe:
        like = None if self._like is None else self._like.probe
        return ModelProbe(self._config, like, self._unlike)

    @cached_property
    def _unlike(self) -> Devices | None:
        """The devices of a mixture as a run knows them; None: they are alike."""
        if not self.mixture:
            return None
        sizes = zip(self.mixture, self.memories, strict=True)
        known = [KnownDevice(device.name, "", "", int(size)) for device, size in sizes]
        rates = [device.flops[self.kind_of_product] for device in self.mixture]
        return Devices.of(known).with_times([1 / rate for rate in rates])

    @property
    def memories(self) -> Sequence[float]:
        """Bytes of each device of a mixture that plans may use."""
        if self._config.device_memory is not None:
            return [parse_bytes(self._config.device_memory, "device_memory")] * len(self.mixture)
        return [SHARE_PLANNED * device.memory for device in self.mixture]

    def memories_of(self, placement: Sequence[int]) -> Sequence[float]:
        """Return the bytes of each rank's device that plans may use."""
        places = places_of(placement)
        return [self.memories[place] if self.mixture else self.memory or inf for place in places]

    @property
    def mean_flops(self) -> float:
        """Operations of a device in a second, of a mixture the mean."""
        if not self.mixture:
            return self.flops
        return mean(device.flops[self.kind_of_product] for device in self.mixture)

    @cached_property
    def memory(self) -> float | None:
        """Bytes of a device that plans may use, of a mixture the largest; None: not known."""
        if self.mixture:
            return max(self.memories)
        if self._config.device_memory is not None:
            return parse_bytes(self._config.device_memory, "device_memory")
        return None if self.device is None else SHARE_PLANNED * self.device.memory

    @property
    def num_dividing(self) -> int:
        """The replicas that divide the batch among them; 1: each has a batch as large as it."""
        is_divided = self._config.get("devices") is not None
        return int(self.settings.data_parallel_size) if is_divided else 1

    @property
    def num_batches(self) -> int:
        """The batches as large as that of the data that all replicas have together in a step."""
        return int(self.settings.data_parallel_size) // self.num_dividing

    @property
    def devices_per_machine(self) -> int:
        """The devices of a machine."""
        devices = self._config.get("devices")
        return int(self._config.devices_per_machine if devices is None else devices)

    def in_layout(self, settings: PipelineSettings) -> ModelPlanner:
        """Return a planner by other sizes, with what this one has traced."""
        self.probe  # noqa: B018 - so that both have it
        planner = copy(self)
        planner.settings = settings
        return planner

    @property
    def flops(self) -> float:
        """Operations of the device in a second."""
        assert self.device is not None
        return self.device.flops[self.kind_of_product]

    def needs_of(self, option: Option, num_ranks: int) -> MemoryNeeds:
        """Return what the stages of an option need; the model is traced once for all options.

        Raises:
            ScheduleError: The model cannot be cut so.
        """
        placement = option.placement(num_ranks)
        varied: dict[str, Any] = {
            "recompute": option.recompute,
            "head_weight_grad": option.head_weight_grad,
        }
        kept = option.kept(num_ranks)
        key = placement, option.num_microbatches * self.num_dividing, kept, *varied.values()
        if key not in self._needs:
            settings = replace(self.settings, **varied)
            probe = self.probe  # not inside: what a model cannot be made by is no reason of a plan
            try:
                needs = probe.joined_needs(placement, self._count, settings, kept)
            except ScheduleError:
                raise
            except ValueError as error:
                raise ScheduleError(str(error)) from error
            times = self._count / self.num_dividing / option.num_microbatches
            self._needs[key] = needs.scaled(times)
        return self._needs[key]

    def costs_of(self, option: Option, num_ranks: int, settings: PipelineSettings) -> Costs:
        """Return the costs of an option's stages: bytes, and seconds or average blocks' work."""
        needs = self._with_optimizer(self.needs_of(option, num_ranks), settings)
        num_stages = len(needs.owned)
        unit = needs.flops_of_one / (self.flops if self.device else 1e12)
        compute: dict[str, Any] = {
            name: [unit * work for work in needs.costs.per_stage(name, num_stages)]
            for name in COMPUTE_TIMES
        }
        if option.recompute == "full":
            pairs = zip(compute["backward_input"], compute["forward"], strict=True)
            compute["backward_input"] = [b + f for b, f in pairs]
        copies = [sum(work) / 2 for work in zip(*compute.values(), strict=True)]
        per_byte: float = OPERATIONS_PER_BYTE
        if self.device is not None:
            per_byte = self.flops / self.links(settings).tensor_rate
        for name, waits in needs.waits(per_byte).items():
            pairs = zip(compute[name], waits, strict=True)
            compute[name] = [seconds + unit * wait for seconds, wait in pairs]
        if self.device is None:
            return replace(needs.costs, **compute, offload=copies, reload=copies, copy_lanes=2)
        links, placement = self.links(settings), option.placement(num_ranks)
        rates = [self.device.copy_rate] * num_stages
        if self._unlike is not None:
            of_ranks = places_of(placement)
            rates = [self.mixture[of_ranks[rank]].copy_rate for rank in placement]
            slowness = self._unlike.slowness_of(placement) or [1.0] * num_stages
            for name in COMPUTE_TIMES:
                compute[name] = [*map(mul, compute[name], slowness)]
        if option.num_sequence_slices > 1:
            compute["slices"] = self._slices(needs, option)
        sizes = needs.costs.per_stage("activation", num_stages)
        copies = [*map(truediv, sizes, rates)]
        compute["communication"] = links.message_seconds(needs.sent[Kind.SEND_F], placement)
        if int(settings.data_parallel_size) > 1:
            compute["reduce"] = links.reduce_seconds(needs.gradient_bytes(), placement)
        if needs.is_on_host:
            compute["step"] = [moved / self.device.host_rate for moved in needs.step_bytes()]
        return replace(needs.costs, **compute, offload=copies, reload=copies, copy_lanes=2)

    def _slices(self, needs: MemoryNeeds, option: Option) -> Slices | None:
        """Return slices that take equal time, and how costs divide among them."""
        slices, num_stages = needs.slices, len(needs.owned)
        if option.recompute == "full":  # B has the shares of F as well
            both = [needs.costs.per_stage(name, num_stages) for name in COMPUTE_TIMES[:2]]
            names = "quadratic_forward", "quadratic_backward_input"
            shares = [of_every_stage(n, getattr(slices, n), num_stages) for n in names]
            stages = zip(*both, *shares, strict=True)
            mixed = tuple((f * a + b * c) / ((f + b) or 1.0) for f, b, a, c in stages)
            slices = replace(slices, quadratic_backward_input=mixed)
        costs = replace(needs.costs, slices=slices)
        num_slices, length = option.num_sequence_slices, self.probe.num_tokens_of_sequence
        sizes = (num_slices,) if length is None else (num_slices, length)
        return costs.with_equal_slices(num_stages, *sizes).slices

    def links(self, settings: PipelineSettings) -> Links:
        """Return the links between the ranks of these settings."""
        assert self.device is not None
        return Links(self.device, settings, self.devices_per_machine)

    def options(self, name: str, count: int, recomputes: Sequence[str]) -> list[Option]:
        """Return the options of a schedule, or of all families with "auto"."""
        heads = self.settings.heads_to_try
        wanted = options_of(name, [count], self._num_chunks, recomputes, heads, self.num_slices)
        if not self.mixture:
            return wanted
        counts = 0, len(self.mixture), 1
        return [replace(option, num_kept=kept) for option in wanted for kept in counts]

    def plan(self, request: PlanRequest) -> tuple[Plan, list[RankNeeds]]:
        """Return the fastest plan that fits a device, and what its ranks need with messages.

        Raises:
            ScheduleError: None fits, or none can be made.
        """
        plan, memory = make_plan(request), self.memory
        assert memory is not None
        needs = self.rank_needs(plan)
        limits = self.memories_of(plan.schedule.placement)
        if all(rank.device <= limit for rank, limit in zip(needs, limits, strict=True)):
            return plan, needs
        messages = max(rank.messages for rank in needs)  # the planner counts none
        plan = make_plan(replace(request, memory_limit=memory - messages))
        return plan, self.rank_needs(plan)

    def rank_needs(self, plan: Plan) -> list[RankNeeds]:
        """Return the memory that each rank of a plan needs, messages included."""
        num_ranks = plan.schedule.num_ranks
        needs = self._with_optimizer(self.needs_of(plan.best.option, num_ranks), self.settings)
        return needs.in_slices(plan.costs).of_ranks(lower(plan.schedule))

    def memory_beside(self, option: Option, num_ranks: int, settings: PipelineSettings) -> float:
        """Return the bytes of the fullest rank besides activations."""
        return max(self._beside(option, num_ranks, settings))

    def _beside(
        self, option: Option, num_ranks: int, settings: PipelineSettings
    ) -> Sequence[float]:
        needs = self._with_optimizer(self.needs_of(option, num_ranks), settings)
        placement = option.placement(num_ranks)
        return [needs.taken_by(stages_on(placement, rank)) for rank in range(num_ranks)]

    def least_beside(self, option: Option, num_ranks: int, settings: PipelineSettings) -> float:
        """Return the bytes besides activations that one rank of any cut has at least."""
        return self._with_optimizer(self.needs_of(option, 1), settings).least_of_any(num_ranks)

    def _with_optimizer(self, needs: MemoryNeeds, settings: PipelineSettings) -> MemoryNeeds:
        """Return the needs with optimizer states where the settings have them."""
        num_sharing = settings.num_sharing(int(settings.data_parallel_size))
        on_host, has_masters = settings.optimizer_offload, settings.master_weights is not None
        stand_ins = None
        if on_host or has_masters:
            by_bucket, obstacle = self.probe.host_step if on_host else self.probe.master_step
            if obstacle:
                raise ScheduleError(obstacle)
            stand_ins = StandIns(by_bucket, has_masters, on_host)
        return replace(needs, num_sharing=num_sharing, stand_ins=stand_ins)

    @property
    def host_memory(self) -> float:
        """Bytes of host memory that a rank may take."""
        limits = parse_limits(self.settings.host_memory_limit, "host_memory_limit", 1)
        return inf if limits is None else min(limits)

    def request(
        self,
        wanted: Sequence[Option],
        num_ranks: int,
        settings: PipelineSettings,
        recipes: Mapping[str, Recipe] = FAMILIES,
        must_fit: bool = True,
        **how: Any,
    ) -> PlanRequest:
        """Return the request for some options; offload and sharding are those of the settings."""
        work = Work(
            num_ranks,
            lambda option: self.costs_of(option, num_ranks, settings),
            lambda option: (
                self._beside(option, num_ranks, settings)
                if self.mixture
                else self.memory_beside(option, num_ranks, settings)
            ),
            lambda option: self._has_barrier,
            self.steps_early(settings),
        )
        names = [device.name for device in self.mixture]
        machines = Machines(self.memories if names else self.memory, must_fit, names=names)
        fixed = Fixed(wanted, settings.offload, recipes)
        return fill_request(work, machines, fixed, show=self._show, **how)

    def steps_early(self, settings: PipelineSettings) -> bool:
        """Whether an optimizer on the host steps as gradients become final."""
        is_alone = settings.data_parallel_size == 1 and not self._is_clipped
        return settings.optimizer_offload and is_alone and self.probe.host_step[0]

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
        step = PlannedStep(plan, needs.costs_by_operations, self._has_barrier)
        return Estimate(settings, num_ranks, count, needs.of_ranks(plan), step)

    def advice(self, asked: PipelineSettings, num_ranks: int) -> str:
        """Return the words that ask for the fastest plan that fits.

        Schedules, chunks, recomputation, offload, microbatches and sharding may change; where no
        plan fits the optimizer steps masters that replicas divide, else on the host, and where none
        fits then the number of ranks is another. Of plans that take about as long it is that with
        the fewest changes.
        """
        self.probe.recomputes = RECOMPUTATIONS
        for times in _MORE_RANKS:
            for planner, changed in self.places(asked):
                best = planner._best(asked, num_ranks, times, changed)
                if best is not None:
                    return f"use {' '.join(best.words)}: {self._step_time(best, asked, num_ranks)}"
        return "use a smaller model, batch or data type"

    def places(self, asked: PipelineSettings) -> Iterator[tuple[ModelPlanner, dict[str, Any]]]:
        """Yield what the optimizer may step where: the planner, and the settings that change."""
        yield self, {}
        is_whole = self.probe.precision == "bf16-mixed" and not asked.optimizer_offload
        if is_whole and asked.data_parallel_size != 1 and not self.probe.master_step[1]:
            yield self._with_masters, {"master_weights": "float32"}
        if not asked.optimizer_offload and not self.probe.host_step[1]:
            yield self, {"optimizer_offload": True}

    @cached_property
    def _with_masters(self) -> ModelPlanner:
        """The planner of the same run with weights in bfloat16 and their masters."""
        config = deepcopy(self._config)
        OmegaConf.update(config, "trainer.precision", "bf16-true", force_add=True)
        OmegaConf.update(config, "strategy.master_weights", "float32", force_add=True)
        return ModelPlanner(config, self._show)

    def _best(
        self, asked: PipelineSettings, num_ranks: int, times: int, changed: Mapping[str, Any]
    ) -> _Proposal | None:
        proposals = [*self._search(asked, num_ranks, times, changed)]
        while proposals:
            fastest = min(each.candidate.score for each in proposals)
            near = [f for f in proposals if f.candidate.score <= fastest * ABOUT_EQUAL]
            best = min(near, key=lambda each: each.order)
            if self._fits(best):
                return best
            proposals.remove(best)
        return None

    def _fits(self, proposal: _Proposal) -> bool:
        """Whether a plan fits with its messages too."""
        self.probe.recomputes = ()  # its own suffices
        try:
            estimate = self.estimate(proposal.settings, proposal.num_ranks)
        except ValueError:
            return False
        on_host = max(rank.host for rank in estimate.needs)
        return estimate.largest.device <= (self.memory or inf) and on_host <= self.host_memory

    def _step_time(self, proposal: _Proposal, asked: PipelineSettings, num_ranks: int) -> str:
        period = proposal.candidate.period
        assert period is not None
        if self.device is not None:
            on_top = " and the optimizer's on the host" * proposal.settings.optimizer_offload
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
        self, asked: PipelineSettings, num_ranks: int, times: int, changed: Mapping[str, Any]
    ) -> Iterator[_Proposal]:
        """Yield plans that fit on multiples of the ranks."""
        counts = [self._count * n for n in (1, 2, 4)]
        counts = [c for c in counts if c <= MOST_MICROBATCHES and self.probe.batch_size % c == 0]
        wanted = [
            option
            for option in options(
                counts, recompute=RECOMPUTATIONS, head_weight_grad=asked.heads_to_try
            )
            if not FAMILIES[option.schedule].takes_seconds
        ]
        shardings = ["none"] if asked.data_parallel_size == 1 else ["none", "optimizer"]
        best = inf
        for sharding in dict.fromkeys([asked.sharding, *shardings]):
            settings = replace(asked, schedule="auto", offload="auto", sharding=sharding, **changed)
            request = self.request(wanted, times * num_ranks, settings, omits_above=best)
            try:
                plan = make_plan(request)
            except ScheduleError:
                continue
            best = min(best, plan.best.score)
            for candidate in plan.candidates:
                if candidate.fits:
                    yield self._proposal(candidate, asked, settings, num_ranks, times)

    def _proposal(
        self,
        candidate: Candidate,
        asked: PipelineSettings,
        settings: PipelineSettings,
        num_ranks: int,
        times: int,
    ) -> _Proposal:
        option, before = candidate.option, self._option(asked)
        offload = asked.offload if candidate.offload == "its own" else settings.offload
        settings = replace(
            settings,
            schedule=option.schedule,
            num_chunks=option.num_chunks,
            num_microbatches=option.num_microbatches,
            recompute=option.recompute,
            head_weight_grad=option.head_weight_grad,
            offload="none" if candidate.offload == "none" else offload,
        )
        is_default = option.num_chunks == FAMILIES[option.schedule].num_chunks
        changes = {
            f"num_ranks={times * num_ranks}": times > 1,
            f"schedule={option.schedule}": option.schedule != before.schedule,
            f"num_chunks={option.num_chunks}": not is_default
            or (self._num_chunks not in (None, option.num_chunks)),
            f"num_microbatches={option.num_microbatches}": option.num_microbatches != self._count,
            "num_sequence_slices=1": option.num_sequence_slices != self.num_slices,
            f"offload={settings.offload}": settings.offload != asked.offload,
            f"strategy.recompute={option.recompute}": option.recompute != asked.recompute,
            f"+strategy.head_weight_grad={option.head_weight_grad}": option.head_weight_grad
            != before.head_weight_grad,
            f"+strategy.sharding={settings.sharding}": settings.sharding != asked.sharding,
            MASTERS: settings.master_weights != asked.master_weights,
            HOST_STEP: settings.optimizer_offload and not asked.optimizer_offload,
        }
        words = [word for word, is_changed in changes.items() if is_changed]
        return _Proposal(candidate, settings, times * num_ranks, words)
