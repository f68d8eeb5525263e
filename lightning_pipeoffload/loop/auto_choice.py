"""``schedule="auto"``: the fastest plan that fits, by costs measured before the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from typing import Any

import torch

from lightning_pipeoffload.loop.compilation import compile_ahead
from lightning_pipeoffload.loop.cut_costs import CutCosts
from lightning_pipeoffload.loop.device_orders import BetterOrder, find_better_order
from lightning_pipeoffload.loop.hooks import find_hooked
from lightning_pipeoffload.loop.microbatches import depends_on_microbatch_size
from lightning_pipeoffload.loop.step_calls import StepInputs
from lightning_pipeoffload.loop.stored_choice import ChoiceStore, StoredChoice, digest_work
from lightning_pipeoffload.optimizers import estimate_state_bytes
from lightning_pipeoffload.planning.limits import MachineLimits
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds
from lightning_pipeoffload.planning.plan_options import options_of
from lightning_pipeoffload.planning.report import Progress, print_line
from lightning_pipeoffload.planning.run_plans import make_plan_on_all_ranks, request_for_run
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.cut import classify_blocks, digest_blocks, recompute_risk
from lightning_pipeoffload.runtime.measure import (
    ActionOverhead,
    BlockMeasurement,
    costs_of_pipelines,
)
from lightning_pipeoffload.runtime.memory import gradient_bytes
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.shapes import bytes_on_device
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.runtime.users_code import copy_batch, find_slots
from lightning_pipeoffload.schedule import (
    RECOMPUTATIONS,
    Candidate,
    Costs,
    Plan,
    PlanOption,
    PlanRequest,
    ScheduleError,
    device_indices,
)

log = logging.getLogger(__name__)

_NOT_MEASURED = "blocks are not measured one by one, their operations count: %s"
_AGAIN = (
    "Chosen {} as at an earlier start of the same run, by what it measured; to measure and choose "
    "anew delete {}"
)
_ALL_FIT = "not measured: the memory limit leaves room for every plan without recomputation"

_NOTHING: ActionOverhead = {}
_QUICK = ("1f1b", "1f1b_v", "uniform")  # to see whether anything fits

CutBatch = Callable[[int], list[Microbatch]]
"""Cuts the first batch into so many microbatches."""


@dataclass(frozen=True)
class ScheduleChoice:
    """The result of ``schedule="auto"``.

    Attributes:
        settings: The settings, with a schedule by its name.
        plan: The plan that was chosen; None where nothing was evaluated.
        limits: The limits of the machines.
        is_measured: Whether the costs are in seconds.
        num_classes: The number of classes of alike blocks, each of which was measured on each rank
            that has it.
        better_order: Of unlike devices, by which a plan would be faster.
    """

    settings: PipelineSettings
    plan: Plan | None = None
    limits: MachineLimits = field(default_factory=MachineLimits)
    is_measured: bool = False
    num_classes: int = 0
    better_order: BetterOrder | None = None

    def costs_with(self, needs: MemoryNeeds | None) -> Costs:
        """Return the plan's costs, with the memory of ``needs`` where there are any."""
        assert self.plan is not None
        if needs is None:
            return self.plan.costs
        names = ("activation", "weight_input", "weight_residue", "slices")
        return replace(self.plan.costs, **{name: getattr(needs.costs, name) for name in names})


class AutoChoice:
    """Chooses the schedule of one run; all ranks call its methods in the same order.

    Args:
        settings: The strategy's settings.
        pipeline: This rank's part of the module, in a first cut.
        measurements: Measures copies, and the limits of the machines.
        cut: Cuts the first batch into as many microbatches.
        has_step_barrier: Whether all ranks wait for each other between two optimizer steps.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        pipeline: Pipeline,
        measurements: Measurements,
        cut: Callable[[StepInputs, int], list[Microbatch]],
        has_step_barrier: bool,
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._group = pipeline.group
        self._measurements, self._cut = measurements, cut
        self._has_step_barrier = has_step_barrier
        self._trial: BlockMeasurement | None = None
        self._obstacle = ""  # to measuring some of the blocks
        self._works: dict[int, str] = {}  # by number of microbatches
        self._machine_limits = MachineLimits()
        self._blocks = ""
        self._progress = Progress.of(pipeline)

    def choose(self, inputs: StepInputs, num_microbatches: int, batch_size: int) -> ScheduleChoice:
        """Measure the blocks, and choose the fastest plan that fits.

        Args:
            inputs: The first batch.
            num_microbatches: Slices of it.
            batch_size: Its samples; 0 where they are not counted.

        Raises:
            ValueError: The step cannot be cut.
            ScheduleError: No plan keeps the memory limit.
        """
        if self._group.num_ranks == 1:
            return self._by_default(num_microbatches)

        def cut_batch(count: int) -> list[Microbatch]:
            copied = replace(inputs, batch=copy_batch(inputs.batch))
            microbatches = self._cut(copied, count)
            # As they are made before they are compiled and measured.
            self._blocks = self._blocks or digest_blocks(self._pipeline.chain)
            self._works[count] = digest_work(self._blocks, microbatches[0].record)
            return microbatches

        store = None
        if not self._pipeline.is_split:  # else the cut stays
            conditions = num_microbatches, batch_size, self._has_step_barrier, self._is_limited
            store = ChoiceStore(self._settings, self._pipeline, inputs.batch, conditions)
            chosen = self._reuse_stored_choice(store, cut_batch)
            if chosen is not None:
                return chosen
        if torch.are_deterministic_algorithms_enabled():  # times differ from run to run
            return self._by_default(num_microbatches)
        first = cut_batch(num_microbatches)[0]
        self._record_first_cut()
        cut_costs, chosen = self._measure_and_decide(cut_batch, first, num_microbatches, batch_size)
        if store is not None:
            self._store(store, cut_costs, chosen)
        order = self._find_better_device_order(cut_costs, chosen.limits, chosen)
        return replace(chosen, better_order=order)

    def _record_first_cut(self) -> None:
        self._shared = self._pipeline.segments_of_shared_parameters()
        self._left_out = self._find_recompute_risk()
        self._first_cut = self._pipeline.cut  # measuring cuts it in other ways

    def _reuse_stored_choice(
        self, store: ChoiceStore, cut_batch: CutBatch
    ) -> ScheduleChoice | None:
        """Plan what an earlier start has chosen; None if there is none, or it does not fit."""
        stored = store.find()
        if stored is None:
            return None
        cut_batch(stored.option.num_microbatches)
        self._record_first_cut()
        is_same = self._works[stored.option.num_microbatches] == stored.work
        if not self._group.world.broadcast(is_same, 0):
            return None
        if stored.slowness:
            self._group.devices = replace(self._group.devices, slowness=(*stored.slowness,))
        by_recompute = {(stored.option.recompute, stored.option.num_microbatches): stored.measured}
        cut_costs = CutCosts(self._pipeline, by_recompute, self._settings, True)
        limits = self._gather_limits(stored.bytes_without_activations[self._group.global_rank])
        self._add_limits(cut_costs, limits)
        try:
            chosen = self._decide(cut_costs, limits, [stored.option], must_fit=True)
        except ScheduleError:
            return None
        if self._group.is_global_zero:
            print_line(_AGAIN.format(stored.option.schedule, store.path))
        return replace(chosen, num_classes=stored.num_classes)

    def _store(self, store: ChoiceStore, cut_costs: CutCosts, chosen: ScheduleChoice) -> None:
        if self._trial is None or not chosen.is_measured or chosen.plan is None:
            return
        option = chosen.plan.best.option
        costs, overhead = cut_costs.by_recompute[option.recompute, option.num_microbatches]
        bytes_without_activations = self._group.world.gather(self._trial.bytes_without_activations)
        work = self._works[option.num_microbatches]
        slowness, num_classes = self._group.devices.slowness, chosen.num_classes
        choice = StoredChoice(
            option, work, costs, overhead, num_classes, bytes_without_activations, slowness
        )
        store.store(choice)

    def _measure_and_decide(
        self, cut_batch: CutBatch, first: Microbatch, num_microbatches: int, batch_size: int
    ) -> tuple[CutCosts, ScheduleChoice]:
        """Measure recomputation only where the memory limit excludes a plan without it."""
        counts = [num_microbatches]
        more = self._settings.next_num_microbatches(num_microbatches, batch_size)
        if more and not depends_on_microbatch_size(self._pipeline):
            counts.append(more)
        compile_ahead(self._pipeline, first.record)
        recompute, *others = self._recomputations()
        blocks = self._measure(cut_batch, [*product([recompute], counts)], first)
        if blocks is None:
            cut_batch(num_microbatches)  # the first cut again
            counted = {(recompute, num_microbatches): (self._costs_by_operations(first), _NOTHING)}
            cut_costs = CutCosts(self._pipeline, counted, self._settings, False)
            return cut_costs, self._decide_by(cut_costs)
        cut_costs = CutCosts(self._pipeline, blocks, self._settings, True)
        before = None
        if others and self._settings.offload == "auto":
            with suppress(ScheduleError):  # nothing fits without recomputation
                chosen = self._decide_by(cut_costs)
                before = chosen.plan
                if before is not None and not before.is_limited_by_memory:
                    return cut_costs, chosen
        if others:
            blocks |= self._measure(cut_batch, [*product(others, counts)], first) or {}
            cut_costs = CutCosts(self._pipeline, blocks, self._settings, True)
        try:
            return cut_costs, self._decide_by(cut_costs, before)
        except ScheduleError as error:
            order = self._find_better_device_order(cut_costs, self._machine_limits, None)
            if order is None:
                raise
            raise ScheduleError(
                f"{error}; in another order of the same devices a plan fits: {order.line}"
            ) from None

    def _decide_by(self, cut_costs: CutCosts, before: Plan | None = None) -> ScheduleChoice:
        """Plan the options; of those of an earlier plan only the best again, with the others."""
        limits = self._gather_limits(
            None if self._trial is None else self._trial.bytes_without_activations
        )
        self._machine_limits = limits
        self._add_limits(cut_costs, limits)
        wanted = cut_costs.add_cut_variants(self._options(cut_costs))
        if before is None:
            return self._decide(cut_costs, limits, wanted)
        best = before.best.option
        planned = {o for o in wanted if o.recompute == best.recompute} - {best}
        chosen = self._decide(cut_costs, limits, [o for o in wanted if o not in planned])
        assert chosen.plan is not None
        best_of_all, *more = chosen.plan.best, *chosen.plan.candidates
        judged = [
            c.with_rejection_reason(best_of_all) for c in before.candidates if c.option in planned
        ]
        return replace(chosen, plan=replace(chosen.plan, candidates=[*judged, *more]))

    def _costs_by_operations(self, first: Microbatch) -> Costs:
        """Return the costs of the first cut's stages by operations and shapes."""
        try:
            return MemoryNeeds.of(self._pipeline, first).costs_with_collective_waits
        except Exception as error:  # the user's own code, which may not run without values
            self._log(f"{type(error).__name__}: {error}".splitlines()[0])
            return self._pipeline.cut.costs

    def _by_default(self, num_microbatches: int) -> ScheduleChoice:
        name = self._settings.default_schedule
        return ScheduleChoice(
            replace(self._settings, schedule=name, num_microbatches=num_microbatches)
        )

    def _measure(
        self, cut_batch: CutBatch, wanted: Sequence[tuple[str, int]], first: Microbatch
    ) -> dict[tuple[str, int], tuple[Costs, ActionOverhead]] | None:
        """Return the costs of each block, by recomputation and number of microbatches.

        None where blocks cannot be measured: a hook of the user's would see the microbatches. After
        the first that cannot be measured there are no more.
        """
        obstacle = "configure_model has made each rank its part" if self._pipeline.is_split else ""
        hook = find_hooked(self._pipeline.module)
        obstacle = obstacle or (hook and f"{hook} has a hook, which would see more microbatches")
        if not self._group.world.agree(not obstacle, unanimous=True):
            self._log(obstacle)
            return None
        speed = self._measurements.copy_speed(self._may_copy)
        classes = classify_blocks(self._pipeline.chain, first.record)
        classes = self._group.world.broadcast(classes, 0)
        if self._trial is None:
            self._trial = BlockMeasurement(self._pipeline, self._group.transport, classes)
        trial = self._trial
        costs = {}
        for index, (recompute, count) in enumerate(wanted, start=1):
            self._progress.show(f"measuring {index} of {len(wanted)}")
            measured: Any
            try:
                measured = trial.measure(partial(cut_batch, count), recompute, speed)
            except ScheduleError as error:
                measured = str(error).partition("\n")[0]
            pipelines = self._group.gather_from_pipelines(measured)
            obstacles = [each for ranks in pipelines for each in ranks if isinstance(each, str)]
            if obstacles:
                self._obstacle = obstacles[0]
                self._log(self._obstacle)
                break
            samples, stages = (
                costs_of_pipelines([[pair[place] for pair in ranks] for ranks in pipelines])
                for place in range(2)
            )
            if trial.devices is None:
                compared = trial.compare_devices(self._group.devices, samples, stages)
                trial.devices = self._group.devices = self._group.world.broadcast(compared, 0)
            costs[recompute, count] = trial.costs_of_blocks(samples, stages)
        return costs or None

    def _log(self, obstacle: str) -> None:
        if self._group.is_global_zero:
            log.info(_NOT_MEASURED, obstacle)

    def _recomputations(self) -> Sequence[str]:
        """Return the values of ``recompute`` to try; without a memory limit, the configured one."""
        configured = self._settings.recompute
        if configured != "none" or not self._is_limited:
            return (configured,)
        return [each for each in RECOMPUTATIONS if each != "full" or not self._left_out]

    def _find_recompute_risk(self) -> str:
        """Return why no block is computed again as a whole, alike on all ranks; "" if some may."""
        records = self._pipeline.records.by_key.values()
        risks = (recompute_risk(record, self._pipeline.chain) for record in records)
        risk = next(filter(None, risks), "")
        return next(filter(None, self._group.world.gather(risk)), "")

    @property
    def _is_limited(self) -> bool:
        return self._settings.is_limited(self._pipeline.device.type != "cpu")

    @property
    def _may_copy(self) -> bool:
        return self._is_limited or self._settings.offload not in ("auto", "none")

    def _gather_limits(self, bytes_without_activations: int | None) -> MachineLimits:
        keeps = self._settings.keeps_device_limit(self._pipeline.device.type != "cpu")
        limits = self._measurements.gather_limits(keeps, bytes_without_activations)
        states = self._state_bytes()
        if self._settings.optimizer_offload:
            hosts = [
                None if host is None else host.less_optimizer_bytes(states) for host in limits.hosts
            ]
            return replace(limits, hosts=hosts)
        if limits.devices is None or limits.names:  # of unlike devices each cut counts its own
            return limits
        return replace(limits, devices=[max(0.0, left - states) for left in limits.devices])

    def _add_limits(self, cut_costs: CutCosts, limits: MachineLimits) -> None:
        """Let costs of cuts know the limits, and what of unlike devices weights take."""
        own = limits.devices if self._settings.offload == "auto" else None
        cut_costs.limits = self._settings.device_limits(self._group.num_ranks, own)
        if limits.devices is None or not limits.names or self._settings.memory_limit is not None:
            return
        slots = find_slots(self._pipeline.module)
        trained = [s.tensor for s in slots if s.tensor.requires_grad]
        held = sum(map(bytes_on_device, slots)) + sum(map(gradient_bytes, trained))
        on_device = 0.0 if self._settings.optimizer_offload else self._state_bytes()
        counts, cut = self._first_cut.segment_costs.parameters, self._first_cut
        of_one = held / (sum(counts) or 1)
        whole = of_one + on_device * self._group.num_ranks / (sum(counts) or 1)
        cut_costs.weights = [whole * count for count in counts]
        taken = [0.0] * self._group.num_ranks
        places = device_indices(self._group.stage_ranks)
        for stage, count in zip(cut.stages, cut.num_parameters, strict=True):
            taken[places[self._group.stage_ranks[stage.index]]] += of_one * count
        cut_costs.taken = taken

    def _state_bytes(self) -> float:
        """Return the bytes that optimizers will keep on a rank, where they have nothing yet."""
        trainer: Any = self._pipeline.module.trainer
        num_optimizer_shards = self._settings.num_optimizer_shards(self._group.num_replicas)
        has_masters = self._settings.master_weights is not None
        states = estimate_state_bytes(trainer.optimizers, has_masters)
        return sum(states.values()) / (self._group.num_ranks * num_optimizer_shards)

    def _options(self, cut_costs: CutCosts) -> list[PlanOption]:
        heads = self._heads_to_try(cut_costs)
        return [
            option
            for recompute, count in cut_costs.by_recompute
            for option in self._measured_options(cut_costs, [count], recompute, heads)
        ]

    def _measured_options(
        self,
        cut_costs: CutCosts,
        counts: Iterable[int],
        recompute: str,
        heads: Sequence[str] = ("W",),
    ) -> list[PlanOption]:
        """Return the options of numbers of microbatches that the cut has costs of."""
        settings = self._settings
        sizes = [*counts], settings.num_chunks, [recompute], heads, settings.num_sequence_slices
        return [option for option in options_of("auto", *sizes) if cut_costs.covers(option)]

    def _heads_to_try(self, cut_costs: CutCosts) -> Sequence[str]:
        heads = self._settings.head_weight_grad_choices
        return heads if self._is_limited and cut_costs.has_head else heads[:1]

    def _decide(
        self,
        cut_costs: CutCosts,
        limits: MachineLimits,
        wanted: Sequence[PlanOption],
        must_fit: bool = False,
    ) -> ScheduleChoice:
        request = self._request(self._settings, cut_costs, limits, wanted, must_fit)
        plan = make_plan_on_all_ranks(self._group, request)
        plan = replace(plan, candidates=[*plan.candidates, *self._candidates_left_out(cut_costs)])
        option = plan.best.option
        settings = replace(
            self._settings,
            schedule=option.schedule,
            num_chunks=option.num_chunks,
            num_microbatches=option.num_microbatches,
            recompute=option.recompute,
            head_weight_grad=option.head_weight_grad,
            split=[len(stage.blocks) for stage in cut_costs.stages(option)],
        )
        num_classes = 0 if self._trial is None else self._trial.num_classes
        return ScheduleChoice(settings, plan, limits, cut_costs.is_measured, num_classes)

    def _request(
        self,
        settings: PipelineSettings,
        cut_costs: CutCosts,
        limits: MachineLimits,
        wanted: Sequence[PlanOption],
        must_fit: bool = False,
    ) -> PlanRequest:
        request = PlanRequest(
            self._group.num_ranks,
            wanted,
            cut_costs.costs_of,
            memory_without_activations=cut_costs.memory_without_activations,
            has_barrier=partial(self._has_barrier, cut_costs),
            show=self._progress.show,
        )
        return request_for_run(settings, request, limits, must_fit)

    def _find_better_device_order(
        self, cut_costs: CutCosts, limits: MachineLimits, chosen: ScheduleChoice | None
    ) -> BetterOrder | None:
        """Return a better order of unlike devices; None where there is none, or it was not sought.

        Args:
            cut_costs: The costs by which plans are made.
            limits: The limits of the machines.
            chosen: The decision; None: no plan fits.
        """
        devices, of_places = self._group.devices, cut_costs.limits
        has_one_limit = of_places is None or len({*of_places}) == 1
        is_free = cut_costs.is_measured and self._settings.split == "auto"
        is_alike = devices.are_equally_fast and has_one_limit
        if is_alike or not is_free or self._group.num_pipelines > 1:
            return None
        found = None
        if self._group.is_global_zero:
            wanted = self._options(cut_costs)
            if chosen is None or chosen.plan is None:
                quick = [option for option in wanted if option.schedule in _QUICK]
                period, wanted = inf, quick or wanted
            else:
                period = chosen.plan.best.period or inf
                wanted = [replace(chosen.plan.best.option, num_kept=0)]

            def request_in(places: Sequence[int], other: CutCosts) -> PlanRequest:
                settings, given = self._settings, self._settings.device_limits(len(places))
                if given is not None:
                    moved = [int(given[place]) for place in places]
                    settings = replace(settings, memory_limit=moved)
                there = limits.reordered(places)
                return self._request(
                    settings, other, there, other.add_cut_variants(wanted), must_fit=True
                )

            found = find_better_order(cut_costs, devices, request_in, wanted[0], period)
        return self._group.world.broadcast(found, 0)

    def _candidates_left_out(self, cut_costs: CutCosts) -> list[Candidate]:
        if not cut_costs.is_measured:
            return []
        reason = f"not measured: {self._obstacle}" if self._obstacle else _ALL_FIT
        reasons = dict.fromkeys(self._recomputations(), reason)
        if self._left_out and len(reasons) > 1:
            reasons["full"] = f"recompute=full: {self._left_out}"
        tried = {recompute for recompute, _ in cut_costs.by_recompute}
        counts = {count: None for _, count in cut_costs.by_recompute}
        return [
            Candidate(option, str(self._settings.offload), reason)
            for recompute, reason in reasons.items()
            if recompute not in tried
            for option in self._measured_options(cut_costs, counts, recompute)
        ]

    def _has_barrier(self, cut_costs: CutCosts, option: PlanOption) -> bool:
        """Whether an option's ranks wait for each other at a step's end, be it for tied weights.

        These are on the first and the last stage: where one waits for the other, all follow.
        """
        if self._has_step_barrier or not self._shared:
            return self._has_step_barrier
        placement, stages = option.placement(self._group.num_ranks), cut_costs.stages(option)
        owners = (
            {placement[stage.index] for stage in stages if stage.segments & shared}
            for shared in self._shared
        )
        return any(len(ranks) > 1 for ranks in owners)
