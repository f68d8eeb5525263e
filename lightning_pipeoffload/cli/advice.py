"""What to change where no plan fits, as words of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_pipeoffload.cli.layouts import PlannedLayout
from lightning_pipeoffload.cli.model_planner import ModelPlanner
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import (
    FAMILIES,
    Candidate,
    ScheduleError,
    make_plan,
    seconds_text,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

ABOUT_EQUAL = 1.01
"""Of plans that take so little longer than the fastest, the simplest is taken."""
OPTIMIZERS = "as it is", "masters", "on the host"
"""What an optimizer may step, and where, in the order in which advice tries it."""
_MASTERS = {"trainer.precision": "bf16-true", "strategy.master_weights": "float32"}


def planner_with_optimizer(planner: ModelPlanner, optimizer: str) -> ModelPlanner | None:
    """Return the planner of the same model with one of ``OPTIMIZERS``; None: it cannot be.

    Masters are for weights of bf16-mixed where replicas may divide them.
    """
    settings, probe = planner.settings, planner.probe
    if optimizer == "as it is":
        return planner
    if settings.optimizer_offload:
        return None
    if optimizer == "masters":
        may_divide = planner.is_searched or settings.data_parallel_size != 1
        may_cast = probe.precision == "bf16-mixed" and not probe.master_step_support[1]
        return planner.with_values(_MASTERS) if may_divide and may_cast else None
    on_host = replace(settings, optimizer_offload=True)
    return None if probe.host_step_support[1] else planner.with_settings(on_host)


@dataclass(frozen=True)
class Proposal:
    """A plan that fits, and the words of the command line that ask for it."""

    candidate: Candidate
    words: tuple[str, ...]

    @property
    def order(self) -> tuple[int, float]:
        return len(self.words), self.candidate.peak_memory or 0.0


def simplest_proposal(
    planned: PlannedLayout,
    asked: PipelineSettings,
    config: DictConfig,
    sizes: Mapping[str, bool],
) -> Proposal | None:
    """Return the proposal with the fewest changes among the plans that are about the fastest.

    Args:
        planned: A layout that fits.
        asked: The settings that were asked for, with the schedule's name.
        config: The configuration that was asked for.
        sizes: Words for other sizes, and whether they are needed.

    Returns:
        None: with its messages, or on the host, none of them fits.
    """
    proposals = [
        Proposal(each, _changed_overrides(each, planned, asked, config, sizes))
        for each in planned.plan.candidates
        if each.fits and each.score <= planned.score * ABOUT_EQUAL and _has_room(each, planned)
    ]
    return min(proposals, key=lambda proposal: proposal.order, default=None)


def _has_room(candidate: Candidate, planned: PlannedLayout) -> bool:
    assert candidate.schedule is not None
    needs = planned.planner.rank_needs(candidate.option, candidate.schedule)
    has_room = planned.planner.has_room(needs, candidate.schedule)
    return has_room and max(rank.host for rank in needs) <= planned.planner.host_memory_limit


def _changed_overrides(
    candidate: Candidate,
    planned: PlannedLayout,
    asked: PipelineSettings,
    config: DictConfig,
    sizes: Mapping[str, bool],
) -> tuple[str, ...]:
    option, settings, strategy = candidate.option, planned.settings, config.strategy
    count = option.num_microbatches * planned.planner.num_dividing_replicas
    is_named = asked.schedule != "auto"
    # A file is written as strategy.schedule=FILE, which schedule=NAME would not replace.
    group = "schedule" if asked.schedule in ("auto", *FAMILIES) else "strategy.schedule"
    is_default = option.num_chunks == FAMILIES[option.schedule].num_chunks
    # Without a device only offload=auto builds an order by the memory that there is.
    follows_limit = (
        planned.planner.device is None and FAMILIES[option.schedule].respects_memory_limit
    )
    has_copies = candidate.offload != "none"
    offload = settings.offload if has_copies or follows_limit else "none"
    has_sharding = config.devices is None or "sharding" in strategy
    has_other_masters = settings.master_weights != asked.master_weights
    masters = " ".join(f"++{name}={value}" for name, value in _MASTERS.items())
    changes = {
        **sizes,
        f"{group}={option.schedule}": is_named and option.schedule != asked.schedule,
        f"num_chunks={option.num_chunks}": (is_named and not is_default)
        or config.num_chunks not in (None, option.num_chunks),
        f"num_microbatches={count}": count != config.num_microbatches,
        "num_sequence_slices=1": option.num_sequence_slices != config.get("num_sequence_slices", 1),
        f"offload={offload}": asked.offload not in ("auto", offload)
        and candidate.offload != "its own",
        f"strategy.recompute={option.recompute}": strategy.recompute
        not in ("auto", option.recompute),
        f"+strategy.head_weight_grad={option.head_weight_grad}": option.head_weight_grad
        != asked.head_weight_grad_choices[0],
        f"+strategy.sharding={settings.sharding}": has_sharding
        and settings.sharding != asked.sharding,
        masters: has_other_masters,
        "+strategy.optimizer_offload=true": settings.optimizer_offload
        and not asked.optimizer_offload,
    }
    return (*(word for word, is_needed in changes.items() if is_needed),)


def describe_step_time(
    candidate: Candidate, planned: PlannedLayout, asked: PipelineSettings, num_ranks: int
) -> str:
    """Say how long a step takes; without a device, compared with the schedule that was asked for.

    Args:
        candidate: The plan that is proposed.
        planned: Its layout.
        asked: The settings that were asked for.
        num_ranks: The ranks of a pipeline that were asked for.
    """
    period, planner = candidate.period or 0.0, planned.planner
    if planner.device is not None:
        on_top = " and the optimizer's on the host" * planner.settings.optimizer_offload
        return f"a step takes {seconds_text(period)}{on_top}"
    if asked.user_recipe:  # planned by its order alone
        return "it fits"
    try:
        wanted = [asked.option(int(asked.num_microbatches))]
        request = planner.with_settings(asked).request(wanted, num_ranks)
        before = make_plan(replace(request, memory_limit=None)).best.period or period
    except ScheduleError:
        return "it fits"
    return f"a step takes {period / before:.2f} times as long as {asked.schedule} would"
