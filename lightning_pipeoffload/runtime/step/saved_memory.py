"""Bytes that a stage keeps alive for one microbatch: after its F, and between its B and its W.

The first microbatch of the first step is measured, by its activation store; and that of a later
step where somebody wants to know whether it is still so.
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
        self._later: SavedMemory | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next microbatch is to be measured."""
        return self._due is not None

    @property
    def _due(self) -> SavedMemory | None:
        return next((m for m in (self, self._later) if m and m.activation_bytes is None), None)

    def measure_later_step(self) -> None:
        """Measure the next step's first microbatch too; what was measured before stands."""
        self._later = SavedMemory()

    @property
    def later(self) -> tuple[int, int, int] | None:
        """What the later step has kept, in the order of the attributes; None before it is known."""
        if self._later is None or self._later.residue_bytes is None:
            return None
        found = self._later
        return found.activation_bytes or 0, found.weight_input_bytes or 0, found.residue_bytes or 0

    def count_as(self, activation_bytes: int, weight_input_bytes: int, residue_bytes: int) -> None:
        """Let other bytes stand for what was measured first."""
        self.activation_bytes, self.weight_input_bytes = activation_bytes, weight_input_bytes
        self.residue_bytes, self._later = residue_bytes, None

    def measure_forward(self, store: ActivationStore | None) -> None:
        """Measure what ``store`` holds after F, where it is due."""
        due = self._due
        if store and due:
            due.activation_bytes = store.saved_bytes()
            due.weight_input_bytes = store.saved_bytes(Part.FOR_W)

    def measure_backward(self, queue: WeightGradQueue, store: ActivationStore | None) -> None:
        """Measure what waits for W after B, of what was measured after F."""
        if store:
            store.leave_for_weight()
            for memory in filter(None, (self, self._later)):
                memory._measure_residue(store)
        if self.deferred_flops is None:
            self.deferred_flops = queue.flops

    def _measure_residue(self, store: ActivationStore) -> None:
        if self.activation_bytes is not None and self.residue_bytes is None:
            # A fused backward leaves nothing, and is never asked for what it would have left.
            self.residue_bytes = max(store.saved_bytes(), self.weight_input_bytes or 0)
