"""The figures of an optimizer step: measured and counted on a rank, and as loggers get them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from lightning_pipeoffload.runtime.batch import batch_size, tokens_in
from lightning_pipeoffload.runtime.device import ActionTimer, TimedStep

# The counts of each replica's root in a step, with the names of their rates in logs.
_COUNTS = {
    "samples": "samples_per_second",
    "tokens": "tokens_per_second",
    "flops": "model_flops_per_second",
}


class OptimizerStep:
    """The plans that ran from one step's first batch to the next one's.

    Args:
        number: Its number, counted from 1.
        is_logged: Whether its figures are logged.

    Attributes:
        plans: The measured plan of each batch that accumulates.
        breaks: The start and end of interruptions, such as validation.
        figures: Its figures by its end: numbers, or tensors that may still be computed.
    """

    def __init__(self, number: int, is_logged: bool) -> None:
        self.number = number
        self.is_logged = is_logged
        self.plans: list[TimedStep] = []
        self.breaks: list[tuple[Any, Any]] = []
        self.figures: dict[str, Any] = {}
        self._has_period = True
        self._following: TimedStep | None = None

    def add(self, name: str, number: Any) -> None:
        """Add to one of its figures."""
        self.figures[name] = self.figures.get(name, 0) + number

    def end_period(self, plan: TimedStep) -> None:
        """End the period where the next step's first plan has started."""
        self._following = plan

    def omit_period(self) -> None:
        """Leave the period out: up to the next step's start it holds more than this step."""
        self._has_period = False

    def has_passed(self, timer: ActionTimer) -> bool:
        """Whether its times can be read without waiting."""
        last = self.plans[-1].end if self._following is None else self._following.start
        return timer.clock.has_passed(last)

    def read(self, timer: ActionTimer) -> dict[str, Any]:
        """Return all of its figures; those of the period only where that is known."""
        seconds = timer.clock.seconds
        figures = {"step_seconds": sum(seconds(plan.start, plan.end) for plan in self.plans)}
        if self._following is not None and self._has_period:
            period = seconds(self.plans[0].start, self._following.start)
            period -= sum(seconds(start, end) for start, end in self.breaks)
            busy = sum(map(timer.busy_seconds, self.plans))
            figures |= {"period_seconds": period, "bubble": 1 - busy / period}
        return self.figures | figures


def count_batch(batch: Any, tokens: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Count a batch, without waiting for an accelerator.

    Args:
        batch: The batch.
        tokens: Returns the tokens of a batch: a number, or a tensor of one element; None: those
            that ``attention_mask`` lets through, or else the size of ``input_ids``.
    """
    num_tokens = tokens_in(batch) if tokens is None else tokens(batch)
    return {"samples": batch_size(batch)} | ({} if num_tokens is None else {"tokens": num_tokens})


def figures_to_log(
    ranks: Mapping[int, Mapping[str, float]],
    pipeline: Sequence[int],
    with_gradients: Sequence[int],
) -> dict[str, float]:
    """Return the logged figures of a step: of the whole run, and of each rank of replica 0.

    Args:
        ranks: The figures of each global rank that gives any.
        pipeline: The global rank of each rank of replica 0.
        with_gradients: The global ranks that have the gradients of one model.
    """
    of_pipeline = [ranks[rank] for rank in pipeline]
    logged = {"step_seconds": max(figures["step_seconds"] for figures in of_pipeline)}
    norms = [ranks[rank]["grad_norm"] for rank in with_gradients if "grad_norm" in ranks[rank]]
    if len(norms) == len(with_gradients):
        logged["grad_norm"] = math.hypot(*norms)
    if all("period_seconds" in figures for figures in of_pipeline):
        period = max(figures["period_seconds"] for figures in of_pipeline)
        bubble = mean(figures["bubble"] for figures in of_pipeline)
        logged |= {"period_seconds": period, "bubble": bubble} | _rates(ranks, period)
    for rank, figures in enumerate(of_pipeline):
        logged |= {f"rank_{rank}/{n}": v for n, v in figures.items() if n not in _COUNTS}
    return {f"pipeline/{name}": value for name, value in logged.items()}


def _rates(ranks: Mapping[int, Mapping[str, float]], period: float) -> dict[str, float]:
    return {
        rate: sum(figures.get(name, 0.0) for figures in ranks.values()) / period
        for name, rate in _COUNTS.items()
        if any(name in figures for figures in ranks.values())
    }
