"""Plans of a model from its shapes: memory of each rank, times by counted operations.

A model is planned by the bytes of its shapes and by its operations, divided by the rate that the
device reaches. Without a device operations are the unit of time, a copy there and back takes as
long as its stage's computing, and a byte to a tensor rank as long as ``OPERATIONS_PER_BYTE``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import mul, truediv
from statistics import mean
from typing import TYPE_CHECKING, Any

from lightning_pipeoffload.cli.devices import Device, device_named, matmul_kind, merge_devices
from lightning_pipeoffload.cli.given_plan import (
    SIZES_INSTEAD,
    has_barrier,
    needs_all_gradients,
)
from lightning_pipeoffload.cli.machine_links import Links
from lightning_pipeoffload.cli.model_probe import ModelProbe
from lightning_pipeoffload.cli.strategy_settings import settings_of, with_values
from lightning_pipeoffload.planning.figures import PlannedStep
from lightning_pipeoffload.planning.limits import SHARE_PLANNED, parse_bytes, parse_limits
from lightning_pipeoffload.planning.memory_needs import (
    OPERATIONS_PER_BYTE,
    MemoryNeeds,
    RankNeeds,
    StandInTraits,
)
from lightning_pipeoffload.planning.plan_options import options_of
from lightning_pipeoffload.planning.run_plans import build_first_schedule
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.device import Device as KnownDevice
from lightning_pipeoffload.runtime.device import Devices
from lightning_pipeoffload.schedule import (
    COMPUTE_TIMES,
    FAMILIES,
    Costs,
    Kind,
    MemoryLimitError,
    Plan,
    PlanOption,
    PlanRequest,
    Recipe,
    Schedule,
    ScheduleError,
    Slices,
    check_positive_integers,
    device_indices,
    expand_to_stages,
    lower,
    make_plan,
    stages_on,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

Show = Callable[[str], None]
"""Shows what is being done."""


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
    def fullest_rank(self) -> RankNeeds:
        """The needs of the rank that needs most on its device."""
        return max(self.needs, key=lambda rank: rank.device)


# What memory and times of a rank follow from; schedules come from ``schedule`` and ``compare``.
_COUNTING = {
    *("schedule", "blocks", "split", "offload", "recompute", "head_weight_grad", "sharding"),
    *("data_parallel_size", "optimizer_offload", "optimizer_sync", "master_weights"),
    "rank_order",
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
        matmul_kind: The kind of its products, one of those of ``device.flops``.
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
            self.device = merge_devices(devices)
            self.mixture = devices if len({*named}) > 1 else ()
            check_positive_integers(devices_per_machine=config.devices_per_machine)
            precision = str((config.get("trainer") or {}).get("precision", "32-true"))
            self.matmul_kind = matmul_kind(self.device, precision, config.float16_sums)
        self._config, self._like = config, like
        self._count = config.num_microbatches
        self.num_slices = config.get("num_sequence_slices", 1)
        chunks = {} if config.num_chunks is None else {"num_chunks": config.num_chunks}
        counts = {"num_microbatches": self._count, "num_sequence_slices": self.num_slices}
        check_positive_integers(**counts, **chunks)
        size = {"tensor_parallel_size": config.get("tensor_parallel_size", 1)}
        PipelineSettings(num_sequence_slices=self.num_slices, **size)  # which it may refuse
        # A plan for a device prints what it needs of its host, whose memory is not limited.
        limited = {"host_memory_limit"} if self.device is None else set()
        self.settings = settings_of(config, _COUNTING | limited, _INSTEAD, schedule="auto", **size)
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
        rates = [device.flops[self.matmul_kind] for device in self.mixture]
        return Devices.of(known).with_slowness_from([1 / rate for rate in rates])

    @property
    def memories(self) -> Sequence[float]:
        """Bytes of each device of a mixture that plans may use."""
        if self._config.device_memory is not None:
            return [parse_bytes(self._config.device_memory, "device_memory")] * len(self.mixture)
        return [SHARE_PLANNED * device.memory for device in self.mixture]

    def memories_of(self, placement: Sequence[int]) -> Sequence[float]:
        """Return the bytes of each rank's device that plans may use."""
        places = device_indices(placement)
        return [self.memories[place] if self.mixture else self.memory or inf for place in places]

    @property
    def mean_flops_per_second(self) -> float:
        """Operations of a device in a second, of a mixture the mean."""
        if not self.mixture:
            return self.flops
        return mean(device.flops[self.matmul_kind] for device in self.mixture)

    @cached_property
    def memory(self) -> float | None:
        """Bytes of a device that plans may use, of a mixture the largest; None: not known."""
        if self.mixture:
            return max(self.memories)
        if self._config.device_memory is not None:
            return parse_bytes(self._config.device_memory, "device_memory")
        return None if self.device is None else SHARE_PLANNED * self.device.memory

    @property
    def num_dividing_replicas(self) -> int:
        """The replicas that divide the batch among them; 1: each has a batch as large as it."""
        return int(self.settings.data_parallel_size) if self.is_searched else 1

    @property
    def num_batches(self) -> int:
        """The batches as large as that of the data that all replicas have together in a step."""
        return int(self.settings.data_parallel_size) // self.num_dividing_replicas

    @property
    def devices_per_machine(self) -> int:
        """The devices of a machine."""
        config = self._config
        return int(config.devices if self.is_searched else config.devices_per_machine)

    @property
    def is_searched(self) -> bool:
        """Whether layouts are searched, whose replicas divide the batch among them."""
        return self._config.get("devices") is not None

    def with_values(self, values: Mapping[str, Any]) -> ModelPlanner:
        """Return a planner of the same model with other values of the configuration."""
        return ModelPlanner(with_values(self._config, values), self._show, self._like)

    def with_settings(self, settings: PipelineSettings) -> ModelPlanner:
        """Return a planner by other sizes, with what this one has traced."""
        self.probe  # noqa: B018 - so that both have it
        planner = copy(self)
        planner.settings = settings
        return planner

    @property
    def flops(self) -> float:
        """Operations of the device in a second."""
        assert self.device is not None
        return self.device.flops[self.matmul_kind]

    def needs_of(self, option: PlanOption, num_ranks: int) -> MemoryNeeds:
        """Return what the stages of an option need; the model is traced once for all options.

        Raises:
            ScheduleError: The model cannot be cut so.
        """
        placement = option.placement(num_ranks)
        varied: dict[str, Any] = {
            "recompute": option.recompute,
            "head_weight_grad": option.head_weight_grad,
        }
        kept = option.max_live_by_stage(num_ranks)
        key = (
            placement,
            option.num_microbatches * self.num_dividing_replicas,
            kept,
            *varied.values(),
        )
        if key not in self._needs:
            settings = replace(self.settings, **varied)
            probe = self.probe  # not inside: what a model cannot be made by is no reason of a plan
            try:
                needs = probe.joined_needs(placement, self._count, settings, kept)
            except ScheduleError:
                raise
            except ValueError as error:
                raise ScheduleError(str(error)) from error
            times = self._count / self.num_dividing_replicas / option.num_microbatches
            self._needs[key] = needs.scale_microbatch(times)
        return self._needs[key]

    def costs_of(self, option: PlanOption, num_ranks: int) -> Costs:
        """Return the costs of an option's stages: bytes, and seconds or average blocks' work."""
        needs = self._add_optimizer_needs(self.needs_of(option, num_ranks))
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
            per_byte = self.flops / self.links.tensor_rate
        for name, waits in needs.collective_waits(per_byte).items():
            pairs = zip(compute[name], waits, strict=True)
            compute[name] = [seconds + unit * wait for seconds, wait in pairs]
        if self.device is None:
            return replace(needs.costs, **compute, offload=copies, reload=copies, copy_lanes=2)
        links, placement = self.links, option.placement(num_ranks)
        rates = [self.device.copy_rate] * num_stages
        if self._unlike is not None:
            of_ranks = device_indices(placement)
            rates = [self.mixture[of_ranks[rank]].copy_rate for rank in placement]
            slowness = self._unlike.slowness_per_stage(placement) or [1.0] * num_stages
            for name in COMPUTE_TIMES:
                compute[name] = [*map(mul, compute[name], slowness)]
        if option.num_sequence_slices > 1:
            compute["slices"] = self._slices(needs, option)
        sizes = needs.costs.per_stage("activation", num_stages)
        copies = [*map(truediv, sizes, rates)]
        compute["communication"] = links.message_seconds(needs.sent[Kind.SEND_F], placement)
        if int(self.settings.data_parallel_size) > 1:
            compute["reduce"] = links.reduce_seconds(needs.gradient_bytes(), placement)
        if needs.has_host_optimizer:
            compute["step"] = [
                moved / self.device.host_rate for moved in needs.optimizer_step_traffic()
            ]
        return replace(needs.costs, **compute, offload=copies, reload=copies, copy_lanes=2)

    def _slices(self, needs: MemoryNeeds, option: PlanOption) -> Slices | None:
        """Return slices that take equal time, and how costs divide among them."""
        slices, num_stages = needs.slices, len(needs.owned)
        if option.recompute == "full":  # B has the shares of F as well
            both = [needs.costs.per_stage(name, num_stages) for name in COMPUTE_TIMES[:2]]
            names = "quadratic_forward", "quadratic_backward_input"
            shares = [expand_to_stages(n, getattr(slices, n), num_stages) for n in names]
            stages = zip(*both, *shares, strict=True)
            mixed = tuple((f * a + b * c) / ((f + b) or 1.0) for f, b, a, c in stages)
            slices = replace(slices, quadratic_backward_input=mixed)
        costs = replace(needs.costs, slices=slices)
        num_slices, length = option.num_sequence_slices, self.probe.num_tokens_of_sequence
        sizes = (num_slices,) if length is None else (num_slices, length)
        return costs.with_balanced_slices(num_stages, *sizes).slices

    @property
    def links(self) -> Links:
        """The links between the ranks."""
        assert self.device is not None
        return Links(self.device, self.settings, self.devices_per_machine)

    def options(
        self, name: str, counts: Sequence[int], recomputes: Sequence[str], num_slices: int = 1
    ) -> list[PlanOption]:
        """Return the options of a schedule, or of all families with "auto"."""
        settings = self.settings
        heads, chunks = settings.head_weight_grad_choices, settings.num_chunks
        wanted = options_of(name, counts, chunks, recomputes, heads, num_slices)
        if not self.mixture:
            return wanted
        numbers = 0, len(self.mixture), 1
        return [replace(option, num_kept=kept) for option in wanted for kept in numbers]

    def plan(self, request: PlanRequest) -> tuple[Plan, list[RankNeeds]]:
        """Return the fastest plan that fits a device, and what its ranks need with messages.

        Where plans need not fit, it is that which needs least if none does.

        Raises:
            ScheduleError: None fits, none can be made, or all take longer than ``omits_above``.
        """
        plan, most = make_plan(request), request.omits_above
        # Not later: counting the messages of a large plan takes seconds.
        if most is not None and plan.best.score > most:
            raise ScheduleError("no plan is as fast as one that is known")
        needs = self.rank_needs(plan.best.option, plan.schedule)
        if self.has_room(needs, plan.schedule):
            return plan, needs
        assert request.memory_limit is not None
        limits, messages = request.memory_limit, max(rank.messages for rank in needs)
        limits = limits if isinstance(limits, Sequence) else [limits]
        plans, error = [plan], None
        try:
            left = [limit - messages for limit in limits]
            plans.append(make_plan(replace(request, memory_limit=left)))
        except MemoryLimitError as too_small:
            error = too_small
        # Others may have fewer messages.
        found = [
            (each, of)
            for of in plans
            for each in of.candidates
            if each.fits and each is not plan.best
        ]
        for best, of in sorted(found, key=lambda pair: pair[0].score):
            assert best.schedule is not None
            needs = self.rank_needs(best.option, best.schedule)
            if self.has_room(needs, best.schedule):
                costs, chosen = (
                    self.costs_of(best.option, request.num_ranks),
                    replace(best, reason=""),
                )
                others = [
                    chosen if each is best else each.with_rejection_reason(chosen)
                    for each in of.candidates
                ]
                return Plan(chosen, best.schedule, costs, others), needs
        if request.must_fit:
            most = max(rank.device for rank in needs)
            sentence = "{limit} of a device is less than the {needed} that it needs with messages"
            raise error or MemoryLimitError(sentence, max(limits), most)
        return plans[-1], self.rank_needs(plans[-1].best.option, plans[-1].schedule)

    def has_room(self, needs: Sequence[RankNeeds], plan: Schedule) -> bool:
        """Whether all ranks' devices have room for what they need."""
        limits = self.memories_of(plan.placement)
        return all(rank.device <= limit for rank, limit in zip(needs, limits, strict=True))

    def rank_needs(self, option: PlanOption, plan: Schedule) -> list[RankNeeds]:
        """Return the memory that each rank of a plan needs, messages included."""
        needs = self._add_optimizer_needs(self.needs_of(option, plan.num_ranks))
        if option.num_sequence_slices > 1:
            needs = needs.with_slices_of(self.costs_of(option, plan.num_ranks))
        return needs.needs_by_rank(lower(plan))

    def memory_without_activations(self, option: PlanOption, num_ranks: int) -> Sequence[float]:
        """Return the bytes of each rank without activations."""
        needs = self._add_optimizer_needs(self.needs_of(option, num_ranks))
        placement = option.placement(num_ranks)
        return [
            needs.bytes_without_activations(stages_on(placement, rank)) for rank in range(num_ranks)
        ]

    def least_memory_without_activations(self, option: PlanOption, num_ranks: int) -> float:
        """Return the bytes without activations that one rank of any cut has at least."""
        return self._add_optimizer_needs(self.needs_of(option, 1)).least_rank_bytes(num_ranks)

    def _add_optimizer_needs(self, needs: MemoryNeeds) -> MemoryNeeds:
        """Return the needs with optimizer states where the settings have them."""
        settings = self.settings
        num_optimizer_shards = settings.num_optimizer_shards(int(settings.data_parallel_size))
        on_host, has_masters = settings.optimizer_offload, settings.master_weights is not None
        stand_ins = None
        if on_host or has_masters:
            by_bucket, obstacle = (
                self.probe.host_step_support if on_host else self.probe.master_step_support
            )
            if obstacle:
                raise ScheduleError(obstacle)
            stand_ins = StandInTraits(by_bucket, has_masters, on_host)
        return replace(needs, num_optimizer_shards=num_optimizer_shards, stand_ins=stand_ins)

    @property
    def host_memory_limit(self) -> float:
        """Bytes of host memory that a rank may take."""
        limits = parse_limits(self.settings.host_memory_limit, "host_memory_limit", 1)
        return inf if limits is None else min(limits)

    def request(
        self,
        wanted: Sequence[PlanOption],
        num_ranks: int,
        recipes: Mapping[str, Recipe] = FAMILIES,
        must_fit: bool = True,
        **how: Any,
    ) -> PlanRequest:
        """Return the request for some options; offload and sharding are those of the settings."""

        def memory_without_activations(option: PlanOption) -> float | Sequence[float]:
            of_ranks = self.memory_without_activations(option, num_ranks)
            return of_ranks if self.mixture else max(of_ranks)

        names = [device.name for device in self.mixture]
        return PlanRequest(
            num_ranks,
            wanted,
            lambda option: self.costs_of(option, num_ranks),
            self.memories if names else self.memory,
            self.settings.offload,
            memory_without_activations=memory_without_activations,
            device_names=names,
            has_barrier=lambda option: self._has_barrier,
            steps_early=self.steps_early,
            must_fit=must_fit,
            show=self._show,
            recipes=recipes,
            **how,
        )

    @property
    def steps_early(self) -> bool:
        """Whether an optimizer on the host steps as gradients become final."""
        settings = self.settings
        is_alone = settings.data_parallel_size == 1 and not self._is_clipped
        return settings.optimizer_offload and is_alone and self.probe.host_step_support[0]

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
        planner = self.with_settings(settings)
        if settings.offload == "auto" and self.memory is not None:
            if settings.user_recipe:
                raise ScheduleError(
                    f"offload=auto is planned for schedules by their names, and schedule is "
                    f"{settings.schedule}; use offload=none, half or full"
                )
            request = planner.request([settings.option(count)], num_ranks, must_fit=False)
            plan = lower(planner.plan(request)[0].schedule)
        else:
            plan = lower(build_first_schedule(settings, num_ranks, count)[0])
        # Not by the option: a schedule from a file has a placement of its own.
        joined = self.probe.joined_needs(plan.placement, count, settings)
        needs = planner._add_optimizer_needs(joined)
        step = PlannedStep(plan, needs.costs_with_collective_waits, self._has_barrier)
        return Estimate(settings, num_ranks, count, needs.needs_by_rank(plan), step)
