"""What offloading activations costs and saves, on one accelerator.

    python examples/benchmarks/offload_gpu.py --hidden 4096 8192 --sequence 4096 8192 16384 32768

One rank of a longer pipeline: its own stages of a GPT in bfloat16 (attention through SDPA, so flash
attention where the device has it) and its own part of the plan. The other ranks are not there.
Their blocks have shapes and no memory, and what they send arrives as long after this rank has sent
what it follows from as the plan says; so a rank that its copies hold up is late to the end.

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

from lightning_pipeoffload.demos.gpt import GPT
from lightning_pipeoffload.runtime.activation_memory import ActivationMemory
from lightning_pipeoffload.runtime.activation_store import OffloadSettings
from lightning_pipeoffload.runtime.copy_speed import CopySpeed, measure_copy_speed
from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.host_memory import HostBudget, HostMemory, HostMemoryError
from lightning_pipeoffload.runtime.ledger import Ledger
from lightning_pipeoffload.runtime.measured_costs import StageCosts, measure_costs
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.pipeline import CutSettings, Pipeline
from lightning_pipeoffload.runtime.streams import make_lanes
from lightning_pipeoffload.runtime.timing import ActionTimer, DeviceClock, HostClock
from lightning_pipeoffload.schedule import (
    COMPUTE,
    Action,
    Costs,
    Kind,
    Schedule,
    build,
    estimated_copy_ratio,
    lower,
    simulate,
)
from lightning_pipeoffload.schedule.copy_ratio import layer_flops
from lightning_pipeoffload.schedule.messages import send_of

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

    @property
    def name(self) -> str:
        """For the table."""
        return "uniform, save_on_cpu" if self.save_on_cpu else self.schedule


VARIANTS = [
    Variant("uniform"),
    *(Variant(name, how) for how in ("none", "cheap") for name in ("po_h", "po_f")),
    Variant("uniform", "cheap"),
    Variant("uniform", "full"),
    Variant("uniform", save_on_cpu=True),
    Variant("interleaved_1f1b"),
]


class Model(nn.Module):
    """A GPT with a step; ``around_blocks`` makes what each block runs in."""

    def __init__(
        self, size: Size, around_blocks: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        heads = size.hidden // size.head_size
        depth, options = size.num_stages, {"heads": heads, "dropout": 0.0}
        with torch.device("meta"):
            self.gpt = GPT(VOCABULARY, size.sequence, size.hidden, depth, **options)
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


class AbsentNeighbours:
    """A transport whose other end is a plan: what it says that they send comes when it says.

    Args:
        delays: for a RECV, what this rank sends before it, and the seconds from there; for those
            without, the seconds from the start of the step.
        device: of the tensors.
    """

    def __init__(
        self, delays: dict[Action, tuple[Action | None, float]], device: torch.device
    ) -> None:
        self._delays = delays
        self._device = device
        self._clock = HostClock() if device.type == "cpu" else DeviceClock()
        self._specs: dict[Action, list[TensorSpec]] = {}
        self.start_step()

    def start_step(self) -> None:
        """Begin to count time."""
        self._sent: dict[Action, Any] = {}
        self._started = self._clock.now()
        self._started_on_host = time.perf_counter()

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Remember what it looks like."""
        self._specs[receive] = specs

    def wait(self, receive: Action) -> list[Tensor]:
        """Wait until it would be here."""
        cause, delay = self._delays.get(receive, (None, 0.0))
        if cause is not None:
            delay += self._clock.seconds(self._started, self._sent[cause])
        time.sleep(max(0.0, self._started_on_host + delay - time.perf_counter()))
        specs = self._specs.pop(receive)
        return [1e-3 * torch.randn(s.shape, dtype=s.dtype, device=self._device) for s in specs]

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Note when."""
        self._sent[send] = self._clock.now()

    def release(self, send: Action) -> None:
        """Nothing is kept."""

    def finish_step(self) -> None:
        """Nothing is kept."""


def delays_of(plan: Schedule, rank: int, costs: Costs) -> dict[Action, tuple[Action | None, float]]:
    """Say how long after what each message for a rank comes, as the plan has it."""
    ends = {e.action: e.end for e in simulate(plan, costs).events if e.action.kind in COMPUTE}
    sends = [action for action in plan[rank] if action.kind in (Kind.SEND_F, Kind.SEND_B)]
    receives = [action for action in plan[rank] if action.kind in (Kind.RECV_F, Kind.RECV_B)]
    delays: dict[Action, tuple[Action | None, float]] = {}
    for receive in receives:
        cause = _cause(receive, sends)
        since = ends[_computed(cause, ends)] if cause else 0.0
        delays[receive] = cause, ends[_computed(send_of(receive), ends)] - since
    return delays


def _cause(receive: Action, sends: Sequence[Action]) -> Action | None:
    """Return the last message of this microbatch that the rank has sent before."""
    _, stage, microbatch = receive
    ours = [send for send in sends if send.microbatch == microbatch]
    down = [send for send in ours if send.kind is Kind.SEND_F]
    if receive.kind is Kind.RECV_F:
        return max((send for send in down if send.stage < stage), default=None)
    up = [send for send in ours if send.kind is Kind.SEND_B and send.stage > stage]
    return min(up) if up else max(down, default=None)


def _computed(send: Action, ends: dict[Action, float]) -> Action:
    """Return the action whose result a message is."""
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.BW)
    return next(action for k in kinds if (action := send._replace(kind=k)) in ends)


class Rehearsal:
    """One rank, its model and its memory."""

    def __init__(self, size: Size, variant: Variant) -> None:
        self.size = size
        self.variant = variant
        pin = size.device.type != "cpu"
        around = partial(save_on_cpu, pin_memory=pin) if variant.save_on_cpu else nullcontext
        self.model = Model(size, around)
        self.stage_ranks = tuple(stage % size.num_ranks for stage in range(size.num_stages))
        cut = CutSettings(self.stage_ranks, "gpt.blocks", "even", variant.recompute)
        own = [stage for stage, rank in enumerate(self.stage_ranks) if rank == size.rank]
        self.model.allocate(own, size.device)
        self.pipeline = Pipeline(self.model, size.rank, cut, size.device)
        budget = HostBudget.share_of_machine(1)
        settings = OffloadSettings(make_lanes(size.device), HostMemory(pin, budget))
        self.memory = ActivationMemory(settings)

    def run(self, plan: Schedule, costs: Costs | None, num_steps: int) -> float:
        """Run steps of a plan after one to warm up; return the seconds of one.

        Args:
            plan: lowered.
            costs: say when the neighbours send; None: they are always ahead.
            num_steps: to measure.
        """
        size, step = self.size, self.model.step
        delays = delays_of(plan, size.rank, costs) if costs else {}
        transport = AbsentNeighbours(delays, size.device)
        shape = plan.num_microbatches, size.sequence
        tokens = torch.randint(VOCABULARY, shape, device=size.device)
        microbatches = self.pipeline.make_microbatches(tokens, 1, step, "train", 0)
        self.pipeline.commit()
        timer = ActionTimer(size.device)
        self.executor = Executor(size.rank, self.pipeline.stages, transport, timer, self.memory)
        seconds = []
        for _ in range(num_steps + 1):
            self.executor.timer = ActionTimer(size.device)
            _synchronize()
            started = time.perf_counter()
            transport.start_step()
            self.executor.run(plan, microbatches)
            _synchronize()
            seconds.append(time.perf_counter() - started)
            self.model.zero_grad(set_to_none=False)
        return median(seconds[1:])

    def close(self) -> None:
        """Give the kernels back that watch the model."""
        self.pipeline.detach()

    def measure_stages(self, speed: CopySpeed) -> dict[int, StageCosts]:
        """Run microbatches one after the other; return what each stage of this rank costs."""
        self.run(lower(self._one_by_one()), None, 1)
        return dict(measure_costs(self.executor, speed).stages)

    def _one_by_one(self) -> Schedule:
        def actions(rank: int) -> Iterator[Action]:
            own = [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]
            for microbatch in range(CALIBRATION_MICROBATCHES):
                yield from (Action(Kind.F, stage, microbatch) for stage in own)
                for stage in reversed(own):
                    yield Action(Kind.B, stage, microbatch)
                    yield Action(Kind.W, stage, microbatch)

        return Schedule.of(map(actions, range(self.size.num_ranks)), "one by one")


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
    rehearsal = Rehearsal(size, variant)
    try:
        measured = rehearsal.measure_stages(speed)
        stage, costs = _mean(measured), _costs_of_all(size, measured, speed)
        plan = lower(_schedule(size, variant, costs))
        timeline = simulate(plan, costs)
        promised = timeline.peak_memory[size.rank], timeline.span[size.rank]
        line = Line(size, variant, stage, _formula(size, stage, speed), *promised)
        rehearsal.memory.ledger = Ledger()
        _reset_peak()
        line = replace(line, step_seconds=rehearsal.run(plan, costs, num_steps))
    except (torch.OutOfMemoryError, HostMemoryError) as error:
        print(f"{variant.name}: {str(error).splitlines()[0]}")
        return line
    finally:
        rehearsal.close()
    ledger = rehearsal.memory.ledger
    peaks = {"peak": ledger.peak_device_bytes, "host_peak": ledger.peak_host_bytes}
    return replace(line, allocated=_peak_allocated(), **peaks)


def _mean(stages: dict[int, StageCosts]) -> StageCosts:
    names = StageCosts.__dataclass_fields__
    return StageCosts(**{n: fmean(getattr(c, n) for c in stages.values()) for n in names})


def _costs_of_all(size: Size, own: dict[int, StageCosts], speed: CopySpeed) -> Costs:
    """Return the costs of the pipeline: other ranks' stages are as the mean of this one's."""
    stages = [vars(own.get(index, _mean(own))) for index in range(size.num_stages)]
    per_stage = {name: [stage[name] for stage in stages] for name in stages[0]}
    return Costs(**per_stage, copy_lanes=speed.num_lanes)


def _computing(stage: StageCosts) -> float:
    return stage.forward + stage.backward_input + stage.backward_weight


def _schedule(size: Size, variant: Variant, costs: Costs) -> Schedule:
    planned = {"costs": costs} if variant.schedule.startswith("po_") else {}
    numbers = size.num_ranks, size.num_microbatches, size.num_chunks
    return build(variant.schedule, *numbers, **planned)


def _formula(size: Size, stage: StageCosts, speed: CopySpeed) -> float:
    compute_rate = layer_flops(size.hidden, size.sequence) / _computing(stage)
    copy_rate = 2 / (1 / speed.to_host + 1 / speed.to_device)
    return estimated_copy_ratio(size.hidden, size.sequence, compute_rate, copy_rate)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


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
    plain = [line.step_seconds for line in lines if line.variant == Variant("uniform")]
    usual = [line.planned_peak for line in lines if line.variant == VARIANTS[-1]]
    for line in lines:
        cells = [
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
        yield f"| {' | '.join(cells)} |"


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
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
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
