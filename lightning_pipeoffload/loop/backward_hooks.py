"""What Lightning does around one backward, for steps that run several."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_pipeoffload.loop.loss_scale import scaler_of


class BackwardHooks:
    """Runs zero_grad and the hooks around a batch, and each microbatch's own backward within.

    Args:
        module: The user's module.
        precision: Lightning's part of the backward, hooks included.
        device: The device of this rank.

    Attributes:
        adds_up: Whether the next batch's gradients add up to what there is.
    """

    def __init__(self, module: LightningModule, precision: Precision, device: torch.device) -> None:
        self._module = module
        self._precision = precision
        self._device = device
        self._scaler = scaler_of(precision)
        self._zero_grad: Callable[[], None] | None = None
        self.adds_up = True

    def expect(self, zero_grad: Callable[[], None] | None) -> None:
        """Keep what Lightning would do before a batch's backward.

        Args:
            zero_grad: A function that sets gradients to zero; None where Lightning does not,
                because this batch's add up to others.
        """
        self._zero_grad = zero_grad
        self.adds_up = zero_grad is None

    def differentiate(self, loss: Tensor) -> None:
        """Run the backward of one microbatch's loss."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._precision.backward(loss, self._module, None)

    def _zero(self) -> None:
        """Set gradients to zero where Lightning would, with the hook before."""
        if self._zero_grad is not None:
            self._zero_grad()

    def _begin(self, loss: Tensor | None) -> None:
        """Call the hook before a backward."""
        self._precision.pre_backward(self._shown(loss), self._module)

    def _shown(self, loss: Tensor | None) -> Tensor:
        """Return what hooks see as the loss; a rank without one shows zero."""
        return torch.zeros((), device=self._device) if loss is None else loss
