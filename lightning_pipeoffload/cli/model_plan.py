"""``pipeoffload-plan model=...``: what each rank needs of memory, and the plan for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from lightning_pipeoffload.cli.devices import FP16_SUMS, Device
from lightning_pipeoffload.cli.given_plan import has_barrier, split_offload_suffix
from lightning_pipeoffload.cli.layout_output import about_layouts, describe_layouts, how_to_train
from lightning_pipeoffload.cli.layout_search import LayoutSearch, tensor_parallel_sizes
from lightning_pipeoffload.cli.layouts import Layout, PlannedLayout
from lightning_pipeoffload.cli.model_planner import Estimate, ModelPlanner
from lightning_pipeoffload.cli.plan_output import (
    Answer,
    Part,
    about_choice,
    plan_answer,
    plan_figures,
    progress,
)
from lightning_pipeoffload.planning.figures import MEASURED, PlannedStep, bare_table
from lightning_pipeoffload.planning.memory_needs import ON_DEVICE, RankNeeds, describe_needs
from lightning_pipeoffload.runtime.tensor_parallel import fake_process_group
from lightning_pipeoffload.schedule import (
    Plan,
    ScheduleError,
    as_executed,
    bytes_text,
    check_positive_integers,
    compute_seconds,
    device_indices,
    make_plan,
    seconds_text,
    share_text,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

_GIB, _MIB = 1 << 30, 1 << 20
# Slices of sequences are proposed for a gain of this share, and not if shorter than so many tokens.
_NUMBERS_OF_SLICES, _LEAST_GAIN, _LEAST_TOKENS = (2, 4, 8, 16), 0.05, 512
_HEADS = {
    "parameters": "param-\neters",
    "gradients": "gradi-\nents",
    "optimizer": "opti-\nmizer",
    "activations": "activ-\nations",
    "workspace": "work-\nspace",
    "messages": "mes-\nsages",
}
"""Headings with which a table of plans fits into 80 columns."""


def plan_for_device(config: DictConfig) -> Answer:
    """Return the fastest plan that fits a device, or the fastest layouts.

    Raises:
        ValueError: The device is unknown, the model cannot be built, or nothing fits.
    """
    if config.devices is None:
        check_positive_integers(num_ranks=config.num_ranks)
        is_one = isinstance(config.device, (str, int))
        only = _layout_of(config, config.num_ranks if is_one else len(config.device))
        sizes, text = (
            [only.num_tensor_ranks],
            f"{config.strategy.schedule} for {only.num_ranks} ranks",
        )
    else:
        only, sizes = None, tensor_parallel_sizes(config)
        text = f"layouts of {config.devices * config.num_nodes} devices"
    with fake_process_group(max(sizes)):
        with progress(f"Planning {text}") as show:
            result = LayoutSearch(config, sizes, show, only).run()
        fastest = result.layouts[0]
        if only is not None:
            return _answer_of(fastest, about_choice(fastest.plan, MEASURED), [], {}, config)
        lines = how_to_train(fastest, config)
        figures = describe_layouts(result)
        return _answer_of(fastest, about_layouts(result, config), lines, figures, config)


def _layout_of(config: DictConfig, num_ranks: int) -> Layout:
    """Return the layout of sizes that are given."""
    replicas = config.strategy.get("data_parallel_size", 1)
    return Layout(num_ranks, config.tensor_parallel_size, replicas)


def _answer_of(
    planned: PlannedLayout,
    before: Sequence[Part],
    after: Sequence[str],
    of_search: dict[str, Any],
    config: DictConfig,
) -> Answer:
    planner, plan, needs = planned.planner, planned.plan, planned.needs
    num_ranks = plan.schedule.num_ranks
    device, precision = planner.device, planner.probe.precision
    assert device is not None
    assert planner.memory is not None
    rates = (
        f"{device.name} at {config.efficiency:g} of its data sheet's rates: "
        f"{_rates(planner)} TFLOP/s dense (precision {precision}), copies "
        f"{device.copy_rate / 1e9:.4g} GB/s each way, messages {device.link_rate / 1e9:.4g} "
        f"GB/s, between machines of {planner.devices_per_machine} "
        f"{device.network_rate / 1e9:.4g} GB/s\n"
    )
    figures = {
        "device": device.name,
        "tensor_parallel_size": planner.settings.tensor_parallel_size,
        "precision": precision,
        "efficiency": config.efficiency,
        "flops_per_second": planner.flops,
        "copy_rate": device.copy_rate,
        "link_rate": device.link_rate,
        "device_memory": planner.memory,
        "devices": [each.name for each in planner.mixture] or [device.name] * num_ranks,
        "taken_by_weights": max(planner.memory_without_activations(plan.best.option, num_ranks)),
    }
    as_run = as_executed(plan.schedule, plan.costs, planner.steps_early)
    step = PlannedStep(as_run, plan.costs, has_barrier(config))
    proposal = _proposed_slices(planner, plan)
    speed = _speed(planner, step, config)
    figures |= {"memory": describe_needs(needs), **speed}
    if proposal is not None:
        figures |= {"sequence_slices": proposal}
    parts: list[Part] = [
        _table_of_ranks(needs),
        *_describe_speed_and_memory(plan, needs, speed, planner),
    ]
    parts += [*_about_slices(proposal, config.num_chunks), *_about_sums(device, planner), *after]
    figures = plan_figures(plan, with_candidates=True) | figures | of_search
    return plan_answer(step, figures, MEASURED, [*before, rates], parts)


def _rates(planner: ModelPlanner) -> str:
    rates = [each.flops[planner.matmul_kind] for each in planner.mixture] or [planner.flops]
    return ", ".join(f"{rate / 1e12:.4g}" for rate in rates)


def _proposed_slices(planner: ModelPlanner, plan: Plan) -> dict[str, Any] | None:
    """Return the fewest slices of sequences that gain about as much as any; None if they do not."""
    length, before = planner.probe.num_tokens_of_sequence, plan.best.period
    is_fixed = planner.num_slices > 1 or planner.settings.tensor_parallel_size > 1
    if is_fixed or length is None or not before:
        return None
    periods: dict[int, float] = {}
    whole = replace(plan.best.option, schedule="seq_zb", num_chunks=1)
    for count in _NUMBERS_OF_SLICES:
        if length >= count * _LEAST_TOKENS:
            wanted = [replace(whole, num_sequence_slices=count)]
            with suppress(ScheduleError):
                request = planner.request(wanted, plan.schedule.num_ranks)
                periods[count] = make_plan(request).best.period or before
    least = min(periods.values(), default=before)
    if least > before * (1 - _LEAST_GAIN):
        return None
    count = next(n for n, period in periods.items() if period <= least + 0.1 * (before - least))
    period = periods[count]
    return {"num_sequence_slices": count, "period": period, "gain": 1 - period / before}


def _about_slices(proposal: Mapping[str, Any] | None, num_chunks: int | None) -> list[str]:
    if proposal is None:
        return []
    chunks = "" if num_chunks in (None, 1) else " num_chunks=1"
    return [
        f"in slices of its sequences a step would take {seconds_text(proposal['period'])}, "
        f"{share_text(proposal['gain'])} less, if short slices are computed as fast: "
        f"num_sequence_slices={proposal['num_sequence_slices']} schedule=seq_zb{chunks}"
    ]


def _about_sums(device: Device, planner: ModelPlanner) -> list[str]:
    """Say what sums in float16 need, or what they would give."""
    rates, kind = device.flops, planner.matmul_kind
    if kind == FP16_SUMS:
        scaling = "Lightning scales no loss under 16-true, so gradients below 6e-8 are 0"
        return [scaling] * (planner.probe.precision == "16-true") + [
            "write torch.backends.cuda.matmul.allow_fp16_accumulation = True before training: "
            "products then add up in float16, with 11 bits of a sum in place of 24 and none above "
            "65,504"
        ]
    if kind != "fp16" or rates[FP16_SUMS] <= rates[kind]:
        return []
    return [
        f"float16_sums=true plans products that add up in float16, at "
        f"{rates[FP16_SUMS] / rates[kind]:.3g} times the rate, with fewer bits"
    ]


def _speed(planner: ModelPlanner, step: PlannedStep, config: DictConfig) -> dict[str, float | None]:
    """Return what a buyer compares; MFU is of the data sheet's rate, without recomputation."""
    probe, num_batches = planner.probe, planner.num_batches
    tokens = None if probe.num_tokens is None else num_batches * probe.num_tokens / step.period
    peak = planner.mean_flops_per_second / config.efficiency * step.schedule.num_ranks
    return {
        "samples_per_second": num_batches * probe.batch_size / step.period,
        "tokens_per_second": tokens,
        "mfu": probe.batch_flops / planner.num_dividing_replicas / step.period / peak,
    }


def _describe_speed_and_memory(
    plan: Plan,
    needs: Sequence[RankNeeds],
    speed: Mapping[str, float | None],
    planner: ModelPlanner,
) -> list[str]:
    assert planner.memory is not None
    assert planner.device is not None
    tokens = speed["tokens_per_second"]
    rates = [f"{speed['samples_per_second']:.4g} samples/s"]
    rates += [] if tokens is None else [f"{tokens:,.0f} tokens/s"]
    rates.append(f"MFU {share_text(speed['mfu'] or 0.0)} of the data sheet's rate")
    limits = planner.memories_of(plan.schedule.placement)
    pairs = [(rank.device, limit) for rank, limit in zip(needs, limits, strict=True)]
    most, limit = max(pairs, key=lambda pair: pair[0] / pair[1])
    replicas = int(planner.settings.data_parallel_size)
    size, links = planner.settings.tensor_parallel_size, planner.links
    rate, hosts = links.tensor_rate / 1e9, [rank.host for rank in needs]
    reserve = 0.0 if planner.mixture else planner.device.memory - planner.memory
    kept = f", {bytes_text(reserve)} stay a reserve" if reserve > 0 else ""
    per_machine = links.most_of_a_machine(hosts, plan.schedule.placement)
    return [
        f"{', '.join(rates)}, with {planner.num_batches * planner.probe.batch_size} samples a step",
        *_about_tensor_ranks(
            len(needs), size, replicas, f"F and B wait for collectives at {rate:.4g} GB/s"
        ),
        *_about_devices(plan, planner),
        f"the fullest rank needs {bytes_text(most)} of {bytes_text(limit)}{kept}: it fits",
        f"host memory: {bytes_text(max(hosts))} of the rank that needs most, "
        f"{bytes_text(per_machine)} of a machine",
    ]


def _about_devices(plan: Plan, planner: ModelPlanner) -> list[str]:
    """Say which device is which rank's, and what it computes, where devices differ."""
    if not planner.mixture:
        return []
    placement, costs = plan.schedule.placement, plan.costs
    work = compute_seconds(costs, len(placement))
    texts = []
    for rank, place in enumerate(device_indices(placement)):
        of_rank = sum(work[stage] for stage in plan.schedule.stages_of(rank))
        busy = of_rank * plan.schedule.num_microbatches / (plan.best.period or 1.0)
        name = planner.mixture[place].name
        texts.append(f"rank {rank} on device {place} ({name}, busy for {share_text(busy)})")
    return [f"devices, in the order of the list: {', '.join(texts)}"]


def _about_tensor_ranks(num_ranks: int, size: int, replicas: int, collectives: str) -> list[str]:
    if size == 1:
        return []
    return [
        f"{replicas * num_ranks * size} devices: {size} share the layers of each rank, and have "
        f"its memory each; {collectives}"
    ]


def estimate_model(config: DictConfig) -> Answer:
    """Return what each rank needs for the model of ``config``, in one plan or several.

    Raises:
        ValueError: The model, its data or a plan cannot be; or no plan fits ``device_memory``.
    """
    size = config.tensor_parallel_size
    with fake_process_group(size), progress("Counting what the model needs") as show:
        planner = ModelPlanner(config, show)
        if planner.num_slices > 1:
            raise ScheduleError(
                f"num_sequence_slices ({planner.num_slices}) is for a device, whose times are "
                f"known: add device=h100, or leave it at 1"
            )
        planner.probe  # noqa: B018 - what a model cannot be made by is no reason of one plan
        limit = planner.memory
        estimates, refusals = _estimates(planner, config)
        if not estimates:
            raise ScheduleError(refusals[0])
        least = min(estimates, key=lambda plan: plan.fullest_rank.device)
        if limit is not None and least.fullest_rank.device > limit:
            show("it does not fit; searching for the fastest plan that does")
            search = LayoutSearch(config, [size], show, _layout_of(config, least.num_ranks))
            advice = search.search_advice(least.settings, planner)
            raise ScheduleError(_refusal(least, limit, advice))
    host_bytes = min(max(rank.host for rank in plan.needs) for plan in estimates)
    if host_bytes > planner.host_memory_limit:
        raise ScheduleError(
            f"a rank needs {bytes_text(host_bytes)} of its host, and strategy.host_memory_limit is "
            f"{planner.settings.host_memory_limit}; use more ranks, "
            f"+strategy.sharding=optimizer or less offload"
        )
    is_one = not config.compare and len(estimates) == 1
    described_plans = [_describe(plan) for plan in estimates]
    figures = described_plans[0] if is_one else {"estimates": described_plans, "refused": refusals}
    table = _table_of_ranks(estimates[0].needs) if is_one else _table_of_plans(estimates, limit)
    return Answer(figures, [table, *_about_estimates(estimates), *refusals])


def _estimates(planner: ModelPlanner, config: DictConfig) -> tuple[list[Estimate], list[str]]:
    """Return the plans that are asked for, and why others cannot be."""
    names = [str(name) for name in _as_list(config.compare) or [config.strategy.schedule]]
    ranks = _as_list(config.num_ranks)
    for num_ranks in ranks:
        check_positive_integers(num_ranks=num_ranks)
    estimates: list[Estimate] = []
    refusals: list[str] = []
    for num_ranks, name in product(ranks, names):
        try:
            estimates.append(
                planner.estimate(planner.settings_named(*split_offload_suffix(name)), num_ranks)
            )
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            is_one = len(ranks) * len(names) == 1
            refusals.append(reason if is_one else f"{name}, {num_ranks} ranks: {reason}")
    return estimates, refusals


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _refusal(plan: Estimate, limit: float, advice: str) -> str:
    needs = plan.fullest_rank
    name, size = _unit([needs])
    parts = ", ".join(
        f"{part} {getattr(needs, part) / size:.1f} {name}" for part in _memory_kinds([needs])
    )
    fullest = f"rank {plan.needs.index(needs)} of {plan.num_ranks}"
    return (
        f"{fullest} needs {needs.device / size:.1f} {name} "
        f"for {plan.name} ({parts}), and device_memory is {limit / size:.1f} {name}; {advice}"
    )


def _describe(plan: Estimate) -> dict[str, Any]:
    return {
        "schedule": plan.name,
        "num_ranks": plan.num_ranks,
        "tensor_parallel_size": plan.settings.tensor_parallel_size,
        "num_microbatches": plan.num_microbatches,
        "recompute": plan.settings.recompute,
        "bubble": plan.step.timeline.bubble,
        "period_bubble": plan.step.bubble,
        "memory": describe_needs(plan.needs),
    }


def _about_estimates(estimates: Sequence[Estimate]) -> list[str]:
    settings = estimates[0].settings
    sizes = settings.tensor_parallel_size, int(settings.data_parallel_size)
    lines = [
        f"{plan.name}: {plan.num_ranks} ranks, {plan.num_microbatches} microbatches, bubble "
        f"{share_text(plan.step.bubble)} by the operations that are counted"
        for plan in estimates
    ]
    for num_ranks in dict.fromkeys(plan.num_ranks for plan in estimates):
        lines += _about_tensor_ranks(num_ranks, *sizes, "F and B wait for collectives")
    return lines


def _table_of_ranks(needs: Sequence[RankNeeds]) -> Table:
    name, size = _unit(needs)
    columns = _columns(needs)
    table = bare_table("rank", *columns, title=f"{name} of each rank", is_narrow=True)
    for index, rank in enumerate(needs):
        table.add_row(str(index), *_cells(rank, size, columns))
    return table


def _table_of_plans(estimates: Sequence[Estimate], limit: float | None) -> Table:
    """Return a table with the needs of each plan's fullest rank."""
    name, size = _unit([plan.fullest_rank for plan in estimates])
    fits = () if limit is None else ("fits",)
    title = f"{name} of the rank that needs most"
    shown = _columns([plan.fullest_rank for plan in estimates])
    columns = (Column("schedule", no_wrap=True), "ranks", *shown, *fits)
    table = bare_table(*columns, title=title, is_narrow=True)
    for plan in estimates:
        row = [plan.name, str(plan.num_ranks), *_cells(plan.fullest_rank, size, shown)]
        if limit is not None:
            row.append("yes" if plan.fullest_rank.device <= limit else "no")
        table.add_row(*row)
    return table


def _unit(needs: Sequence[RankNeeds]) -> tuple[str, int]:
    """Return the unit of figures side by side, and its bytes: GiB where a device needs 10 GiB."""
    return ("GiB", _GIB) if max(rank.device for rank in needs) >= 10 * _GIB else ("MiB", _MIB)


def _memory_kinds(needs: Sequence[RankNeeds]) -> list[str]:
    """List the kinds of memory on a device, with the workspace where there is one."""
    has_any = any(rank.workspace for rank in needs)
    return [name for name in ON_DEVICE if has_any or name != "workspace"]


def _columns(needs: Sequence[RankNeeds]) -> dict[str, str]:
    """Return the headings, each with the name of its figure."""
    names = {_HEADS.get(name, name): name for name in (*_memory_kinds(needs), "device", "host")}
    if any(rank.host_optimizer for rank in needs):
        names["opt. on\nhost"] = "host_optimizer"
    return names


def _cells(needs: RankNeeds, size: int, columns: Mapping[str, str]) -> list[str]:
    return [f"{getattr(needs, name) / size:.1f}" for name in columns.values()]
