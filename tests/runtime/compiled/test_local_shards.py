"""Compiled blocks of tensor ranks over gloo: exact, and with their weight gradients left for W."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.profiler import profile

from lightning_pipeoffload.runtime.compiled.block_compiler import install_split, remove_split
from lightning_pipeoffload.runtime.compiled.local_shards import gradient_placements, local_of
from lightning_pipeoffload.runtime.weight_grad.kernels import install_kernels, mark, remove_kernels
from lightning_pipeoffload.runtime.weight_grad.queue import WeightGradQueue
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.slow
WIDTH = 4


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(self.up(y).tanh() * self.gate(y))


PLANS = {
    "sequence parallel": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
    "tensor parallel": {
        "up": ColwiseParallel(),
        "gate": ColwiseParallel(),
        "down": RowwiseParallel(),
    },
}


def train_shards(plan, hooks=()):
    """Return the products that wait for W, the collectives in W, and what is off by how much."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    torch.manual_seed(0)
    whole = Block().double()
    x, gradient = torch.randn(2, 2, 6, WIDTH, dtype=torch.float64)
    whole_x = x.clone().requires_grad_()
    whole(whole_x).backward(gradient)
    block = Block().double()
    block.load_state_dict(whole.state_dict())
    parallelize_module(block, mesh, PLANS[plan])
    if "norm" in PLANS[plan]:
        x, gradient = (each.chunk(2, 1)[rank].contiguous() for each in (x, gradient))
    x.requires_grad_()
    for parameter in block.parameters():
        mark(parameter)
    hooked = []
    for name in hooks:
        block.get_parameter(name).register_hook(lambda gradient: hooked.append(gradient))
    torch.compiler.reset()
    block.compile(fullgraph=True, backend="aot_eager")
    install_kernels("cpu")
    install_split()
    try:
        waiting, collectives = run_split(block, x, gradient)
    finally:
        remove_split()
        remove_kernels()
    found = {name: gradient_of(parameter) for name, parameter in block.named_parameters()}
    found["x"] = x.grad
    if "norm" in PLANS[plan]:
        found["x"] = DTensor.from_local(x.grad, mesh, (Shard(1),)).full_tensor()
    expected = {name: p.grad for name, p in whole.named_parameters()} | {"x": whole_x.grad}
    off = {name: (found[name] - expected[name]).abs().max().item() for name in expected}
    return waiting, collectives, len(hooked), max(off.values())


def run_split(block, x, gradient):
    queue = WeightGradQueue()
    with queue:
        block(x).backward(gradient)
    waiting = len(queue.waiting)
    with profile() as trace:
        queue.run()
    return waiting, sum("c10d" in event.name for event in trace.events())


def gradient_of(parameter):
    """Return the whole gradient, whichever tensor has it."""
    if not isinstance(parameter, DTensor):
        return parameter.grad
    found, local = parameter.grad, local_of(parameter).grad
    if local is not None:
        assert found is None
        found = DTensor.from_local(local, parameter.device_mesh, gradient_placements(parameter))
    return found.full_tensor()


@pytest.mark.parametrize("plan", PLANS)
def test_products_of_shards_wait_for_w_without_collectives(pool, plan):
    for waiting, collectives, _, off in pool.run(train_shards, plan):
        assert (waiting, collectives) == (3, 0)
        assert off < 1e-14


def test_a_hook_on_the_gradient_of_a_shard_runs(pool):
    for _, _, hooked, off in pool.run(train_shards, "sequence parallel", ("norm.weight",)):
        assert hooked == 1
        assert off < 1e-14
