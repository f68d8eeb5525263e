"""What tensor and sequence parallelism inside a block cost the host in F, B and W.

Pre-norm blocks of a few features, so that what is left is Python and torch's own bookkeeping, under
the plan of torch's recipe: SequenceParallel norms, Colwise and Rowwise products. First two
processes over gloo compare all gradients with those of one process, count collectives, and measure
CPU time of the thread, in which waiting does not count; then a group of torch's that does not
communicate leaves dispatch alone. "torch" is ``parallelize_module`` with autograd's own backward,
"ours" has weight gradients in W. "Fewer guards" leaves those on hooks and placements out.

    python -m examples.benchmarks.tensor_parallel_host

The cases take turns, step by step; medians over the steps, in microseconds of a block.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore  # private: torch has no other

from examples.benchmarks.weight_split import Engine, fused, ours
from lightning_pipeoffload.runtime import PATCHES
from lightning_pipeoffload.runtime.compiled import splitting_regions
from lightning_pipeoffload.runtime.shapes import has_partial_gradient, is_shard, sharding_of
from lightning_pipeoffload.runtime.tensor_parallel import (
    gather_whole,
    replace_dtensors,
    synchronous_collectives,
)
from lightning_pipeoffload.runtime.weight_grad import (
    WeightGradQueue,
    deferring_kernels,
    mark_deferrable,
)

SIZE = 2  # tensor ranks
NUM_BLOCKS = 4
BATCH, TOKENS, WIDTH, HEADS = 2, 16, 32, 4
PHASES = ("F", "B", "W")


class Attention(nn.Module):
    """Causal self-attention; under the plan it has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix ``[batch, tokens, width]`` along tokens."""
        query, key, value = (
            product(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for product in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.w2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token of ``[batch, tokens, width]``."""
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A pre-norm block as Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, tokens, width]`` to the same shape; under the plan, a shard of tokens."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def new_block_class() -> type[Block]:
    """Return a class like Block with code of its own, by which torch keeps what it compiles."""
    forward: Any = Block.forward
    code = FunctionType(forward.__code__.replace(), forward.__globals__)
    return type("OwnBlock", (Block,), {"forward": code})


def parallelize(block: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the plan of torch's recipe for sequence parallelism."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": gathered,
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    parallelize_module(block, mesh, plan)


class Case:
    """Blocks, their input and the gradient of their output: of a tensor rank, its part of tokens.

    Args:
        mesh: The tensor ranks; None: one process does all.
        engine: What runs F, B and W.
        compile: The arguments of ``block.compile``; None: blocks run as they are written.
    """

    def __init__(
        self, mesh: DeviceMesh | None, engine: Engine, compile: dict[str, Any] | None
    ) -> None:
        self._mesh, self._engine = mesh, engine
        kind = new_block_class()
        torch.manual_seed(0)
        self._blocks: Any = nn.Sequential(*(kind() for _ in range(NUM_BLOCKS))).double()
        x, gradient = torch.randn(2, BATCH, TOKENS, WIDTH, dtype=torch.float64)
        if mesh is not None:
            for block in self._blocks:
                parallelize(block, mesh)
            if engine is ours:
                replace_dtensors(self._blocks, mesh)
            x, gradient = (
                each.chunk(mesh.size(), dim=1)[mesh.get_local_rank()] for each in (x, gradient)
            )
        self._x, self._gradient = x.contiguous().requires_grad_(), gradient.contiguous()
        for parameter in self._blocks.parameters():
            mark_deferrable(parameter)
        if compile is not None:
            for block in self._blocks:
                block.compile(fullgraph=True, **compile)

    def start(self) -> Iterator[None]:
        """Start a run, whose phases come one by one."""
        return self._engine(self._blocks, self._x, self._gradient)

    def install(self) -> None:
        """Install what is ours for our engine alone."""
        if self._engine is ours:
            PATCHES.enter(deferring_kernels, "cpu")
            PATCHES.enter(splitting_regions)
            PATCHES.enter(synchronous_collectives, torch.device("cpu"))
        else:
            PATCHES.close()

    def seconds(self) -> list[float]:
        """Return the CPU time of the thread in each phase of a block."""
        run = self.start()
        moments = [time.thread_time()]
        for _ in run:
            moments.append(time.thread_time())
        return [
            (end - start) / NUM_BLOCKS for start, end in zip(moments, moments[1:], strict=False)
        ]

    def gradients(self) -> list[Tensor]:
        """Return the whole gradients of the input and of all parameters."""
        for _ in self.start():
            pass
        assert self._x.grad is not None
        found = self._x.grad
        if self._mesh is not None:
            found = DTensor.from_local(found, self._mesh, (Shard(1),)).full_tensor()
        gradients = [found, *map(whole_gradient, self._blocks.parameters())]
        return [gradient.clone() for gradient in gradients]  # later runs add to them

    def clear(self) -> None:
        """Drop all gradients."""
        for tensor in (self._x, *self._blocks.parameters()):
            tensor.grad = None

    def collectives(self) -> str:
        """Return how many collectives each phase has."""
        run, counts = self.start(), []
        for _ in PHASES:
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                next(run)
            counts.append(sum(event.name.startswith("c10d::") for event in trace.events()))
        return ", ".join(str(count // NUM_BLOCKS) for count in counts)

    def num_waiting(self) -> int:
        """Return how many weight gradients of a block wait for W."""
        queue = WeightGradQueue()
        with queue:
            torch.autograd.backward(self._blocks(self._x), self._gradient)
        return len(queue.pop_all()) // NUM_BLOCKS


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, gathered or summed if this rank has a part of it."""
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    sharding = sharding_of(parameter)
    if has_partial_gradient(parameter):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
    return gather_whole(gradient, sharding) if sharding and is_shard(parameter) else gradient


def with_fewer_guards(entries: Sequence[Any]) -> list[bool]:
    """Return which guards stay: not those on hooks' own values and on placements."""
    return [e.guard_type != "DTENSOR_SPEC_MATCH" and "hooks" not in e.name for e in entries]


BASE = "ours, t = 1, compiled"
COMPILED: dict[str, Any] = {"dynamic": False}
FEWER_GUARDS = {**COMPILED, "options": {"guard_filter_fn": with_fewer_guards}}


def make_cases(mesh: DeviceMesh) -> dict[str, Case]:
    """Return what is compared."""
    made: dict[str, Case] = {}
    for name, engine in (("torch", fused), ("ours", ours)):
        for size, ranks in ((1, None), (mesh.size(), mesh)):
            made[f"{name}, t = {size}"] = Case(ranks, engine, None)
            made[f"{name}, t = {size}, compiled"] = Case(ranks, engine, COMPILED)
    made[f"ours, t = {mesh.size()}, compiled, fewer guards"] = Case(mesh, ours, FEWER_GUARDS)
    return made


def check(cases: dict[str, Case]) -> dict[str, list[str]]:
    """Return each case's worst gradient, collectives, and products that wait for W."""
    expected, found = None, {}
    for name, case in cases.items():
        case.install()
        gradients = case.gradients()
        expected = expected or gradients
        errors = [
            ((gradient - right).abs().max() / right.abs().max()).item()
            for gradient, right in zip(gradients, expected, strict=True)
        ]
        found[name] = [f"{max(errors):.1e}", case.collectives(), str(case.num_waiting())]
        case.clear()
    return found


def measure(cases: dict[str, Case], steps: int) -> dict[str, list[list[float]]]:
    """Let the cases take turns; return the phases' seconds of each step."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    gc.disable()
    for step in range(-3, steps):
        for name, case in cases.items():
            case.install()
            case.seconds()
            seconds = case.seconds()
            if step >= 0:
                found[name].append(seconds)
        gc.collect()
    return found


def add_rows(
    table: Table, seconds: dict[str, list[list[float]]], checked: dict[str, list[str]]
) -> None:
    """Add a row for each case, with its time over that of the base."""
    phases = {name: [median(each) for each in zip(*s, strict=True)] for name, s in seconds.items()}
    base = phases[BASE]
    for name, own in phases.items():
        ratios = [mine / theirs for mine, theirs in zip(own, base, strict=True)]
        table.add_row(
            name,
            *(f"{each * 1e6:.0f}" for each in own),
            *(f"{each:.2f}" for each in (*ratios, sum(own) / sum(base))),
            *checked.get(name, []),
        )


def make_table(title: str) -> Table:
    """Make the table's head."""
    table = Table(title=title)
    table.add_column("case")
    names = [f"{phase}, us" for phase in PHASES]
    names += [f"{phase} / base" for phase in (*PHASES, "all")]
    for name in (*names, "worst", "collectives", "in W"):
        table.add_column(name, justify="right")
    return table


def run_rank(rank: int, backend: str, folder: str, steps: int) -> None:
    """Check and measure on one tensor rank; the first prints the table."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"init_method": f"file://{folder}/store"}
    if backend == "fake":
        options = {"store": FakeStore()}
    dist.init_process_group(backend, rank=rank, world_size=SIZE, **options)
    cases = make_cases(init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tensor_parallel",)))
    checked = check(cases) if backend == "gloo" else {}
    seconds = measure(cases, steps)
    if rank == 0:
        table = make_table(f"{NUM_BLOCKS} blocks of {WIDTH} features, float64, {backend}")
        add_rows(table, seconds, checked)
        Console(width=150).print(table)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each case")
    parser.add_argument("--backends", nargs="+", default=["gloo", "fake"])
    arguments = parser.parse_args()
    for backend in arguments.backends:
        with tempfile.TemporaryDirectory() as folder:
            spawn(run_rank, (backend, folder, arguments.steps), 1 if backend == "fake" else SIZE)


if __name__ == "__main__":
    main()
