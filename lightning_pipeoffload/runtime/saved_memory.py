"""Measures what a stage keeps alive for one microbatch: after its F, and between its B and its W.

The first microbatch of the first step is measured, storage by storage; parameters do not count.
With the plan's order this gives the peak of live saved bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipeoffload.runtime.ownership import Ownership
from lightning_pipeoffload.runtime.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.weight_grad import WeightGradQueue


class SavedMemory:
    """Bytes of one stage and microbatch.

    Args:
        ownership: whose parameters do not count.

    Attributes:
        activation_bytes: what autograd saved in F; None before it was measured.
        residue_bytes: what waits for W after B; None before.
        deferred_flops: floating-point operations of the weight gradients left for W; None before.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self.activation_bytes: int | None = None
        self.residue_bytes: int | None = None
        self.deferred_flops: int | None = None

    @contextmanager
    def measuring_forward(self) -> Iterator[None]:
        """Measure what is saved inside, the first time."""
        if self.activation_bytes is not None:
            yield
            return
        parameters = {_address(t) for t in self._ownership.local_tensors().values()}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, ShapeOnly) and _address(tensor) not in parameters:
                saved[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.activation_bytes = sum(saved.values())

    def measure_backward(self, queue: WeightGradQueue) -> None:
        """Measure what ``queue`` holds after B, the first time."""
        if self.residue_bytes is None:
            self.residue_bytes = queue.nbytes()
            self.deferred_flops = queue.flops


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
