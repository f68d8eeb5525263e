"""An optimizer's step on the device, which steps float32 masters of parameters in half precision.

The masters stay on the device, as the optimizer's state does. Gradients are cast to float32 for a
bucket of parameters at a time; an optimizer that needs all its parameters at once casts them all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.optimizers.master_weights import is_half
from lightning_pipeoffload.optimizers.stand_in_step import StandInStep

BUCKET_BYTES = 64 << 20


class MasterStep(StandInStep):
    """Steps an optimizer's masters where its parameters are."""

    _argument = 'master_weights="float32"'

    @override
    @torch.no_grad()
    def step_all_but_last_bucket(self) -> None:
        *first, last = [*self._in_buckets(self._members_with_gradient(), BUCKET_BYTES)] or [[]]
        for bucket in first:
            self._stand_in(self._stand_ins_of(bucket), is_last=False)
            self._step_bucket()
            self._write_back()
        if last:
            self._stand_in(self._stand_ins_of(last), is_last=True)

    @override
    def write_back_parameters(self) -> None:
        self._write_back()

    def _stand_ins_of(self, bucket: list[Tensor]) -> dict[Tensor, Tensor]:
        """Return the masters; a parameter without one is stepped itself."""
        return {
            p: self._stand_in_for(p, p.detach(), self._gradient_of(p)) if is_half(p) else p
            for p in bucket
        }

    @torch.no_grad()
    def _write_back(self) -> None:
        """Round masters to parameters; restore the optimizer's own parameters."""
        stepped = {p: other.detach() for p, other in self._standing.items() if self._masters_for(p)}
        if stepped:  # private: as optimizers do it, one kernel for many
            torch._foreach_copy_([p.detach() for p in stepped], [*stepped.values()])
        for parameter, master in stepped.items():
            assert self._masters is not None
            self._masters.put(parameter, master)
        self._restore()
