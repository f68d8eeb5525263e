"""Layers that tensor ranks share compute what the whole ones do, over gloo."""

import logging.handlers
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.profiler import profile

from lightning_pipeoffload.runtime import PATCHES
from lightning_pipeoffload.runtime.compiled import splitting_regions, warn_once
from lightning_pipeoffload.runtime.device import make_lanes
from lightning_pipeoffload.runtime.memory import (
    ActivationStore,
    HostMemory,
    OffloadSettings,
    storage_address,
)
from lightning_pipeoffload.runtime.shapes import has_partial_gradient, is_shard, sharding_of
from lightning_pipeoffload.runtime.tensor_parallel import (
    gather_whole,
    replace_dtensors,
    sharding_layers,
    synchronous_collectives,
)
from lightning_pipeoffload.runtime.tensor_parallel.collectives import collectives_through_host
from lightning_pipeoffload.runtime.weight_grad import (
    WeightGradQueue,
    deferring_kernels,
    mark_deferrable,
)
from tests.support.offloaded import there_and_back
from tests.support.pairs import slow

WIDTH = 4


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh() * self.gate(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = Inner()
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x):
        hidden = self.embed(x)
        hidden = hidden + self.inner(self.norm(hidden))
        return self.head(hidden)


INNER = {"inner.up": ColwiseParallel(), "inner.gate": ColwiseParallel()}
TENSOR = {**INNER, "inner.down": RowwiseParallel()}
OF_SEQUENCES = {"input_layouts": Shard(1), "output_layouts": Replicate()}
PLANS = {
    "tensor": TENSOR,
    "head": {**TENSOR, "head": ColwiseParallel(output_layouts=Replicate())},
    "embedding by rows": {"embed": RowwiseParallel(input_layouts=Replicate())},
    "embedding by columns": {"embed": ColwiseParallel(output_layouts=Replicate())},
    "sequence": {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "inner": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **INNER,
        "inner.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(**OF_SEQUENCES),
    },
}  # fmt: skip


def train(plan, compiled=False, through_host=False):
    """Train over tensor ranks, with what is saved on the host between F and B.

    Returns:
        The products that wait for W, the collectives there, what is off by how much, the shards,
        and the bytes that are saved by the store and by torch's own layers.
    """
    mesh = mesh_of_two()
    torch.manual_seed(0)
    whole = Net().double()
    x = torch.arange(12).view(2, 6) % 6
    gradient = torch.randn(2, 6, 6, dtype=torch.float64)
    result = whole(x)
    result.backward(gradient)
    net, plain = (Net().double() for _ in range(2))
    net.load_state_dict(whole.state_dict())
    for each in (net, plain):
        parallelize_module(each, mesh, PLANS[plan])
    replace_dtensors(net, mesh)
    for parameter in net.parameters():
        assert not isinstance(parameter, DTensor)
        mark_deferrable(parameter)
    if compiled:
        net.compile(fullgraph=True, backend="aot_eager")
    PATCHES.enter(deferring_kernels, "cpu")
    PATCHES.enter(splitting_regions)
    PATCHES.enter(synchronous_collectives, torch.device("cpu"))
    if through_host:
        PATCHES.enter(collectives_through_host, "cpu")
    try:
        found, waiting, collectives, num_bytes = _run(net, x, gradient)
    finally:
        PATCHES.close()
        torch.compiler.reset()
    off = [(found - result).abs().max()]
    for name, parameter in net.named_parameters():
        gradient, sharding = parameter.grad, sharding_of(parameter)
        if is_shard(parameter):
            gradient = gather_whole(gradient, sharding)
        if has_partial_gradient(parameter):  # which ranks sum once a batch
            dist.all_reduce(gradient)
        off.append((gradient - whole.get_parameter(name).grad).abs().max())
    shards = [name for name, parameter in net.named_parameters() if is_shard(parameter)]
    return waiting, collectives, max(off).item(), shards, num_bytes, bytes_saved_by(plain, x)


def bytes_saved_by(module, x):
    """Return the bytes of the storages that autograd saves, other than of parameters and ``x``."""
    sizes, resident = {}, {_local(tensor).data_ptr() for tensor in (x, *module.parameters())}

    def pack(tensor):
        storage = _local(tensor).untyped_storage()
        sizes[storage.data_ptr()] = 0 if storage.data_ptr() in resident else storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(x)  # holds what is saved
    del result
    return sum(sizes.values())


def _local(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def mesh_of_two():
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))


def _run(net, x, gradient):
    resident = [storage_address(tensor) for tensor in (x, *net.parameters())]
    settings = OffloadSettings(x.device, make_lanes(x.device), HostMemory(False), 0)
    store = ActivationStore("a test", resident, settings)
    queue = WeightGradQueue(keeper=store)
    with queue, store.recording():
        found = net(x)
    num_bytes = store.saved_bytes()
    there_and_back(store)
    with queue:
        found.backward(gradient)
    waiting = len(queue.pending)
    with profile() as trace:
        queue.run()
    num_collectives = sum("c10d" in event.name for event in trace.events())
    return found.detach(), waiting, num_collectives, num_bytes


CASES = [
    *((plan, False, False) for plan in PLANS),
    ("sequence", False, True),
    slow(("sequence", True, False)),
    slow(("sequence", True, True)),
    *(slow((plan, True, False)) for plan in PLANS if plan != "sequence"),
]


@pytest.mark.parametrize(("plan", "compiled", "through_host"), CASES)
def test_products_wait_for_w_and_need_no_collective_there(ranks, plan, compiled, through_host):
    results = ranks(2).run(train, plan, compiled, through_host)
    for waiting, collectives, off, shards, saved, expected in results:
        assert waiting == 4
        assert collectives == 0
        assert off < 1e-14
        assert shards
        # Where an embedding has some of the rows: indices of its own, and which are absent.
        by_rows = plan in ("embedding by rows", "sequence")
        is_as_torch = not compiled and not through_host
        assert not is_as_torch or saved == expected + by_rows * 12 * (8 + 1)


def shard_data(net, mesh):
    fully_shard(net.inner, mesh=mesh)


def divide_unevenly(net, mesh):
    net.inner.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
    parallelize_module(net, mesh["tensor_parallel"], {"inner.up": ColwiseParallel()})


def assign_forward(net, mesh):
    net.inner.up.forward = lambda x: x
    parallelize_module(net, mesh["tensor_parallel"], {"inner.up": ColwiseParallel()})


REFUSED = {
    "a forward": (assign_forward, "inner.up has a forward that was assigned to it"),
    "nothing": (lambda net, mesh: None, "configure_model distributes no layer over"),
    "fully_shard": (shard_data, 'leave fully_shard out, .* sharding="optimizer"'),
    "unevenly": (divide_unevenly, "cannot be shared in equal parts by tensor_parallel_size=2"),
}


def refusal(case):
    mesh_of_two()
    names = ("data_parallel", "tensor_parallel")
    mesh, net = init_device_mesh("cpu", (1, 2), mesh_dim_names=names), Net()
    REFUSED[case][0](net, mesh["data_parallel"] if case == "fully_shard" else mesh)
    with pytest.raises(ValueError, match=REFUSED[case][1]):
        replace_dtensors(net, mesh["tensor_parallel"])


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_refused(ranks, case):
    ranks(2).run(refusal, case)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(WIDTH, 2 * WIDTH)


EMBED = RowwiseParallel(input_layouts=Replicate())
PARTED = {
    "one name": ({"head": ColwiseParallel()}, "embed.weight"),
    "both names": ({"embed": EMBED, "head": ColwiseParallel()}, "head.weight"),
    "neither": ({"other": ColwiseParallel()}, None),
}


def warnings_of(plan):
    mesh, module, handler = mesh_of_two(), Tied(), logging.handlers.BufferingHandler(10)
    warn_once.cache_clear()
    logger = logging.getLogger(warn_once.__module__)
    logger.addHandler(handler)
    try:
        with sharding_layers(module, mesh):
            parallelize_module(module, mesh, plan)
    finally:
        logger.removeHandler(handler)
    return [each.getMessage() for each in handler.buffer]


def all_warnings(_):
    return {case: warnings_of(plan) for case, (plan, _) in PARTED.items()}


def test_a_plan_that_parts_a_weight_from_its_other_name_is_warned_of_once(ranks):
    first, second = ranks(2).run(all_warnings, None)
    for case, (_, name) in PARTED.items():
        assert len(first[case]) == (name is not None)
        assert not second[case]
        assert all(f"and {name} is another weight" in line for line in first[case])
