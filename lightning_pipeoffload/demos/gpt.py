"""A byte-level GPT as a plain LightningModule.

It is the demo's user code: it knows nothing of pipelines and imports nothing of this package. It
has what makes real modules hard to cut: dropout, tied weights, parameter groups by name, a learning
rate schedule, logged values and a metric object. The architecture is GPT-2 (Radford et al., 2019).

Shapes: ``batch`` sequences of ``time`` bytes; ``width`` features, divided among ``heads``.
"""

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal self-attention with all heads in one matrix product."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Mix ``[batch, time, width]`` along time, each position seeing itself and the past."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [batch, time, 3, heads, features]
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, features]
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        joined = mixed.transpose(1, 2).flatten(2)  # [batch, time, width]
        return self.residual_dropout(self.project(joined))


class FeedForward(nn.Module):
    """The two linear layers of a block, four times as wide between them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``[batch, time, width]`` on its own."""
        return self.residual_dropout(self.project(functional.gelu(self.expand(x))))


class Block(nn.Module):
    """One pre-norm transformer block: attention, then feed-forward, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(LightningModule):
    """Predict the next byte, as a user of Lightning would write it.

    Args:
        vocab_size: Number of tokens; 256 for bytes.
        context: Longest sequence, in tokens.
        width: Features of a token.
        depth: Number of blocks.
        heads: Attention heads of a block; they divide ``width``.
        dropout: Probability of zeroing, in attention, after each residual branch and the embedding.
        tie_weights: Use the token embedding as the head's matrix too.
        learning_rate: Highest rate, reached after ``warmup_steps``.
        weight_decay: AdamW's, for the matrices of the linear layers alone.
        warmup_steps: Optimizer steps over which the rate rises linearly.
        max_steps: Optimizer steps after which the rate has fallen to a tenth, along a cosine.

    Raises:
        ValueError: If ``heads`` does not divide ``width`` or ``max_steps`` is not positive.
    """

    def __init__(  # noqa: PLR0913 (a model is described by its sizes)
        self,
        vocab_size: int = 256,
        context: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
        tie_weights: bool = False,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        max_steps: int = 400,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width ({width}) must be a multiple of heads ({heads})")
        if max_steps < 1:
            raise ValueError(
                f"max_steps ({max_steps}) must be at least 1: the learning rate falls until then"
            )
        self.save_hyperparameters()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tie_weights:
            self.head.weight = self.token_embedding.weight
        self.val_accuracy = MulticlassAccuracy(vocab_size, average="micro")
        self.initialize_weights(depth)

    def initialize_weights(self, depth: int) -> None:
        """Draw the weights as GPT-2 does: the ``2 * depth`` residual branches start small."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                scale = math.sqrt(2 * depth) if "project" in name else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, time]`` to the next ones' logits ``[batch, time, vocab_size]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        x = self.embedding_dropout(x)  # [batch, time, width]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        inputs, targets = batch
        loss = cross_entropy(self(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss, in nats per byte, and the share of bytes that are predicted right."""
        inputs, targets = batch
        logits = self(inputs)
        self.val_accuracy(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", cross_entropy(logits, targets), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss, in nats per byte."""
        inputs, targets = batch
        self.log("test_loss", cross_entropy(self(inputs), targets))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW, without decay of norms, biases and embeddings, and its rate per step."""
        named = list(self.named_parameters())
        decay = [parameter for name, parameter in named if is_decayed(name)]
        keep = [parameter for name, parameter in named if not is_decayed(name)]
        groups = [
            {"params": decay, "weight_decay": self.hparams["weight_decay"]},
            {"params": keep, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, self.hparams["learning_rate"], betas=(0.9, 0.95))
        scheduler = LambdaLR(optimizer, self.learning_rate_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def learning_rate_factor(self, step: int) -> float:
        """Return what share of ``learning_rate`` optimizer step ``step`` uses."""
        warmup_steps, max_steps = self.hparams["warmup_steps"], self.hparams["max_steps"]
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def is_decayed(name: str) -> bool:
    """Tell by its name whether a parameter is a matrix of a linear layer."""
    return not any(word in name for word in ("bias", "norm", "embedding"))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens of logits ``[batch, time, vocab_size]``, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
