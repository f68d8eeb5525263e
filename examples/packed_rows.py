"""Texts of uneven length packed into rows, each a microbatch, over the ranks of a pipeline.

    pip install transformers
    python examples/packed_rows.py
    python examples/packed_rows.py --devices 4 --rows 16 --max-tokens 2048 --layers 8

The texts are the source files of Python's standard library, cut at ``--max-tokens`` bytes. The
model is Hugging Face's Llama; ``use_cache=False`` lets it tell the texts of a row apart.
"""

from argparse import ArgumentParser, Namespace

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pipeoffload import PackedRows, PackedRowsSampler, PipeOffloadStrategy
from lightning_pipeoffload.demos import find_source_files


class Llama(L.LightningModule):
    """Predicts the next byte of each text."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def read_texts(count: int, max_tokens: int) -> list[dict[str, Tensor]]:
    """Return source files as bytes."""
    files = (path.read_bytes()[:max_tokens] for path in find_source_files()[:count])
    return [{"input_ids": torch.tensor([*text])} for text in files if len(text) > 1]


def main(arguments: Namespace) -> None:
    """Train on the source files."""
    L.seed_everything(1)
    texts = read_texts(arguments.texts, arguments.max_tokens)
    sizes = arguments.rows, arguments.max_tokens
    sampler = PackedRowsSampler([len(text["input_ids"]) for text in texts], *sizes)
    config = LlamaConfig(
        vocab_size=256,
        max_position_embeddings=arguments.max_tokens,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(microbatch_weight="tokens", schedule="zb_h1"),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=arguments.steps,
    )
    trainer.fit(
        Llama(config), DataLoader(texts, batch_sampler=sampler, collate_fn=PackedRows(*sizes))
    )


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
