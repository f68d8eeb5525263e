"""The figures of all ranks as a logger gets them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

__all__ = ["figures_to_log"]

# What the root of each replica counts in a step: what it is logged as.
_COUNTS = {
    "samples": "samples_per_second",
    "tokens": "tokens_per_second",
    "flops": "model_flops_per_second",
}


def figures_to_log(
    ranks: Mapping[int, Mapping[str, float]], pipeline: Sequence[int]
) -> dict[str, float]:
    """Return what is logged of a step: of the whole run, and of each rank of replica 0.

    Args:
        ranks: The figures of each global rank that gives any.
        pipeline: The global rank of each rank of replica 0.
    """
    own = [ranks[rank] for rank in pipeline]
    logged = {"step_seconds": max(figures["step_seconds"] for figures in own)}
    if all("grad_norm" in figures for figures in own):
        logged["grad_norm"] = math.hypot(*(figures["grad_norm"] for figures in own))
    if all("period_seconds" in figures for figures in own):
        period = max(figures["period_seconds"] for figures in own)
        bubble = mean(figures["bubble"] for figures in own)
        logged |= {"period_seconds": period, "bubble": bubble} | _rates(ranks, period)
    for rank, figures in enumerate(own):
        logged |= {f"rank_{rank}/{n}": v for n, v in figures.items() if n not in _COUNTS}
    return {f"pipeline/{name}": value for name, value in logged.items()}


def _rates(ranks: Mapping[int, Mapping[str, float]], period: float) -> dict[str, float]:
    return {
        rate: sum(figures.get(name, 0.0) for figures in ranks.values()) / period
        for name, rate in _COUNTS.items()
        if any(name in figures for figures in ranks.values())
    }
