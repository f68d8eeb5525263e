"""The measured bytes that a stage saves for one microbatch, or for a slice of its sequences."""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipeoffload.runtime.memory.stage_store import ActivationStore
from lightning_pipeoffload.runtime.weight_grad import WeightGradQueue
from lightning_pipeoffload.schedule import Kind, MemoryPart


class BytesForLaterSlices(NamedTuple):
    """The tensors that a slice of a sequence keeps for later slices.

    Attributes:
        num_bytes: Their memory, of whole storages where they are views.
        gradient_bytes: The memory of their gradients.
        num_tokens: Tokens of the slice.
    """

    num_bytes: int = 0
    gradient_bytes: int = 0
    num_tokens: int = 0


class SavedMemory:
    """Bytes of one stage and microbatch, or slice of it; each is None until it is measured.

    Attributes:
        activation_bytes: Saved by autograd in F.
        weight_input_bytes: The share of these that only W needs.
        residue_bytes: Kept for W after B.
        for_later: The tensors that later slices use; they stay on the device.
        deferred_flops: Floating-point operations of the weight gradients left for W.
        workspace_bytes: Taken by the chunks of a loss in F and B, and freed there; counted on
            shapes only.
        collective_bytes: Sent to tensor ranks by F and by B; counted on shapes only.
    """

    def __init__(self, measures_all: bool = False) -> None:
        self.activation_bytes: int | None = None
        self.weight_input_bytes: int | None = None
        self.residue_bytes: int | None = None
        self.for_later = BytesForLaterSlices()
        self.deferred_flops: int | None = None
        self.workspace_bytes = 0
        self.collective_bytes = {Kind.F: 0.0, Kind.B: 0.0}
        self._measures_all = measures_all

    def set_measure_all(self, measures_all: bool) -> None:
        """Set whether to measure every microbatch of the next step."""
        self._measures_all = measures_all

    def record_workspace(self, peak: int) -> None:
        """Record the peak bytes of one chunked loss; ``workspace_bytes`` is the largest of them."""
        self.workspace_bytes = max(self.workspace_bytes, peak)

    @property
    def all_bytes(self) -> int:
        """Bytes of the activation, and of the tensors that later slices use."""
        return (self.activation_bytes or 0) + self.for_later.num_bytes

    @property
    def is_measurement_due(self) -> bool:
        """Whether to measure the next microbatch."""
        return self._measures_all or self.activation_bytes is None

    def measure_forward_if_due(
        self, store: ActivationStore | None, for_later: BytesForLaterSlices | None = None
    ) -> None:
        """Measure the bytes in ``store`` after F, and those kept for later slices, if due."""
        if store and self.is_measurement_due:
            self.for_later = BytesForLaterSlices(
                *map(max, self.for_later, for_later or self.for_later)
            )
            self.activation_bytes = max(self.activation_bytes or 0, store.saved_bytes())
            for_w = store.saved_bytes(MemoryPart.FOR_W)
            self.weight_input_bytes = max(self.weight_input_bytes or 0, for_w)

    def add_for_later(self, kept: BytesForLaterSlices, times: int) -> None:
        """Add the memory that ``times`` alike blocks keep for later slices; ``kept`` is of one."""
        sizes = self.for_later.num_bytes + times * kept.num_bytes
        gradients = self.for_later.gradient_bytes + times * kept.gradient_bytes
        self.for_later = BytesForLaterSlices(sizes, gradients, kept.num_tokens)

    def add(self, other: SavedMemory) -> None:
        """Add the bytes that code before the blocks saves, none of them for later slices."""
        for name in ("activation_bytes", "weight_input_bytes", "residue_bytes"):
            setattr(self, name, (getattr(self, name) or 0) + (getattr(other, name) or 0))

    def measure_backward_if_due(
        self, queue: WeightGradQueue, store: ActivationStore | None
    ) -> None:
        """Measure the bytes kept for W after B, of a microbatch that was measured after F."""
        if store:
            store.relabel_for_w()
            if self._measures_all or self.residue_bytes is None:
                # A fused backward keeps nothing for W.
                least = self.residue_bytes or 0, self.weight_input_bytes or 0
                self.residue_bytes = max(store.saved_bytes(), *least)
        if self.deferred_flops is None:
            self.deferred_flops = queue.flops
