"""Texts of uneven length, packed into microbatches, over ranks that do not wait for each other.

    python examples/on_demand.py
    python examples/on_demand.py --devices 4 --model llama --max-tokens 2048 --mode lb_micro

The texts are the source files of Python's standard library, cut at ``--max-tokens`` bytes. The demo
GPT gets the texts of a microbatch as rows, padded on the right, where causal attention ignores it.
A Llama of Hugging Face (``pip install transformers``) gets them in one row: positions start again
with each text, and keep its attention within one text.
"""

from argparse import ArgumentParser, Namespace

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_pipeoffload import MinibatchCollate, MinibatchSampler
from lightning_pipeoffload.demos import GPT, find_source_files

IGNORED = -100  # the target that cross_entropy ignores


class PackedLlama(L.LightningModule):
    """Predicts the next byte of several texts in one row."""

    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - GPT needs none

        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(
            LlamaConfig(vocab_size=256, max_position_embeddings=context, **sizes, **heads)
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        logits = self.model(**inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0], batch["targets"][0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def pad(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return texts as rows: inputs and targets, ``[texts, longest]``."""
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = pad_sequence([text[1:] for text in texts], True, padding_value=IGNORED)
    return inputs, targets


def pack(texts: list[Tensor]) -> dict[str, Tensor]:
    """Return texts in one row, ``[1, tokens]``."""
    positions = [torch.arange(len(text) - 1) for text in texts]
    return {
        "input_ids": torch.cat([text[:-1] for text in texts])[None],
        "targets": torch.cat([text[1:] for text in texts])[None],
        "position_ids": torch.cat(positions)[None],
    }


def read_texts(longest: int, count: int) -> list[Tensor]:
    """Return the first ``count`` source files as bytes."""
    found = (path.read_bytes()[:longest] for path in find_source_files())
    texts = [torch.tensor(list(content)) for content in found if len(content) > 1]
    return texts[:count]


def main(arguments: Namespace) -> None:
    """Train on the texts."""
    L.seed_everything(1)
    texts = read_texts(arguments.max_tokens, arguments.texts)
    lengths = [len(text) for text in texts]
    sampler = MinibatchSampler(
        lengths,
        arguments.max_tokens,
        mode=arguments.mode,
        samples_per_rank=arguments.samples_per_rank,
        weight=[length - 1 for length in lengths],  # the bytes that are predicted
    )
    sizes = {"context": arguments.max_tokens, "width": arguments.width}
    is_llama = arguments.model == "llama"
    module = (
        PackedLlama(**sizes, layers=arguments.layers)
        if is_llama
        else GPT(**sizes, depth=arguments.layers, max_steps=arguments.steps)
    )
    trainer = L.Trainer(
        strategy="odc",
        devices=arguments.devices,
        accelerator=arguments.accelerator,
        max_steps=arguments.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
    )
    collate = MinibatchCollate(pack if is_llama else pad)
    trainer.fit(module, DataLoader(texts, batch_sampler=sampler, collate_fn=collate))
    if trainer.is_global_zero:
        print(f"loss of the last minibatch: {trainer.callback_metrics['train_loss']:.3f}")


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["gpt", "llama"], default="gpt")
    parser.add_argument("--mode", choices=["lb_mini", "lb_micro", "local_sort"], default="lb_mini")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--samples-per-rank", type=int, default=4)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments())
