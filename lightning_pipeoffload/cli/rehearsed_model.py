"""One rank's part of the model that ``conf`` describes, made for real; all else is shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from lightning_pipeoffload.cli.model_probe import ModelProbe
from lightning_pipeoffload.loop.step_calls import StepCalls
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.cut.partition import CutSettings
from lightning_pipeoffload.runtime.cut.remote_values import make_real
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.step.batch_slice import BatchSlice
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot
from lightning_pipeoffload.schedule import Schedule

__all__ = ["RehearsedModel"]

_SEED = 0
_DEVIATION = 0.02


class RehearsedModel(ModelProbe):
    """Makes the stages of one rank, with random values."""

    def make(
        self, schedule: Schedule, settings: PipelineSettings, rank: int, device: torch.device
    ) -> Pipeline:
        """Return one rank's part of the model, which nothing but its shapes is there of elsewhere.

        Args:
            schedule: The schedule, which says what is on which rank.
            settings: How to cut.
            rank: The rank.
            device: Where it computes.

        Raises:
            ValueError: The model cannot be cut so.
        """
        split = self._make_layers(schedule.placement, settings)
        self._module = self._precision.convert_module(self._module)
        cut = CutSettings(
            schedule.placement, settings.blocks, split, settings.recompute, compile=settings.compile
        )
        self._device = device
        self._pipeline = pipeline = Pipeline(self._module, rank, cut, device)
        self._size = self.batch_size // schedule.num_microbatches
        first = self.cut(1)[0]  # without values, which tells what this rank owns
        with self._precision.train_step_context():
            self.needs = MemoryNeeds.of(pipeline, first, self._states)
        made: dict[int, Tensor] = {}
        for slot in pipeline.ownership.slots:
            if pipeline.ownership.is_local(slot.name) and isinstance(slot.tensor, ShapeOnly):
                _fill(slot, made)
        pipeline.cut_anew(rank, cut)
        return pipeline

    def cut(self, count: int) -> Sequence[BatchSlice]:
        """Return so many microbatches of the first batch, over and over.

        Args:
            count: How many.
        """
        batch: Any = move_data_to_device(self._batch, self._device)
        inputs = StepCalls(self._module, _SEED).inputs("training_step", (batch, 0), {})
        with self._precision.train_step_context():
            parts = self._pipeline.cut_batch(
                inputs.batch, self._size, inputs.step, inputs.kind, inputs.seed
            )
        return (parts * count)[:count]


@torch.no_grad()
def _fill(slot: Slot, made: dict[int, Tensor]) -> None:
    """Make a parameter with values that do no harm: matrices small, scales 1, the rest 0."""
    tensor = make_real(slot, made)
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=_DEVIATION)
    else:
        nn.init.constant_(tensor, float(slot.attribute == "weight"))
