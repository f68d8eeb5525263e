"""A GPT of your own, trained over the ranks of a pipeline and read back on one.

    python examples/own_gpt.py
    python examples/own_gpt.py --devices 4 --depth 8 --schedule zb_v --batch-size 16

It learns, byte by byte, the reference manual that every Python carries. The class ``GPT`` is plain
Lightning; the only lines about the pipeline are the import of ``lightning_pipeoffload`` and
``strategy=``.
"""

from argparse import ArgumentParser, Namespace
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import lightning_pipeoffload  # noqa: F401 - registers the strategies


class Block(nn.Module):
    """Attention to the past, then two linear layers, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class GPT(L.LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes ``[batch, time]`` to logits of the next ones, ``[batch, time, 256]``."""
        time = text.shape[1]
        x = self.bytes(text) + self.positions(torch.arange(time, device=text.device))
        mask = torch.ones(time, time, dtype=torch.bool, device=text.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        logits = self(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, without decay of vectors."""
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=3e-3)


def read_manual(context: int) -> Tensor:
    """Return the manual as ``[pieces, context + 1]`` of int64."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    return text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1)


@torch.no_grad()
def write(gpt: GPT, start: bytes, length: int) -> str:
    """Let a trained module go on from ``start``."""
    text = torch.tensor([list(start)])
    for _ in range(length):
        logits = gpt(text[:, -gpt.hparams["context"] :])[:, -1]
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main(arguments: Namespace) -> None:
    """Train, then load the checkpoint into a plain module and let it write."""
    L.seed_everything(1)
    gpt = GPT(arguments.width, arguments.depth, heads=4, context=arguments.context)
    trainer = L.Trainer(
        strategy=f"pipeoffload_{arguments.schedule}",
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=arguments.steps,
    )
    trainer.fit(gpt, DataLoader(read_manual(arguments.context), arguments.batch_size, shuffle=True))
    if trainer.is_global_zero:
        trained = GPT.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        print(write(trained.eval(), b"The ", 200))


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
