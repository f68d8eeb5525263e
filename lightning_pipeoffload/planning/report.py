"""What the strategy tells about the pipeline, as a dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    copy_ratios,
    free_share,
    period_bubble,
    simulate,
)

PeriodOf = Callable[[Schedule, Costs], float]


def predict(
    plan: Schedule, pipeline: Pipeline, measured: Costs | None, period_of: PeriodOf
) -> dict[str, Any]:
    """Say what the plan promises.

    Args:
        plan: The lowered plan.
        pipeline: What runs the plan.
        measured: Costs in seconds and bytes; None: the pipeline's estimate, in units of an average
            block's work and activation.
        period_of: Returns the time from one step to the next.
    """
    costs = measured or pipeline.costs
    timeline = simulate(plan, costs)
    period = period_of(plan, costs)
    return {
        "schedule": plan.name,
        "num_ranks": plan.num_ranks,
        "num_chunks": plan.num_chunks,
        "num_microbatches": plan.num_microbatches,
        "recompute": pipeline.settings.recompute,
        "stages": [
            {
                "rank": plan.rank_of(stage),
                "blocks": pipeline.block_names(stage),
                "num_parameters": pipeline.num_parameters[stage],
            }
            for stage in range(plan.num_stages)
        ],
        "has_copies": plan.has_copies,
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "period": period,
        "period_bubble": period_bubble(timeline, period),
        "peak_memory": list(timeline.peak_memory),
        "peak_host_memory": list(timeline.peak_host_memory),
        "k": list(copy_ratios(costs, plan.num_stages)) if measured else None,
        "free_share": free_share(costs, plan.num_stages) if measured else None,
    }


def measure(executor: Executor, weight_flops: int) -> dict[str, Any]:
    """Say what one rank measured: seconds, bytes, and the share of weight gradients left for W.

    The bubble is the idle share of a step's period, which ends where the next step starts, the
    median over steps; ``between_steps`` is the share of what comes after the step itself.
    ``live_bytes`` are those of the last step after each action that can change them: seconds since
    the step's start on the host's clock, bytes on the device, on the host, and in copies that
    nobody has waited for.
    """
    memory = {index: runner.memory for index, runner in executor.stages.items()}
    deferred = sum(stage.deferred_flops or 0 for stage in memory.values())
    ledger = executor.memory.ledger
    return {
        "step_seconds": executor.timer.step_seconds(),
        "bubble": executor.timer.idle_share(),
        "between_steps": executor.timer.between_share(),
        "peak_activation_bytes": ledger.peak_device_bytes,
        "offloaded_bytes": ledger.offloaded_bytes,
        "peak_host_bytes": ledger.peak_host_bytes,
        "live_bytes": [(entry.seconds, *entry.held) for entry in ledger.entries],
        "deferred_flops": deferred,
        "weight_flops": weight_flops,
    }


def join_measurements(parts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn one dict for each rank into one list for each figure, in pipeline order."""
    return {name: [part[name] for part in parts] for name in parts[0]}
