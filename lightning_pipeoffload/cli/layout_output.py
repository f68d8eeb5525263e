"""What ``pipeoffload-plan devices=8`` says of layouts: a table, JSON, and how to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Column

from lightning_pipeoffload.cli.layout_search import SHOWN
from lightning_pipeoffload.cli.layouts import PlannedLayout, SearchResult
from lightning_pipeoffload.cli.plan_output import Part
from lightning_pipeoffload.planning.figures import bare_table, lines_by_reason
from lightning_pipeoffload.schedule import FAMILIES, bytes_text, seconds_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

_MOST_ROWS = 10
_HEADS = ("ranks", "tensor\nranks", "repli-\ncas", "re-\ncompute", "of-\nfload")


def about_layouts(result: SearchResult, config: DictConfig) -> list[Part]:
    """Return the layouts that fit, and why others are left out."""
    shown = result.layouts[:_MOST_ROWS]
    has_tokens = tokens_per_second(shown[0]) is not None
    has_sharding = any(each.settings.sharding != "none" for each in shown)
    ranks, tensor_ranks, replicas, recompute, offload = _HEADS
    table = bare_table(
        *(ranks, tensor_ranks, replicas, Column("schedule", no_wrap=True), recompute, offload),
        *["shar-\nded"] * has_sharding,
        *("step", *["tokens/s"] * has_tokens, "fullest\nrank"),
        title=(
            f"Layouts of {config.devices * config.num_nodes} devices that fit and take up to "
            f"{SHOWN:g} times as long as the fastest: {len(result.layouts)}"
        ),
        is_narrow=True,
    )
    most = max(map(_most_memory, shown))
    for each in shown:
        option, tokens = each.plan.best.option, tokens_per_second(each)
        chunks = option.num_chunks
        is_default = chunks == FAMILIES[option.schedule].num_chunks
        table.add_row(
            *map(str, each.layout),
            option.schedule if is_default else f"{option.schedule} ({chunks})",
            option.recompute,
            each.plan.best.offload,
            *["no" if each.settings.sharding == "none" else "yes"] * has_sharding,
            seconds_text(each.period),
            *[f"{tokens:,.0f}"] * has_tokens,
            bytes_text(_most_memory(each), most),
        )
    parts: list[Part] = [table]
    if config.strategy.schedule == "auto" and len(shown) > 1:
        parts.append("Others than the fastest may have faster plans, by schedules not looked at.")
    if result.not_planned:
        names = ", ".join(map(str, result.not_planned))
        parts.append(
            f"The search was stopped. Not planned yet, or not with copies, are "
            f"{len(result.not_planned)} layouts of ranks x tensor ranks x replicas: {names}."
        )
    lines = lines_by_reason(result.left_out)
    head = ["Left out, of ranks x tensor ranks x replicas:"] * bool(lines)
    return [*parts, *head, *lines, ""]


def describe_layouts(result: SearchResult) -> dict[str, Any]:
    """Return the JSON of the layouts, and of those that are left out."""
    return {
        "layouts": [
            {
                **strategy_arguments(each),
                "period": each.period,
                "tokens_per_second": tokens_per_second(each),
                "device": _most_memory(each),
            }
            for each in result.layouts
        ],
        "left_out": dict(result.left_out),
        "not_planned": [*map(str, result.not_planned)],
    }


def how_to_train(planned: PlannedLayout, config: DictConfig) -> list[str]:
    """Return the lines that say what to write for a run of this plan."""
    written = (f"{name}={value!r}" for name, value in strategy_arguments(planned).items())
    lines = [
        f"to train so: Trainer(devices={config.devices}, num_nodes={config.num_nodes}, strategy="
        f"PipeOffloadStrategy({', '.join(written)}))"
    ]
    if planned.planner.num_dividing_replicas > 1:
        size = planned.planner.probe.batch_size / planned.planner.num_dividing_replicas
        lines.append(
            f"each of the {planned.planner.num_dividing_replicas} replicas reads batches of "
            f"{size:g} samples"
        )
    return [line.replace("'", '"') for line in lines]


def strategy_arguments(planned: PlannedLayout) -> dict[str, Any]:
    """Return the arguments of PipeOffloadStrategy with which a run has this plan."""
    best, settings = planned.plan.best, planned.settings
    layout, option = planned.layout, best.option
    unless_default = {
        "head_weight_grad": (option.head_weight_grad, "W"),
        "sharding": (settings.sharding, "none"),
        "rank_order": (settings.rank_order, "pipeline_inner"),
        "master_weights": (settings.master_weights, None),
        "optimizer_offload": (settings.optimizer_offload, False),
    }
    return {
        "pipeline_parallel_size": layout.num_ranks,
        "tensor_parallel_size": layout.num_tensor_ranks,
        "data_parallel_size": layout.num_replicas,
        "schedule": option.schedule,
        "num_chunks": option.num_chunks,
        "num_microbatches": option.num_microbatches,
        "recompute": option.recompute,
        "offload": _offload(planned),
        **{name: value for name, (value, default) in unless_default.items() if value != default},
    }


def _offload(planned: PlannedLayout) -> str | float:
    asked, amount = planned.settings.offload, planned.plan.best.offload
    if amount == "none":
        return "none"
    return "auto" if amount == "its own" else asked


def tokens_per_second(planned: PlannedLayout) -> float | None:
    """Return the tokens of all replicas in a second; None: the batch has none."""
    num_tokens, num_batches = planned.planner.probe.num_tokens, planned.planner.num_batches
    return None if num_tokens is None else num_batches * num_tokens / planned.period


def _most_memory(planned: PlannedLayout) -> int:
    return max(rank.device for rank in planned.needs)
