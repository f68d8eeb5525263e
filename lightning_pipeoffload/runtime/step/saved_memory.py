"""Bytes that a stage keeps alive for one microbatch: after its F, and between its B and its W.

The first microbatch of the first step is measured, by its activation store; under a memory limit
every microbatch of a step with new shapes too. The largest counts.
"""

from __future__ import annotations

from lightning_pipeoffload.runtime.memory.stage_store import ActivationStore
from lightning_pipeoffload.runtime.weight_grad.queue import WeightGradQueue
from lightning_pipeoffload.schedule.actions import Part


class SavedMemory:
    """Bytes of one stage and microbatch; each is None before it was measured.

    Attributes:
        activation_bytes: What autograd saved in F.
        weight_input_bytes: The part of it that W alone needs.
        residue_bytes: What waits for W after B.
        deferred_flops: Floating-point operations of the weight gradients left for W.
        measures_all: Whether each microbatch of this step is measured.
    """

    def __init__(self) -> None:
        self.activation_bytes: int | None = None
        self.weight_input_bytes: int | None = None
        self.residue_bytes: int | None = None
        self.deferred_flops: int | None = None
        self.measures_all = False

    @property
    def is_due(self) -> bool:
        """Whether the next microbatch is to be measured."""
        return self.measures_all or self.activation_bytes is None

    def measure_forward(self, store: ActivationStore | None) -> None:
        """Measure what ``store`` holds after F, where it is due."""
        if store and self.is_due:
            self.activation_bytes = max(self.activation_bytes or 0, store.saved_bytes())
            for_w = store.saved_bytes(Part.FOR_W)
            self.weight_input_bytes = max(self.weight_input_bytes or 0, for_w)

    def measure_backward(self, queue: WeightGradQueue, store: ActivationStore | None) -> None:
        """Measure what waits for W after B, of what was measured after F."""
        if store:
            store.leave_for_weight()
            if self.measures_all or self.residue_bytes is None:
                # A fused backward leaves nothing, and is never asked for what it would have left.
                known = self.residue_bytes or 0, self.weight_input_bytes or 0
                self.residue_bytes = max(store.saved_bytes(), *known)
        if self.deferred_flops is None:
            self.deferred_flops = queue.flops
