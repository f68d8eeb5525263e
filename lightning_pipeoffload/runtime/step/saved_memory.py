"""Bytes that a stage keeps alive for one microbatch: after its F, and between its B and its W.

The first microbatch of the first step is measured, by its activation store.
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
    """

    def __init__(self) -> None:
        self.activation_bytes: int | None = None
        self.weight_input_bytes: int | None = None
        self.residue_bytes: int | None = None
        self.deferred_flops: int | None = None

    def measure_forward(self, store: ActivationStore | None) -> None:
        """Measure what ``store`` holds after F, the first time."""
        if store and self.activation_bytes is None:
            self.activation_bytes = store.saved_bytes()
            self.weight_input_bytes = store.saved_bytes(Part.FOR_W)

    def measure_backward(self, queue: WeightGradQueue, store: ActivationStore | None) -> None:
        """Measure what waits for W after B, the first time."""
        if store:
            store.leave_for_weight()
            if self.residue_bytes is None:
                # A fused backward leaves nothing, and is never asked for what it would have left.
                self.residue_bytes = max(store.saved_bytes(), self.weight_input_bytes or 0)
        if self.deferred_flops is None:
            self.deferred_flops = queue.flops
