import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipeoffload.runtime.accelerator import is_on
from lightning_pipeoffload.runtime.memory.host_memory import HostMemory
from lightning_pipeoffload.runtime.memory.saved_tensor import Cast, Resident, WrittenInPlaceError
from lightning_pipeoffload.runtime.memory.stage_store import ActivationStore, OffloadSettings
from lightning_pipeoffload.runtime.memory.streams import make_lanes
from lightning_pipeoffload.schedule.actions import Part

CPU = torch.device("cpu")
EVERYTHING = Part.FOR_B | Part.FOR_W | Part.GRADIENT


def make_store(resident=(), largest_to_stay=0):
    settings = OffloadSettings(CPU, make_lanes(CPU), HostMemory(pinned=False), largest_to_stay)
    return ActivationStore("stage 1, microbatch 2", resident, settings)


def there_and_back(store):
    store.offload()
    store.free()
    assert store.held.device == 0
    store.reload(EVERYTHING)
    store.arrive(EVERYTHING)


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
    kept = store.keep_for_weight(on_host)
    assert (store.held.device, kept().sum()) == (0, 9)
    assert isinstance(make_store().pack(elsewhere), Resident)


def test_a_device_without_an_index_is_any_of_its_kind():
    meta = torch.empty(1, device="meta")
    assert is_on(meta, torch.device("meta"))
    assert is_on(torch.ones(1), CPU)
    assert not is_on(torch.ones(1), torch.device("cpu", 1))


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
    assert isinstance(saved, Cast)
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
        store.offload()
    tensor.add_(1)
    steps = {"offload": store.offload, "free": store.free, "unpack": lambda: store.unpack(saved)}
    with pytest.raises(WrittenInPlaceError, match="stage 1, microbatch 2: the tensor .* in place"):
        steps[moment]()


def test_a_tensor_on_the_host_is_missed():
    store = make_store()
    saved = store.pack(torch.randn(4))
    store.offload()
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
