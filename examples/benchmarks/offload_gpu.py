"""What offloading activations costs and saves, on one accelerator.

    python -m examples.benchmarks.offload_gpu --hidden 4096 8192 --sequence 4096 8192 16384 32768

One rank of a longer pipeline runs its stages of a GPT in bfloat16 (attention through SDPA, so flash
attention where the device has it). Blocks of the other ranks have shapes and no memory, and what
those ranks send arrives when the plan says. ``pipeoffload-rehearse`` does the same for any model.

Each line is measured in the same way: what F, B and W of a stage take is measured first, and copies
in both directions; a plan is made from that, for which the neighbours' delays are simulated; then
whole steps run. Medians; the first step, which allocates, is left out. No optimizer runs.

* "uniform", "po_h", "po_f": PipeOffload's block with none, half and all of its stages offloaded.
* "interleaved_1f1b": what most people run.
* "save_on_cpu": torch.autograd.graph.save_on_cpu(pin_memory=True) around each block.
* recompute "cheap": norms and activations; "full": activation checkpointing of each block.

k is (offload + reload) / (F + B + W): measured; and by PipeOffload's formula 1, which counts bytes
and operations of a layer, with the rates that were measured here. "peak" is of saved tensors, as
the ledger counts them, and "planned" what the plan promises of it; save_on_cpu keeps its own, so
there compare "allocated", which is everything the device's allocator held. The share "of 1F1B-I" is
of planned peaks, since that schedule itself may not fit.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

from lightning_pipeoffload.cli.rehearsal import Rehearsal
from lightning_pipeoffload.demos import GPT
from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.device import make_lanes
from lightning_pipeoffload.runtime.measure import CopySpeed, StageCosts, measure_copy_speed
from lightning_pipeoffload.runtime.memory import (
    HostBudget,
    HostMemory,
    HostMemoryError,
    OffloadSettings,
)
from lightning_pipeoffload.runtime.run import ActivationMemory, Pipeline, split_into_microbatches
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    build,
    estimated_copy_ratio,
    layer_train_flops,
    lower,
    offload_activations,
    simulate,
)

VOCABULARY = 256
CALIBRATION_MICROBATCHES = 4


@dataclass(frozen=True)
class Size:
    """A model, and a pipeline of which one rank runs here."""

    hidden: int
    sequence: int
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    rank: int
    head_size: int
    device: torch.device
    least_host_bytes: int = 0

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, of one layer each."""
        return self.num_ranks * self.num_chunks


@dataclass(frozen=True)
class Variant:
    """How to run: a line of the table."""

    schedule: str
    recompute: str = "none"
    save_on_cpu: bool = False
    offloads: bool = False  # all activations, where the schedule itself has no copies

    @property
    def name(self) -> str:
        """For the table."""
        if self.offloads:
            return f"{self.schedule}, all offloaded"
        return "uniform, save_on_cpu" if self.save_on_cpu else self.schedule


class Model(nn.Module):
    """A GPT with a step; ``around_blocks`` makes what each block runs in."""

    def __init__(
        self, size: Size, around_blocks: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        heads = size.hidden // size.head_size
        sizes = VOCABULARY, size.sequence, size.hidden, size.num_stages
        with torch.device("meta"):
            self.gpt = GPT(*sizes, heads=heads, dropout=0.0)
        self.bfloat16()
        self.around_blocks = around_blocks

    def allocate(self, blocks: Sequence[int], device: torch.device) -> None:
        """Give memory to some blocks, and to what is around the blocks."""
        gpt = self.gpt
        around = [gpt.token_embedding, gpt.position_embedding, gpt.final_norm, gpt.head]
        for module in (*around, *(gpt.blocks[index] for index in blocks)):
            module.to_empty(device=device)
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                nn.init.constant_(parameter, float("norm.weight" in name))
            if not parameter.is_meta and parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def step(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from itself and those before it."""
        gpt = self.gpt
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = gpt.token_embedding(tokens) + gpt.position_embedding(positions)
        for block in gpt.blocks:
            with self.around_blocks():
                x = block(x)
        logits = gpt.head(gpt.final_norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens.flatten())


def rehearse(size: Size, variant: Variant) -> Rehearsal:
    """Make the rank, its model and its memory."""
    pin = size.device.type != "cpu"
    around = partial(save_on_cpu, pin_memory=pin) if variant.save_on_cpu else nullcontext
    model = Model(size, around)
    stage_ranks = few_microbatches(size, variant).placement
    cut = CutSettings(stage_ranks, "gpt.blocks", "even", variant.recompute)
    own = [stage for stage, rank in enumerate(stage_ranks) if rank == size.rank]
    model.allocate(own, size.device)
    pipeline = Pipeline(model, size.rank, cut, size.device)

    def cut_batch(count: int) -> list[Microbatch]:
        tokens = torch.randint(VOCABULARY, (count, size.sequence), device=size.device)
        return split_into_microbatches(
            pipeline, tokens, 1, lambda part, _: model.step(part), "train", 0
        )

    budget = HostBudget.share_of_machine(1)
    if budget is not None and budget.num_bytes < size.least_host_bytes:
        budget = HostBudget.configured(size.least_host_bytes)
    host = HostMemory(pin, budget)
    settings = OffloadSettings(size.device, make_lanes(size.device), host)
    return Rehearsal(pipeline, ActivationMemory(settings), cut_batch)


def few_microbatches(size: Size, variant: Variant) -> Schedule:
    """Return what stages are measured by."""
    name = variant.schedule if variant.schedule == "zb_v" else "uniform"
    return build(name, size.num_ranks, CALIBRATION_MICROBATCHES, size.num_chunks)


VARIANTS = [
    Variant("uniform"),
    *(Variant(name, how) for how in ("none", "cheap") for name in ("po_h", "po_f")),
    Variant("uniform", "cheap"),
    Variant("uniform", "full"),
    Variant("uniform", save_on_cpu=True),
    Variant("interleaved_1f1b"),
]


@dataclass(frozen=True)
class Line:
    """What one variant gave; without step_seconds it did not fit into the memory."""

    size: Size
    variant: Variant
    stage: StageCosts
    formula: float
    planned_peak: float
    planned_seconds: float
    step_seconds: float | None = None
    peak: int = 0
    allocated: int = 0
    host_peak: int = 0

    @property
    def k(self) -> float:
        """Measured."""
        return (self.stage.offload + self.stage.reload) / _computing(self.stage)


def measure(size: Size, variant: Variant, speed: CopySpeed, num_steps: int) -> Line | None:
    """Measure one line of the table; None where not even one stage fits into the memory."""
    line = None
    _reset_peak()
    rehearsal = rehearse(size, variant)
    try:
        measured = rehearsal.measure_stages(few_microbatches(size, variant), speed)
        stage, costs = _mean(measured), _costs_of_all(size, measured, speed)
        plan = lower(_schedule(size, variant, costs))
        timeline = simulate(plan, costs)
        promised = timeline.peak_memory[size.rank], timeline.span[size.rank]
        line = Line(size, variant, stage, _formula(size, stage, speed), *promised)
        rehearsal.memory.reset_peaks()
        _reset_peak()
        line = replace(line, step_seconds=rehearsal.run(plan, costs, num_steps))
    except (torch.OutOfMemoryError, HostMemoryError) as error:
        print(f"{variant.name}: {str(error).splitlines()[0]}")
        return line
    finally:
        rehearsal.pipeline.detach()
    ledger = rehearsal.memory.ledger
    return replace(
        line,
        allocated=_peak_allocated(),
        peak=ledger.peak_device_bytes,
        host_peak=ledger.peak_host_bytes,
    )


def _mean(stages: dict[int, StageCosts]) -> StageCosts:
    return StageCosts._make(map(fmean, zip(*stages.values(), strict=True)))


def _costs_of_all(size: Size, own: dict[int, StageCosts], speed: CopySpeed) -> Costs:
    """Return the costs of the pipeline: other ranks' stages are as the mean of this one's."""
    stages = [own.get(index, _mean(own))._asdict() for index in range(size.num_stages)]
    per_stage: dict[str, Any] = {n: [stage[n] for stage in stages] for n in stages[0]}
    return Costs(**per_stage, copy_lanes=speed.num_lanes)


def _computing(stage: StageCosts) -> float:
    return stage.forward + stage.backward_input + stage.backward_weight


def _schedule(size: Size, variant: Variant, costs: Costs) -> Schedule:
    numbers = size.num_ranks, size.num_microbatches, size.num_chunks
    planned = costs if variant.schedule.startswith("po_") else None
    schedule = build(variant.schedule, *numbers, costs=planned)
    return offload_activations(schedule, costs, 1.0)[0] if variant.offloads else schedule


def _formula(size: Size, stage: StageCosts, speed: CopySpeed) -> float:
    compute_rate = layer_train_flops(size.hidden, size.sequence) / _computing(stage)
    copy_rate = 2 / (1 / speed.to_host + 1 / speed.to_device)
    return estimated_copy_ratio(size.hidden, size.sequence, compute_rate, copy_rate)


def _reset_peak() -> None:
    if torch.accelerator.is_available():
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def _peak_allocated() -> int:
    if not torch.accelerator.is_available():
        return 0
    return torch.accelerator.max_memory_allocated()


HEADER = (
    "hidden", "sequence", "plan", "recompute", "k", "k by formula", "MiB of a stage", "step, ms",
    "over its plan", "over uniform", "peak, GiB", "planned", "of 1F1B-I", "allocated, GiB",
    "host, GiB",
)  # fmt: skip


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of one size, in Markdown."""
    for line in cells(lines):
        yield f"| {' | '.join(line)} |"


def cells(lines: Sequence[Line]) -> Iterator[list[str]]:
    """Yield what stands below each word of the header, for each line of one size."""
    plain = [line.step_seconds for line in lines if line.variant == Variant("uniform")]
    usual = [line.planned_peak for line in lines if line.variant == VARIANTS[-1]]
    for line in lines:
        yield [
            str(line.size.hidden),
            str(line.size.sequence),
            line.variant.name,
            line.variant.recompute,
            f"{line.k:.2f}",
            f"{line.formula:.2f}",
            f"{line.stage.activation / 2**20:.1f}",
            "out of memory" if line.step_seconds is None else f"{line.step_seconds * 1e3:.1f}",
            _ratio(line.step_seconds, [line.planned_seconds]),
            _ratio(line.step_seconds, plain),
            f"{line.peak / 2**30:.3f}",
            f"{line.planned_peak / 2**30:.3f}",
            _ratio(line.planned_peak, usual),
            f"{line.allocated / 2**30:.2f}",
            f"{line.host_peak / 2**30:.3f}",
        ]


def _ratio(value: float | None, of: Sequence[float | None]) -> str:
    return f"{value / of[0]:.3f}" if value is not None and of and of[0] else "-"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What offloading costs and saves.")
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--sequence", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    speed = measure_copy_speed(device)
    print(
        f"{device}, torch {torch.__version__}: {speed.to_host / 1e9:.1f} GB/s to the host, "
        f"{speed.to_device / 1e9:.1f} back; both at once take {speed.overlap:.2f} of one after the "
        f"other\n"
    )
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    pipeline = options.ranks, options.chunks, options.microbatches, options.rank
    for hidden in options.hidden:
        for sequence in options.sequence:
            size = Size(hidden, sequence, *pipeline, options.head_size, device)
            lines = [measure(size, variant, speed, options.steps) for variant in VARIANTS]
            print("\n".join(table([line for line in lines if line])), flush=True)


if __name__ == "__main__":
    main()
