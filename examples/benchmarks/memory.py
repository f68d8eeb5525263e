"""Resident memory of each rank of a pipeline on the CPU, above that of the imports, in MiB.

    python -m examples.benchmarks.memory estimate [--model gpt gpt2 llama] [--schedule zb_h1 zb_v]
    python -m examples.benchmarks.memory build
    python -m examples.benchmarks.memory quantize
    python -m examples.benchmarks.memory checkpoint

* ``estimate``: what two ranks take in training, from the second step on, next to what the report
  said before the first one. glibc is told to keep nothing that is free (it would keep 130 MiB). The
  exit status is 1 where the two are more than 15 % apart.
* ``build``: what four ranks take to make a transformer of 1.5 GiB in ``configure_model``. Each may
  take its own share, one block and 200 MiB; else the exit status is 1.
* ``quantize``: what four ranks take to make a Llama of 768 MiB in bfloat16 in ``configure_model``,
  whose weights ``load_weights`` quantizes to 4 bits. Each may take twice its own quantized share,
  one block in bfloat16 and 200 MiB; else the exit status is 1.
* ``checkpoint``: what four ranks take to save and to resume a module of 600 MB with its AdamW, as
  one file and as a folder: "started" up to the first step, "trained" in the steps, "saved".

With ``--small`` models have a few MiB, to see that it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a fit loads it, which is none of the model's memory
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks.harness import quiet_trainer, run_ranks, write_results
from lightning_pipeoffload import PipeOffloadStrategy, load_weights
from lightning_pipeoffload.demos import GPT
from lightning_pipeoffload.runtime.shapes import ShapeOnly, num_unpacked_values, scales_of

MIB = 1 << 20
KEEP_NOTHING = {"MALLOC_MMAP_THRESHOLD_": str(MIB // 4)}  # read when a process starts
CONTEXT, VOCABULARY = 128, 4096
MOST_OFF = 0.15
SLACK = 200.0  # MiB

Figures = dict[str, Any]


def take_peak() -> float:
    """Return the highest resident memory since the last call."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")  # resets it
    return found


class Peaks(Callback):
    """Notes the highest memory of each part of a fit.

    Attributes:
        found: MiB of each part.
        estimate: What the report says of memory after the first step, in bytes.
        share: MiB of parameters that have values on this rank.
    """

    def __init__(self) -> None:
        self._base = take_peak()
        self.found: dict[str, float] = {}
        self.estimate: dict[str, list[float]] = {}
        self.share = 0.0

    def note(self, name: str) -> None:
        """Note what came since the last note."""
        self.found[name] = take_peak() - self._base

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module has been made."""
        self.note("made")
        real = [p for p in pl_module.parameters() if not isinstance(p, ShapeOnly)]
        self.share = sum(t.nbytes for p in real for t in (p, *scales_of(p))) / MIB

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A checkpoint has been read, if there is one."""
        self.note("resumed" if trainer.ckpt_path else "started")

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """The estimate is made in the first step."""
        if args[-1] == 1:
            self.estimate = trainer.strategy.report()["memory"]  # type: ignore[attr-defined]
            take_peak()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All steps have run."""
        self.note("trained")


class LanguageModel(LightningModule):
    """Trains a model of Hugging Face."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        """Return the loss."""
        return self.model(input_ids=batch[0], labels=batch[1], use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


def make_gpt(is_small: bool) -> LightningModule:
    width = 64 if is_small else 1024
    return GPT(context=CONTEXT, width=width, depth=8, heads=8, dropout=0.0)


def make_gpt2(is_small: bool) -> LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    width = 64 if is_small else 768
    sizes: Figures = {"n_positions": CONTEXT, "n_embd": width, "n_layer": 8, "n_head": 8}
    return LanguageModel(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)))


def make_llama(is_small: bool) -> LightningModule:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    width = 64 if is_small else 768
    heads: Figures = {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes: Figures = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 8}
    return LanguageModel(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)))


MODELS = {"gpt": make_gpt, "gpt2": make_gpt2, "llama": make_llama}


class Chain(LightningModule):
    """Blocks of square matrices, made where Lightning makes large models or in ``__init__``."""

    def __init__(self, width: int, depth: int, in_parts: bool) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.blocks: nn.Module | None = None
        if not in_parts:
            self.configure_model()

    def configure_model(self) -> None:
        """Make the layers."""
        if self.blocks is None:
            layers = (nn.Linear(self.width, self.width) for _ in range(self.depth))
            self.blocks = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return a loss."""
        assert self.blocks is not None
        loss: Tensor = self.blocks(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Quantized(LightningModule):
    """A 4-bit base with adapters, made from a folder of weights in bfloat16."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.model: Any = None

    def configure_model(self) -> None:
        """Make the layers, and load what this rank owns."""
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415
        from transformers import (  # noqa: PLC0415
            AutoConfig,
            AutoModelForCausalLM,
            BitsAndBytesConfig,
        )
        from transformers.integrations.bitsandbytes import (  # noqa: PLC0415
            replace_with_bnb_linear,
        )

        if self.model is not None:
            return
        config = AutoConfig.from_pretrained(self.path)
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        quantization = BitsAndBytesConfig(load_in_4bit=True, **options)
        replace_with_bnb_linear(base, ["lm_head"], quantization)
        load_weights(base, self.path)
        base.is_loaded_in_4bit = True
        self.model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        """Return the loss."""
        return self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for the adapters."""
        return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)


def write_base(path: str, is_small: bool) -> None:
    """Write the weights that :class:`Quantized` loads."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    sizes: Figures = {
        "hidden_size": 64 if is_small else 1024,
        "intermediate_size": 128 if is_small else 2816,
        "num_hidden_layers": 4 if is_small else 31,
        "num_attention_heads": 8,
        "vocab_size": 256 if is_small else VOCABULARY,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(path)


def fit(
    module: LightningModule,
    batch: Sequence[Tensor],
    options: Figures,
    num_ranks: int,
    max_steps: int,
    resume: str | None = None,
) -> tuple[Trainer, Peaks]:
    """Train on equal batches of as many microbatches as there are samples."""
    torch.set_num_threads(1)
    peaks = Peaks()
    trainer = quiet_trainer(
        devices=num_ranks,
        strategy=PipeOffloadStrategy(num_microbatches=len(batch[0]), **options),
        max_steps=max_steps,
        callbacks=[peaks],
    )
    samples = TensorDataset(*(part.repeat(4, *[1] * (part.dim() - 1)) for part in batch))
    trainer.fit(module, DataLoader(samples, len(batch[0])), ckpt_path=resume)
    return trainer, peaks


def of_all_ranks(trainer: Trainer, figures: Figures) -> list[Figures]:
    """Return the figures of all ranks, in the order of global ranks."""
    ranks: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(ranks, {"rank": trainer.global_rank, **figures})
    return ranks


def measure_estimate(model: str, schedule: str, is_small: bool) -> list[Figures]:
    """Train two ranks; return the estimates and what was taken."""
    torch.manual_seed(0)
    tokens = torch.randint(256, (8, CONTEXT))
    options = {"schedule": schedule}
    trainer, peaks = fit(MODELS[model](is_small), [tokens, tokens], options, 2, 3)
    rank = trainer.global_rank if "_v" in schedule else 1 - trainer.global_rank
    said = {name: of_ranks[rank] / MIB for name, of_ranks in peaks.estimate.items()}
    taken = peaks.found["trained"]
    figures = {**said, "taken": taken, "said / taken": said["device"] / taken}
    return of_all_ranks(trainer, {"model": model, "schedule": schedule, **figures})


def measure_build(is_small: bool) -> list[Figures]:
    """Make a module on four ranks; return what each took, and what it may."""
    width = 64 if is_small else 2048
    module = Chain(width, 8 if is_small else 96, in_parts=True)
    trainer, peaks = fit(module, [torch.ones(4, width)], {}, 4, 1)
    allowed = peaks.share + 4 * width**2 / MIB + SLACK
    figures = {"taken": peaks.found["made"], "share": peaks.share, "allowed": allowed}
    return of_all_ranks(trainer, figures)


def measure_quantize(path: str) -> list[Figures]:
    """Make a 4-bit base on four ranks; return what each took, and what it may."""
    import bitsandbytes  # noqa: F401, PLC0415 - imports are not counted
    import peft  # noqa: F401, PLC0415
    from transformers import LlamaForCausalLM  # noqa: F401, PLC0415

    module = Quantized(path)
    trainer, peaks = fit(module, [torch.zeros(4, 8, dtype=torch.long)], {}, 4, 1)
    blocks = module.model.base_model.model.model.layers
    block = (
        sum(2 * num_unpacked_values(p) for p in blocks[0].parameters() if not p.requires_grad) / MIB
    )
    allowed = 2 * peaks.share + block + SLACK
    figures = {"taken": peaks.found["made"], "share": peaks.share, "allowed": allowed}
    return of_all_ranks(trainer, {**figures, "block": block})


def measure_checkpoint(form: str, path: str, resumes: bool, is_small: bool) -> list[Figures]:
    """Train four ranks and save, or resume; return what each took."""
    width = 64 if is_small else 1536
    module = Chain(width, 8 if is_small else 64, in_parts=False)
    options = {"save_distributed_checkpoint": form == "folder"}
    steps, resume = (4, path) if resumes else (2, None)
    trainer, peaks = fit(module, [torch.ones(4, width)], options, 4, steps, resume)
    if not resumes:
        trainer.save_checkpoint(path)
        peaks.note("saved")
    return of_all_ranks(trainer, {"form": form, **peaks.found})


def print_table(rows: Sequence[Figures]) -> None:
    """Print figures in Markdown."""
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        cells = (f"{v:.3g}" if isinstance(v, float) and v < 10 else v for v in row.values())
        print(f"| {' | '.join(f'{v:.1f}' if isinstance(v, float) else str(v) for v in cells)} |")


def read_arguments(line: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["estimate", "build", "quantize", "checkpoint"])
    parser.add_argument("--model", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--schedule", nargs="+", default=["zb_h1", "zb_v"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--resumes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    return parser.parse_args(line)


def measure(given: argparse.Namespace) -> list[Figures]:
    """Measure one run on this rank."""
    if given.what == "estimate":
        return measure_estimate(given.model[0], given.schedule[0], given.small)
    if given.what == "build":
        return measure_build(given.small)
    if given.what == "quantize":
        return measure_quantize(given.path)
    return measure_checkpoint(given.form, given.path, given.resumes, given.small)


def runs_of(given: argparse.Namespace, folder: str) -> Iterable[list[str]]:
    """Yield the arguments of each run."""
    if given.what == "estimate":
        for model, schedule in product(given.model, given.schedule):
            yield ["--model", model, "--schedule", schedule]
    elif given.what == "build":
        yield []
    elif given.what == "quantize":
        write_base(folder, given.small)
        yield ["--path", folder]
    else:
        for form, more in product(("file", "folder"), ([], ["--resumes"])):
            yield ["--form", form, "--path", os.path.join(folder, f"{form}.ckpt"), *more]


def main(line: Sequence[str] | None = None) -> int:
    """Measure each run in processes of its own, and print what was found."""
    given = read_arguments(line)
    if given.results:
        write_results(lambda: measure(given), given.results)
        return 0
    small = ["--small"] * given.small
    environment = KEEP_NOTHING if given.what == "estimate" else {}
    is_over: Callable[[Figures], bool] = {
        "estimate": lambda row: abs(row["said / taken"] - 1) > MOST_OFF and not given.small,
        **dict.fromkeys(["build", "quantize"], lambda row: row["taken"] > row["allowed"]),
        "checkpoint": lambda row: False,
    }[given.what]
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for arguments in runs_of(given, folder):
            rows = run_ranks("memory", given.what, *arguments, *small, environment=environment)
            print_table(rows)
            status |= any(map(is_over, rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
