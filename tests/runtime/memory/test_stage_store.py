"""A stage's store of saved tensors, and the host's memory for them."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipeoffload.runtime.device import is_on_device, make_lanes
from lightning_pipeoffload.runtime.memory import (
    ActivationStore,
    HostBudget,
    HostMemory,
    HostMemoryError,
    MachineMemory,
    OffloadSettings,
    host_memory,
    machine_memory,
)
from lightning_pipeoffload.runtime.memory.host_memory import piece_sizes
from lightning_pipeoffload.runtime.memory.saved_tensor import (
    Resident,
    SavedCast,
    WrittenInPlaceError,
)
from tests.support.offloaded import there_and_back

CPU = torch.device("cpu")


def make_store(resident=(), largest_to_stay=0):
    settings = OffloadSettings(CPU, make_lanes(CPU), HostMemory(pinned=False), largest_to_stay)
    return ActivationStore("stage 1, microbatch 2", resident, settings)


BASE = torch.arange(48.0).reshape(4, 12)
TENSORS = {
    "contiguous": BASE.clone(),
    "transposed": BASE.clone().t(),
    "expanded": torch.randn(4, 1).expand(4, 12),
    "strided": BASE.clone()[::2, 1::3],
    "integers": torch.arange(9),
    "mask": torch.arange(9) % 2 == 0,
    "complex": torch.randn(5, dtype=torch.complex128),
    "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
    "bfloat16": torch.randn(7).bfloat16(),
    "float8": torch.randn(8).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_comes_back_as_it_was(tensor):
    store = make_store()
    saved = store.pack(tensor)
    there_and_back(store)
    found = store.unpack(saved)
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
    assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128))


def test_what_is_not_on_the_ranks_device_stays_where_it_is():
    elsewhere = torch.empty(9, device="meta")
    settings = OffloadSettings(elsewhere.device, make_lanes(CPU), HostMemory(False), 0)
    store = ActivationStore("stage 1, microbatch 2", (), settings)
    on_host = torch.ones(9)
    assert isinstance(store.pack(on_host), Resident)
    kept = store.keep_until_w(on_host)
    assert (store.held.device, kept().sum()) == (0, 9)
    assert isinstance(make_store().pack(elsewhere), Resident)


def test_a_device_without_an_index_is_any_of_its_kind():
    meta = torch.empty(1, device="meta")
    assert is_on_device(meta, torch.device("meta"))
    assert is_on_device(torch.ones(1), CPU)
    assert not is_on_device(torch.ones(1), torch.device("cpu", 1))


def test_aliases_are_kept_once():
    store, base = make_store(), BASE.clone()
    saved = [store.pack(view) for view in (base, base[1:], base.t(), base.view(-1))]
    assert store.held.device == base.nbytes
    there_and_back(store)
    first, *views = [store.unpack(handle) for handle in saved]
    addresses = {view.untyped_storage().data_ptr() for view in views}
    assert addresses == {first.untyped_storage().data_ptr()}


def test_parameters_and_small_tensors_stay():
    weight, small = nn.Parameter(torch.randn(40, 40)), torch.randn(1024)
    store = make_store({weight.untyped_storage().data_ptr()}, largest_to_stay=1024)
    saved = [store.pack(tensor) for tensor in (weight, weight.t(), weight[3:], small)]
    assert all(isinstance(handle, Resident) for handle in saved)
    assert store.held.device == 0


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.t()], ids=["cast", "view of a cast"])
def test_a_cast_parameter_is_cast_again(view):
    weight = nn.Parameter(torch.randn(4, 6))
    cast = view(weight.to(torch.bfloat16))
    store = make_store()
    saved = store.pack(cast)
    assert isinstance(saved, SavedCast)
    assert torch.equal(store.unpack(saved), cast)


def written(cast):
    with torch.no_grad():
        return cast.add_(1)


@pytest.mark.parametrize("compute", [torch.neg, torch.tanh, lambda t: t.flip(0), written])
def test_what_is_computed_from_a_cast_is_kept(compute):
    cast = nn.Parameter(torch.randn(4, 6)).to(torch.bfloat16)
    store = make_store()
    computed = compute(cast)
    saved = [store.pack(tensor) for tensor in (computed, cast)]
    assert all(
        torch.equal(store.unpack(s), t) for s, t in zip(saved, (computed, cast), strict=True)
    )


@pytest.mark.parametrize("moment", ["offload", "free", "unpack"])
def test_a_write_after_packing_is_an_error(moment):
    store, tensor = make_store(), torch.randn(4)
    saved = store.pack(tensor)
    if moment == "free":
        store.start_offload()
    tensor.add_(1)
    steps = {
        "offload": store.start_offload,
        "free": store.free,
        "unpack": lambda: store.unpack(saved),
    }
    with pytest.raises(WrittenInPlaceError, match="stage 1, microbatch 2: the tensor .* in place"):
        steps[moment]()


def test_a_tensor_on_the_host_is_missed():
    store = make_store()
    saved = store.pack(torch.randn(4))
    store.start_offload()
    store.free()
    with pytest.raises(RuntimeError, match="on the host; the plan needs a RELOAD"):
        store.unpack(saved)


def test_what_the_graph_has_used_is_no_longer_counted():
    store, x = make_store(), torch.randn(8, requires_grad=True)
    with store.recording():
        y = x.exp().sin().sum()
    assert store.held.device == x.nbytes  # exp's output is sin's input
    y.backward()
    assert store.held.device == 0


def test_a_users_own_hooks_win_inside_them():
    store, x, packed = make_store(), torch.randn(8, requires_grad=True), []

    def pack(tensor):
        packed.append(tensor)
        return tensor.detach()

    with store.recording():
        y = x.exp()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            z = y.sin()
    there_and_back(store)
    z.sum().backward()
    assert len(packed) == 1
    torch.testing.assert_close(x.grad, x.exp().cos() * x.exp())


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000, 100_000, 1_234_567, 2**20, 3 * 2**28 + 1])
def test_pieces_are_powers_of_two_and_waste_little(num_bytes):
    sizes = piece_sizes(num_bytes)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert num_bytes <= sum(sizes) <= max(num_bytes * 9 / 8, num_bytes + 4096)


def test_a_range_may_cross_pieces():
    slab = HostMemory(pinned=False).acquire(4096 + 8192)
    found = list(slab.parts(8000, 9000))
    assert [(offset, len(part)) for offset, part in found] == [(0, 192), (192, 808)]


def test_pieces_are_reused_and_the_budget_is_kept():
    memory = HostMemory(pinned=False, budget=HostBudget.configured(sum(piece_sizes(10_000))))
    for _ in range(3):
        memory.acquire(10_000).release()
    assert memory.num_allocations == len(piece_sizes(10_000))
    assert memory.allocated_bytes == sum(piece_sizes(10_000))
    memory.acquire(10_000)
    with pytest.raises(HostMemoryError, match=r"host_memory_limit is 12\.00 KiB; offload less"):
        memory.acquire(1)


@pytest.fixture
def machine(monkeypatch):
    def of(total, available):
        found = MachineMemory(total, available)
        monkeypatch.setattr(host_memory, "machine_memory", lambda: found)

    return of


def test_the_machine_does_not_swap(machine):
    machine(100_000, 6000)
    with pytest.raises(HostMemoryError, match="would swap"):
        HostMemory(pinned=False).acquire(4096)


@pytest.mark.parametrize(
    ("total", "available", "ranks", "share"),
    [(100_000, 30_000, 1, 25_000), (100_000, 30_000, 4, 6250), (100_000, 1000, 2, 0)],
)
def test_ranks_share_what_the_machine_has_left(machine, total, available, ranks, share):
    machine(total, available)
    budget = HostBudget.share_of_machine(ranks)
    assert budget.num_bytes == share
    with pytest.raises(HostMemoryError, match="is a rank's share of the .* left for"):
        HostMemory(pinned=False, budget=budget).acquire(28_000)


def test_a_machine_that_does_not_tell_has_no_limit(machine, tmp_path):
    assert machine_memory(tmp_path) == (0, 0)
    machine(0, 0)
    assert HostBudget.share_of_machine(2) is None


def test_what_a_validation_allocates_can_be_trained_with():
    with torch.inference_mode():
        slab = HostMemory(pinned=False).acquire(64)
    assert not any(part.is_inference() for _, part in slab.parts(0, 64))


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n"
MACHINE = (1_024_000, 614_400)
CGROUPS = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("sys/fs/cgroup", "memory.max", "memory.current"),
}
UNLIMITED = {1: 2**63 - 4096, 2: "max"}
GROUPS = {
    "none": ({}, MACHINE),
    "its own": ({"job/step": (5000, 2000, 500)}, (5000, 3500)),
    "a parent": ({"job": (5000, 2000, 500)}, (5000, 3500)),
    "the root": ({"": (5000, 2000, 500)}, (5000, 3500)),
    "the narrowest": ({"job/step": (9000, 100, 0), "job": (10_000, 9500, 0)}, (9000, 500)),
    "without a limit": ({"job": (None, 0, 0)}, MACHINE),
}


@pytest.mark.parametrize("version", CGROUPS)
@pytest.mark.parametrize(("groups", "expected"), GROUPS.values(), ids=GROUPS)
def test_limits_of_control_groups(tmp_path, version, groups, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    line = "4:memory:/job/step" if version == 1 else "0::/job/step"
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpuset:/\n{line}\n")
    root, limit_file, usage_file = CGROUPS[version]
    row = "total_inactive_file" if version == 1 else "inactive_file"
    for path, (limit, usage, cached) in groups.items():
        folder = tmp_path / root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{UNLIMITED[version] if limit is None else limit}\n")
        (folder / usage_file).write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"cache 7\n{row} {cached}\n")
    assert machine_memory(tmp_path) == expected
