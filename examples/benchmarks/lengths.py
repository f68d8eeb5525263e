"""What batches of many lengths cost: one device and two ranks, as they come, padded, and of one.

    python -m examples.benchmarks.lengths
    python -m examples.benchmarks.lengths --models llama t5 --layers 4 --runs pipeoffload:2

Collators pad to the longest text of a batch, so nearly every batch has shapes of its own. 80
batches have 63 lengths ("any"); "padded" pads each to a multiple of 64; "one" has the padded
batches' mean length in all, "mean" that of the batches as they come. A line has the milliseconds of
a batch: the mean from the 20th on, of a clock and of the process of global rank 0.

The models: "encoder" has layers of torch's with a mask of what is padded, "window" lets each place
see 16 others, "chunks" pads inside its layers to a multiple of 16; the others are Hugging Face's.
T5, of half the layers on either side, has two lengths, which come in other orders.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks.batch_times import measure_each, train_epoch

_WIDTH, _SAMPLES, _WARM = 32, 8, 20
_NUM_BATCHES, _NUM_LENGTHS = 80, 63
_VOCABULARY, _WINDOW = 256, 16
_ROW = "{:<16}{:<20}{:>10}{:>10}"

_TEXT = {"vocab_size": _VOCABULARY, "pad_token_id": 0}
_SIZES = {
    **_TEXT,
    "hidden_size": _WIDTH,
    "num_attention_heads": 2,
    "intermediate_size": 2 * _WIDTH,
    "max_position_embeddings": 256,
}
_DROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Trained(L.LightningModule):
    """A module that AdamW trains."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TinyEncoder(Trained):
    """Encoder layers over a padded sequence with its mask.

    Args:
        kind: "encoder", "window" or "chunks".
        num_layers: The number of layers.
    """

    def __init__(self, kind: str, num_layers: int) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        make = Chunked if kind == "chunks" else nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            make(_WIDTH, 2, 2 * _WIDTH, dropout=0.0, batch_first=True) for _ in range(num_layers)
        )
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over the tokens that are not padded."""
        tokens = batch["input_ids"]
        given: dict[str, Tensor] = {"src_key_padding_mask": tokens == 0}
        if self.kind == "window":
            places = torch.arange(tokens.shape[1], device=tokens.device)
            given["src_mask"] = (places[:, None] - places).abs() > _WINDOW // 2
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, **given)
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), tokens.flatten(), ignore_index=0
        )


class Chunked(nn.TransformerEncoderLayer):
    """Attends within chunks of 16."""

    def forward(self, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        """Pad to whole chunks, and drop what was padded."""
        length = src.shape[1]
        more = -length % _WINDOW
        x = nn.functional.pad(src, (0, 0, 0, more)).unflatten(1, (-1, _WINDOW)).flatten(0, 1)
        return super().forward(x).view(src.shape[0], -1, src.shape[2])[:, :length]


class Pretrained(Trained):
    """A tiny model of Hugging Face, of one kind."""

    def __init__(self, kind: str, num_layers: int) -> None:
        super().__init__()
        transformers = import_module("transformers")
        sizes = {"num_hidden_layers": num_layers, **_SIZES}
        if kind == "llama":
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        elif kind == "bert":
            config = transformers.BertConfig(**sizes, **_DROPPED)
            self.model = transformers.BertForMaskedLM(config)
        else:
            config = transformers.T5Config(
                **_TEXT,
                **{"d_model": _WIDTH, "d_kv": _WIDTH // 2, "d_ff": 2 * _WIDTH, "num_heads": 2},
                **{"num_layers": num_layers // 2, "num_decoder_layers": num_layers // 2},
                **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
            )
            self.model = transformers.T5ForConditionalGeneration(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the model's loss."""
        loss: Tensor = self.model(**batch).loss
        return loss


_MODELS = {
    **dict.fromkeys(("encoder", "window", "chunks"), TinyEncoder),
    **dict.fromkeys(("llama", "bert", "t5"), Pretrained),
}


def batch_lengths(kind: str, seed: int = 0) -> list[int]:
    """Return the length of each batch's texts."""
    draw = random.Random(seed)
    lengths = [64 + index % _NUM_LENGTHS for index in range(_NUM_BATCHES)]
    draw.shuffle(lengths)
    if kind == "any":
        return lengths
    padded = [-(-length // 64) * 64 for length in lengths]
    if kind == "padded":
        return padded
    given = lengths if kind == "mean" else padded
    return [round(sum(given) / len(given))] * _NUM_BATCHES


def make_batch(model: str, length: int, answer: int) -> dict[str, Tensor]:
    """Make a batch of texts, of which the first is that long."""
    texts = torch.randint(1, _VOCABULARY, (_SAMPLES, length))
    lengths = torch.randint(length // 2, length + 1, (_SAMPLES, 1))
    lengths[0] = length
    texts[torch.arange(length) >= lengths] = 0
    batch = {"input_ids": texts, "attention_mask": (texts > 0).long()}
    if model == "t5":
        batch["labels"] = torch.randint(1, _VOCABULARY, (_SAMPLES, answer))
    elif model in ("llama", "bert"):
        batch["labels"] = texts.masked_fill(texts == 0, -100)
    return batch


def measure(name: str, run: str, num_layers: int) -> None:
    """Train, and print a line of the table."""
    L.seed_everything(1, verbose=False)
    model, _, kind = name.partition(":")
    lengths = zip(batch_lengths(kind), batch_lengths(kind, seed=1), strict=True)
    data: Any = DataLoader([make_batch(model, *each) for each in lengths], batch_size=None)  # type: ignore[arg-type]
    module = _MODELS[model](model, num_layers)
    starts = train_epoch(run, module, data).starts
    if module.global_rank == 0:
        (first, own_first), (last, own_last) = starts[_WARM], starts[-1]
        num = len(starts) - 1 - _WARM
        figures = 1000 * (last - first) / num, 1000 * (own_last - own_first) / num
        print(_ROW.format(name, run, *(f"{figure:.1f}" for figure in figures)), flush=True)


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--models", nargs="+", default=["encoder"], choices=_MODELS)
    parser.add_argument("--kinds", nargs="+", default=["any", "padded", "one"])
    names = ["auto:1", "pipeoffload:2", "pipeoffload_zb_h1:2"]
    parser.add_argument("--runs", nargs="+", default=names, help="strategy:ranks")
    return parser.parse_args(line)


def main(line: Sequence[str]) -> None:
    """Print a line for each model, kind and run."""
    given = read_arguments(line)
    if ":" not in given.kinds[0]:  # as a process of its own gets them
        given.kinds = [f"{model}:{kind}" for model in given.models for kind in given.kinds]
        print(_ROW.format("lengths", "run", "ms", "cpu ms"), flush=True)
    measure_each(given, "examples.benchmarks.lengths", "layers", measure)


if __name__ == "__main__":
    main(sys.argv[1:])
