"""The measured bytes of what a stage saves for one microbatch."""

from __future__ import annotations

from lightning_pipeoffload.runtime.memory.stage_store import ActivationStore
from lightning_pipeoffload.runtime.weight_grad.queue import WeightGradQueue
from lightning_pipeoffload.schedule.actions import Part


class SavedMemory:
    """Bytes of one stage and microbatch; each is None until it is measured.

    Attributes:
        activation_bytes: Saved by autograd in F.
        weight_input_bytes: The share of these that only W needs.
        residue_bytes: Kept for W after B.
        deferred_flops: Floating-point operations of the weight gradients left for W.
        workspace_bytes: Taken by the chunks of a loss in F and B, and freed there; counted on
            shapes only.
        measures_all: Whether to measure every microbatch of this step.
    """

    def __init__(self) -> None:
        self.activation_bytes: int | None = None
        self.weight_input_bytes: int | None = None
        self.residue_bytes: int | None = None
        self.deferred_flops: int | None = None
        self.workspace_bytes = 0
        self.measures_all = False

    @property
    def is_due(self) -> bool:
        """Whether to measure the next microbatch."""
        return self.measures_all or self.activation_bytes is None

    def measure_forward(self, store: ActivationStore | None) -> None:
        """Measure the bytes in ``store`` after F, if that is due."""
        if store and self.is_due:
            self.activation_bytes = max(self.activation_bytes or 0, store.saved_bytes())
            for_w = store.saved_bytes(Part.FOR_W)
            self.weight_input_bytes = max(self.weight_input_bytes or 0, for_w)

    def measure_backward(self, queue: WeightGradQueue, store: ActivationStore | None) -> None:
        """Measure the bytes kept for W after B, of a microbatch that was measured after F."""
        if store:
            store.leave_for_weight()
            if self.measures_all or self.residue_bytes is None:
                # A fused backward keeps nothing for W.
                least = self.residue_bytes or 0, self.weight_input_bytes or 0
                self.residue_bytes = max(store.saved_bytes(), *least)
        if self.deferred_flops is None:
            self.deferred_flops = queue.flops
