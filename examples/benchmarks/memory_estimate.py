"""Resident memory of each rank in training, next to what was said of it before the first step.

Run: python examples/benchmarks/memory_estimate.py [--model gpt gpt2 llama] [--schedule zb_h1 zb_v]

Three models with AdamW in float32 on two processes, on the CPU, where the device's memory is the
process's own: the demo's GPT, and GPT-2 and Llama of Hugging Face. What a rank takes is the highest
that was seen from the second step on, less what it had before it made the module; glibc is told to
keep nothing that is free (it would keep 130 MiB). The exit status is 1 where the two are more than
15 % apart. With ``--small`` the models have a few MiB, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch._dynamo  # a fit loads it, which is none of the model's memory
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.demos.gpt import GPT

MIB = 1 << 20
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(MIB // 4)}  # read when a process starts
CONTEXT, VOCABULARY, NUM_MICROBATCHES = 128, 4096, 8
MOST_OFF = 0.15


def resident() -> int:
    """Return the resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Sampler(L.Callback):
    """Looks at the memory every few milliseconds, from the second step on."""

    def __init__(self) -> None:
        self.highest = 0
        self._over = threading.Event()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        """Start with the second step; the estimate is the first one's."""
        if batch_idx == 1:
            self.estimate = trainer.strategy.report()["memory"]
            threading.Thread(target=self._look, daemon=True).start()

    def on_train_end(self, trainer, module):
        """Stop."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(0.003):
            self.highest = max(self.highest, resident())


class LanguageModel(L.LightningModule):
    """Trains a model of Hugging Face."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        return self.model(input_ids=batch[0], labels=batch[1], use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


def make_gpt(is_small: bool) -> L.LightningModule:
    width = 64 if is_small else 1024
    return GPT(context=CONTEXT, width=width, depth=8, heads=8, dropout=0.0)


def make_gpt2(is_small: bool) -> L.LightningModule:
    width = 64 if is_small else 768
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=width, n_layer=8)
    config.n_head = 8
    return LanguageModel(GPT2LMHeadModel(config))


def make_llama(is_small: bool) -> L.LightningModule:
    width = 64 if is_small else 768
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LanguageModel(LlamaForCausalLM(config))


MODELS = {"gpt": make_gpt, "gpt2": make_gpt2, "llama": make_llama}


def measure(model: str, schedule: str, is_small: bool) -> int:
    """Train, and print this rank's figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base, sampler = resident(), Sampler()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipeOffloadStrategy(schedule=schedule, num_microbatches=NUM_MICROBATCHES),
        max_steps=3,
        callbacks=[sampler],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(256, (3 * NUM_MICROBATCHES, CONTEXT))
    data = DataLoader(TensorDataset(tokens, tokens), NUM_MICROBATCHES)
    trainer.fit(MODELS[model](is_small), data)
    is_v = "_v" in schedule
    rank = trainer.global_rank if is_v else trainer.num_devices - 1 - trainer.global_rank
    said = {name: of_ranks[rank] for name, of_ranks in sampler.estimate.items()}
    taken = sampler.highest - base
    figures = {"model": model, "schedule": schedule, "rank": rank}
    figures |= {name: round(value / MIB, 1) for name, value in {**said, "taken": taken}.items()}
    off = said["device"] / taken - 1
    print(json.dumps({**figures, "off": round(off, 3)}), flush=True)
    return int(abs(off) > MOST_OFF and not is_small)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--schedule", nargs="+", default=["zb_h1", "zb_v"])
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    runs = list(product(options.model, options.schedule))
    if ENVIRONMENT.items() <= os.environ.items() and len(runs) == 1:
        return measure(*runs[0], options.small)
    small = ["--small"] if options.small else []
    found, status = [], 0
    for model, schedule in runs:
        command = [sys.executable, __file__, "--model", model, "--schedule", schedule, *small]
        done = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"model"')]
        found += sorted(map(json.loads, lines), key=lambda figures: figures["rank"])
        status |= done.returncode
    print_table(found)
    return status


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")


if __name__ == "__main__":
    sys.exit(main())
