"""The head: memory of a loss over chunks, and a last stage that has the head alone.

    python -m examples.benchmarks.chunked_loss measure
    python -m examples.benchmarks.chunked_loss plan

* ``measure``: what the last of two ranks takes in training, in MiB, next to what the report said
  before the first step (as ``memory estimate`` does), with whole logits and with chunks. The exit
  status is 1 where the two are more than 10 % apart for chunks.
* ``plan``: by counted operations and bytes of shapes, 4096 tokens in bf16, 8 ranks, 16 microbatches
  of ZB-H1: the busiest rank's work over the mean, where the last stage has blocks and as it is cut;
  GiB of the last rank's activations with whole logits, with the head's weight gradient in B, and
  with 16 chunks; and the simulated time from one step to the next over the mean rank's work, of
  each of these.

With ``--small`` models have a few MiB, to see that it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from examples.benchmarks.harness import run_ranks, write_results
from examples.benchmarks.memory import KEEP_NOTHING, MIB, Figures, fit, of_all_ranks, print_table
from lightning_pipeoffload import chunked_loss
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds
from lightning_pipeoffload.runtime.cut import CutSettings, SegmentCosts, Stage, cut
from lightning_pipeoffload.runtime.making import making_parameter_shapes
from lightning_pipeoffload.runtime.run import Pipeline, split_into_microbatches
from lightning_pipeoffload.schedule import Costs, build, lower
from lightning_pipeoffload.schedule.simulation import steady_period

CHUNKS = (0, 1, 4, 16)
MOST_OFF = 0.1
NUM_RANKS, NUM_MICROBATCHES, TOKENS = 8, 16, 4096
GIB = 1 << 30


def loss_of(head: nn.Module, hidden: Tensor, tokens: Tensor, num_chunks: int) -> Tensor:
    """Return the loss of the next tokens, over chunks; 0: over all of them at once."""
    labels = pad(tokens[:, 1:], (0, 1), value=-100)
    if num_chunks:
        return chunked_loss(head, hidden, labels, cross_entropy, num_chunks)
    return cross_entropy(head(hidden).flatten(0, 1), labels.flatten())


class Chunked(LightningModule):
    """A few blocks, and a head that is larger than all of them."""

    def __init__(self, num_chunks: int, classes: int, width: int) -> None:
        super().__init__()
        self.num_chunks, self.sizes = num_chunks, (classes, width)
        self.blocks: nn.Module | None = None

    def configure_model(self) -> None:
        """Make the layers, of each rank its own, within what is counted."""
        if self.blocks is not None:
            return
        classes, width = self.sizes
        self.embed, self.head = nn.Embedding(classes, width), nn.Linear(width, classes, bias=False)
        layers = ([nn.Linear(width, width), nn.GELU()] for _ in range(8))
        self.blocks = nn.Sequential(*(nn.Sequential(*each) for each in layers))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        assert self.blocks is not None
        hidden = self.blocks(self.embed(batch[0]))
        return loss_of(self.head, hidden, batch[0], self.num_chunks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer that takes no memory of its own."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def measure(num_chunks: int, schedule: str, is_small: bool) -> list[Figures]:
    """Train two ranks; return what the last one takes, and what was planned."""
    torch.manual_seed(0)
    classes, width, tokens = (512, 16, 64) if is_small else (65536, 512, 512)
    batch = [torch.randint(classes, (2, tokens))]
    options = {"schedule": schedule, "split": [4, 4]}
    trainer, peaks = fit(Chunked(num_chunks, classes, width), batch, options, 2, 3)
    planned = {name: of_ranks[1] / MIB for name, of_ranks in peaks.estimate.items()}
    names = "activations", "workspace", "device"
    logits = 4 * classes * tokens / MIB
    figures = {
        "chunks": num_chunks or "whole",
        "schedule": schedule,
        "logits": logits,
        **{name: planned[name] for name in names},
        "taken": peaks.found["trained"],
        "planned / taken": planned["device"] / peaks.found["trained"],
    }
    return of_all_ranks(trainer, figures)


class LanguageModel(LightningModule):
    """A model of Hugging Face with a loss over chunks."""

    def __init__(self, model: Any, num_chunks: int) -> None:
        super().__init__()
        self.model, self.num_chunks = model, num_chunks

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return loss_of(self.model.lm_head, hidden, tokens, self.num_chunks)


def make_models(is_small: bool) -> dict[str, Any]:
    """Return the makers of models, by name."""
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    if is_small:
        sizes = [(64, 128, 12, 4, 2, 2048, True)] * 3
    else:
        sizes = [
            (1536, 8960, 28, 12, 2, 151936, True),
            (2048, 8192, 16, 32, 8, 128256, True),
            (4096, 14336, 32, 32, 8, 128256, False),
        ]
    names = "Qwen2.5-1.5B", "Llama-3.2-1B", "Llama-3.1-8B"
    kinds = (Qwen2Config, Qwen2ForCausalLM), *[(LlamaConfig, LlamaForCausalLM)] * 2
    made = {}
    for name, (config, kind), each in zip(names, kinds, sizes, strict=True):
        keys = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        more = "num_key_value_heads", "vocab_size", "tie_word_embeddings"
        options: Figures = dict(zip((*keys, *more), each, strict=True))
        found = config(max_position_embeddings=TOKENS, attn_implementation="sdpa", **options)
        made[name] = lambda kind=kind, found=found: kind(found)
    return made


def period_of(costs: SegmentCosts, stages: Sequence[Stage]) -> float:
    """Return the time from one step to the next, in that of an average block's F."""
    kinds = costs.forward, costs.backward_input, costs.backward_weight
    f, b, w = ([sum(kind[n] for n in stage.segments) for stage in stages] for kind in kinds)
    return steady_period(build("zb_h1", NUM_RANKS, NUM_MICROBATCHES), Costs(f, b, w), False)


def plan(make: Any, num_chunks: int, head_weight_grad: str, is_small: bool) -> Figures:
    """Return the busiest rank's share and the last rank's activations, by shapes alone."""
    with making_parameter_shapes():
        module = LanguageModel(make().bfloat16(), num_chunks)
    settings = CutSettings((*range(NUM_RANKS),), head_weight_grad=head_weight_grad)
    pipeline = Pipeline(module, 0, settings, torch.device("cpu"))
    tokens = torch.zeros(1, 256 if is_small else TOKENS, dtype=torch.long)
    step = lambda part, _: module.training_step(part, 0)  # noqa: E731
    (part,) = split_into_microbatches(pipeline, tokens, 1, step, "train", 0)
    costs = pipeline.cut.segment_costs
    whole = replace(costs, impossible=costs.impossible | {len(pipeline.chain)})
    busiest, periods = [], []
    for each in (whole, costs):
        stages = cut(pipeline.chain, each, settings.stage_ranks)
        loads = [sum(each.work[segment] for segment in stage.segments) for stage in stages]
        busiest.append(max(loads) / (sum(loads) / len(loads)))
        periods.append(period_of(each, stages))
    needs = MemoryNeeds.of(pipeline, part)
    ranks = needs.needs_by_rank(lower(build("zb_h1", NUM_RANKS, NUM_MICROBATCHES)))
    pipeline.detach()
    return {
        "with blocks": busiest[0],
        "as cut": busiest[1],
        "blocks of the last": len(pipeline.cut.stages[-1].blocks),
        "GiB": (ranks[-1].activations + ranks[-1].workspace) / GIB,
        "periods": periods,
        "work": NUM_MICROBATCHES * sum(costs.work) / NUM_RANKS,
    }


def print_plans(is_small: bool) -> None:
    """Print the table of models."""
    rows, times = [], []
    for name, make in make_models(is_small).items():
        found, at_once = (plan(make, 0, head, is_small) for head in ("W", "B"))
        chunked = plan(make, 16, "W", is_small)
        more = {"GiB, head in B": at_once["GiB"], "GiB, 16 chunks": chunked["GiB"]}
        (with_blocks, as_cut), work = found.pop("periods"), found.pop("work")
        rows.append({"model": name, **found, **more})
        periods = {
            "with blocks": with_blocks,
            "as cut": as_cut,
            "head in B": at_once["periods"][1],
            "16 chunks": chunked["periods"][1],
        }
        times.append({"model": name, **{what: each / work for what, each in periods.items()}})
    print_table(rows)
    print()
    print_table(times)


def main(line: Sequence[str] | None = None) -> int:
    """Measure each run in processes of its own, or plan; print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["measure", "plan"])
    parser.add_argument("--chunks", nargs="+", type=int, default=CHUNKS)
    parser.add_argument("--schedule", nargs="+", default=["zb_h1", "1f1b"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--results", help=argparse.SUPPRESS)
    given = parser.parse_args(line)
    if given.results:
        write_results(
            lambda: measure(given.chunks[0], given.schedule[0], given.small), given.results
        )
        return 0
    if given.what == "plan":
        print_plans(given.small)
        return 0
    rows: list[Figures] = []
    for schedule in given.schedule:
        for num_chunks in given.chunks:
            words = [
                "--chunks",
                str(num_chunks),
                "--schedule",
                schedule,
                *["--small"] * given.small,
            ]
            ranks = run_ranks("chunked_loss", "measure", *words, environment=KEEP_NOTHING)
            rows.append(next(row for row in ranks if row["rank"] == 0))  # has the last stage
    print_table(rows)
    chunked = [row for row in rows if row["chunks"] != "whole"]
    return int(any(abs(row["planned / taken"] - 1) > MOST_OFF for row in chunked))


if __name__ == "__main__":
    sys.exit(main())
