"""SimCLR: two views of each image go through the same blocks in a step.

    python examples/simclr.py
    python examples/simclr.py --devices 4 --blocks 8 --width 128

Each stage computes both views of a microbatch before it sends them on. The negatives of an image
are the other images of its microbatch.
"""

import math
from argparse import ArgumentParser, Namespace

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy


class Residual(nn.Module):
    """A convolution with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, width, height, width]`` to the same shape."""
        return x + self.branch(x)


class SimCLR(L.LightningModule):
    """Tells which of a microbatch's second views is of the same image."""

    def __init__(self, width: int, blocks: int, temperature: float = 0.5) -> None:
        super().__init__()
        self.temperature = temperature
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 32))

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, 1, height, width]`` to vectors of length 1."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return functional.normalize(self.projector(x.mean((2, 3))), dim=-1)

    def contrast(self, views: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy over both directions, in nats."""
        first, second = (self(view) for view in views)
        vectors = torch.cat([first, second])
        itself = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
        similar = (vectors @ vectors.T / self.temperature).masked_fill(itself, -math.inf)
        other = torch.arange(len(vectors), device=vectors.device).roll(len(first))
        return functional.cross_entropy(similar, other)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a microbatch."""
        loss = self.contrast(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss over images that are not trained on."""
        self.log("val_loss", self.contrast(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def draw_views(count: int, seed: int, size: int = 16) -> TensorDataset:
    """Return two noisy views, one of them mirrored, of smooth images ``[count, 1, size, size]``."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 1, 4, 4, generator=generator)
    images = functional.interpolate(coarse, size=(size, size), mode="bilinear")
    first, second = (
        images + 0.3 * torch.randn(images.shape, generator=generator) for _ in range(2)
    )
    return TensorDataset(first, second.flip(-1))


def main(arguments: Namespace) -> None:
    """Train for an epoch and validate."""
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(schedule="zb_h1", num_microbatches=4),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=1,
    )
    trainer.fit(
        SimCLR(arguments.width, arguments.blocks),
        DataLoader(draw_views(arguments.images, seed=1), 128, shuffle=True),
        DataLoader(draw_views(arguments.images // 8, seed=2), 128),
    )


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=4)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
