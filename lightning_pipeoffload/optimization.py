"""Lightning's automatic optimization, with the gradients computed inside the training step.

Forwards and backwards of a pipeline interleave, so what Lightning runs between them (zero_grad,
the hooks around backward) has to be handed to the strategy, which runs it where its first backward
starts.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.loops.optimization.automatic import (
    _AutomaticOptimization,
)  # private: the loop
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override


class PipelineOptimization(_AutomaticOptimization):
    """Leaves zero_grad and backward to the strategy."""

    @classmethod
    def replacing(cls, plain: _AutomaticOptimization) -> PipelineOptimization:
        """Make one that goes on counting where ``plain`` is."""
        if isinstance(plain, cls):
            return plain
        made = cls(plain.trainer)
        made.optim_progress = plain.optim_progress
        return made

    @override
    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        self.trainer.strategy.zero_grad = super()._make_zero_grad_fn(batch_idx, optimizer)
        return None

    @override
    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        return None
