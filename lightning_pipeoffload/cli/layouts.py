"""Layouts of machines: their sizes, their bounds before they are planned, and their plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pipeoffload.cli.model_planner import ModelPlanner
from lightning_pipeoffload.planning.memory_needs import RankNeeds
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import Plan

# With more F's on all ranks of a pipeline a layout is large.
_MANY_FORWARDS = 256


class Layout(NamedTuple):
    """How many ranks a pipeline has, how many share each layer, and how many replicas there are."""

    num_ranks: int
    num_tensor_ranks: int
    num_replicas: int

    def __str__(self) -> str:
        return " x ".join(map(str, self))


class LayoutToPlan(NamedTuple):
    """A layout to plan.

    Attributes:
        layout: The layout.
        planners: Planners with its sizes: one, or two where optimizer states that replicas divide
            may gain nothing, which is the second.
        least: Seconds that a step takes at least without copies, by a quick plan; infinite where
            none fits.
        work: Seconds that any step takes at least, with even work and no waits.
    """

    layout: Layout
    planners: Sequence[ModelPlanner]
    least: float
    work: float

    @property
    def is_large(self) -> bool:
        """Whether it is planned only if it may be the fastest, with few schedules."""
        num_microbatches = int(self.planners[0].settings.num_microbatches)
        return self.layout.num_ranks * num_microbatches > _MANY_FORWARDS


@dataclass(frozen=True)
class PlannedLayout:
    """The fastest plan of a layout that fits.

    Attributes:
        planner: The planner of this layout, whose settings have its sizes.
        plan: The plan.
        needs: The memory of each rank.
    """

    planner: ModelPlanner
    plan: Plan
    needs: Sequence[RankNeeds]

    @property
    def settings(self) -> PipelineSettings:
        return self.planner.settings

    @property
    def layout(self) -> Layout:
        num_replicas = int(self.settings.data_parallel_size)
        return Layout(len(self.needs), self.settings.tensor_parallel_size, num_replicas)

    @property
    def period(self) -> float:
        return self.plan.best.period or 0.0

    @property
    def score(self) -> float:
        return self.plan.best.score

    @property
    def order(self) -> tuple[int, bool, float]:
        """The order among layouts that take about as long: the simplest first."""
        tensor_ranks = self.settings.tensor_parallel_size
        return tensor_ranks, self.settings.sharding != "none", self.score


@dataclass(frozen=True)
class SearchResult:
    """The layouts that a search has planned, and those that it has left out.

    Attributes:
        layouts: Those that fit, first the one to take, then by their speed.
        left_out: Other layouts, or numbers of tensor ranks, and why each is left out.
        not_planned: Layouts that a search that was stopped has not planned, or not with copies.
    """

    layouts: Sequence[PlannedLayout]
    left_out: Sequence[tuple[str, str]]
    not_planned: Sequence[Layout] = ()
