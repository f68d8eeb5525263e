"""A module and its data, trained by ``pipeoffload-train`` from a configuration of your own.

    cd examples/own_config
    pipeoffload-train --config-dir conf --config-name waves trainer=cpu
    pipeoffload-train --config-dir conf --config-name waves trainer=cpu model.depth=16 schedule=zb_v

``conf/`` holds what is yours; every group that it does not have comes from the package.
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A norm and two linear layers, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.project = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, width]`` to the same shape."""
        return x + self.project(functional.gelu(self.expand(self.norm(x))))


class MLP(L.LightningModule):
    """Learns a function of several numbers."""

    def __init__(self, inputs: int, width: int, depth: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.enter = nn.Linear(inputs, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.leave = nn.Linear(width, 1)

    def error(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean squared error."""
        x, y = batch
        return functional.mse_loss(self.leave(self.blocks(self.enter(x))), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the error to make small."""
        error = self.error(batch)
        self.log("train_loss", error, prog_bar=True)
        return error

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the error on points that training does not see."""
        self.log("val_loss", self.error(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), self.hparams["learning_rate"])


class Waves(L.LightningDataModule):
    """Points in a cube, each with a sum of sines as its target."""

    def __init__(self, inputs: int, batch_size: int, num_samples: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        x = torch.rand(num_samples, inputs, generator=torch.Generator().manual_seed(1))
        self.points = TensorDataset(x, torch.sin(6 * x).sum(1, keepdim=True))

    def train_dataloader(self) -> DataLoader:
        """Return nine tenths of the points, shuffled."""
        return DataLoader(self._part(0.0, 0.9), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the rest."""
        return DataLoader(self._part(0.9, 1.0), self.batch_size)

    def _part(self, start: float, end: float) -> TensorDataset:
        count = len(self.points)
        return TensorDataset(*self.points[int(start * count) : int(end * count)])
