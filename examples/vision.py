"""A ResNet whose blocks are spread over several containers, cut by patterns of their names.

    python examples/vision.py
    python examples/vision.py --devices 4 --blocks 3 --width 32

It tells in which direction noisy stripes run. ``layer1`` to ``layer3`` are containers of their own,
as in torchvision's ResNet, so the strategy is told in which order their blocks are called.
"""

import math
from argparse import ArgumentParser, Namespace

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipeoffload import PipeOffloadStrategy

NUM_DIRECTIONS = 8


class Residual(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, inputs, height, width]`` to ``outputs`` channels."""
        return functional.relu(self.shortcut(x) + self.branch(x))


class ResNet(L.LightningModule):
    """Classifies images; accuracy is a torchmetrics object."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layer1 = make_layer(width, width, blocks, stride=1)
        self.layer2 = make_layer(width, 2 * width, blocks, stride=2)
        self.layer3 = make_layer(2 * width, 4 * width, blocks, stride=2)
        self.head = nn.Linear(4 * width, NUM_DIRECTIONS)
        self.accuracy = MulticlassAccuracy(NUM_DIRECTIONS, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, 1, height, width]`` to the directions' logits."""
        x = self.layer3(self.layer2(self.layer1(functional.relu(self.stem(images)))))
        return self.head(x.mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy, in nats."""
        images, directions = batch
        loss = functional.cross_entropy(self(images), directions)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of images that are classified right."""
        images, directions = batch
        self.accuracy(self(images), directions)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_layer(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    """Return blocks at one resolution, of which the first gets there."""
    rest = (Residual(outputs, outputs, 1) for _ in range(blocks - 1))
    return nn.Sequential(Residual(inputs, outputs, stride), *rest)


def draw_stripes(count: int, seed: int, size: int = 16) -> TensorDataset:
    """Return images ``[count, 1, size, size]`` of noisy stripes, and their directions."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randint(NUM_DIRECTIONS, (count,), generator=generator)
    angles = directions[:, None, None] * math.pi / NUM_DIRECTIONS
    phases = torch.rand(count, 1, 1, generator=generator) * 2 * math.pi
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    stripes = torch.sin(x * angles.cos() + y * angles.sin() + phases)
    noise = torch.randn(count, size, size, generator=generator)
    return TensorDataset((stripes + noise)[:, None], directions)


def main(arguments: Namespace) -> None:
    """Train for an epoch and validate."""
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(
            schedule=arguments.schedule,
            blocks=["layer1.*", "layer2.*", "layer3.*"],
            num_microbatches=4,  # batch norm sees a microbatch, so many of them change the model
        ),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=1,
    )
    train = DataLoader(draw_stripes(arguments.images, seed=1), 64, shuffle=True)
    trainer.fit(
        ResNet(arguments.width, arguments.blocks),
        train,
        DataLoader(draw_stripes(arguments.images // 8, seed=2), 64),
    )


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
