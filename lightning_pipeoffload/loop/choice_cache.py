"""What ``schedule="auto"`` has chosen before, for runs that may not measure.

A question is known by what is the same in every run: sizes, and the operations of a first cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.schedule.candidates import Candidate
from lightning_pipeoffload.schedule.plan_cache import PlanCache, PlanQuestion


class ChoiceCache:
    """The choices for one module and its first batch.

    Args:
        settings: The strategy's settings.
        pipeline: A rank's part of the module, in the first cut.
        num_microbatches: Slices of the batch, as they are where nothing is chosen.
        has_barrier: Whether all ranks wait for each other between two optimizer steps.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        pipeline: Pipeline,
        num_microbatches: int,
        has_barrier: bool,
    ) -> None:
        self._cache = PlanCache(settings.plan_cache)
        names = ("offload", "recompute", "num_chunks", "split")
        asked = " ".join(f"{name}={getattr(settings, name)}" for name in names)
        kind = (
            f"{type(pipeline.module).__name__} {len(pipeline.chain)} {sum(pipeline.num_parameters)}"
        )
        stages = pipeline.settings.stage_ranks
        self._question = PlanQuestion(
            f"auto {kind} {asked} barrier={has_barrier}",
            max(stages) + 1,
            num_microbatches,
            0,
            pipeline.costs,
            settings.limit_bytes,
        )

    def find(self) -> dict[str, Any] | None:
        """Return the settings that were chosen for the same question; None: there are none."""
        found = self._cache.find(self._question)
        if found is None or not found.is_exact:
            return None
        remarks = dict(found.remarks)
        schedule = replace(found.schedule, name=remarks.pop("schedule"))
        return {"schedule": schedule, "num_microbatches": schedule.num_microbatches, **remarks}

    def store(self, best: Candidate, settings: PipelineSettings) -> None:
        """Keep what was chosen.

        Args:
            best: What was chosen.
            settings: The settings that say so.
        """
        assert best.schedule is not None
        names = ("schedule", "recompute", "split")
        remarks = {name: getattr(settings, name) for name in names}
        self._cache.store(self._question, best.schedule, remarks)
