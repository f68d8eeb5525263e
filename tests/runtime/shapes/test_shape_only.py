import pytest
import torch
from torch import nn
from torch.cuda import _sanitizer
from torch.nn import functional

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS
from lightning_pipeoffload.runtime.shapes import (
    ShapeOnly,
    StepRules,
    ValueNeededError,
    describe_origins,
    storage_key,
)


def shapes(*size, origin="a", **options):
    return ShapeOnly.like(torch.ones(*size, **options), origin)


OPERATIONS = {
    "product": lambda x: x @ x.t(),
    "linear": lambda x: functional.linear(x, torch.ones(5, 3), torch.ones(5)),
    "norm": lambda x: functional.layer_norm(x, (3,)),
    "broadcast": lambda x: x + torch.ones(4, 1, 3),
    "cast": lambda x: x.to(torch.int64),
    "views": lambda x: x[None].transpose(1, 2).flatten(1)[:, 1:],
    "indexing by numbers": lambda x: x[torch.tensor([0, 1, 1])],
    "embedding": lambda x: functional.embedding(torch.tensor([[0, 1]]), x),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())),
    "chunks": lambda x: x.chunk(2, dim=1)[1],
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "written in place": lambda x: x.clone().mul_(2),
    "strides": lambda x: x.t().bfloat16(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_results_have_the_shape_of_the_real_ones(operation):
    real, found = operation(torch.ones(2, 3)), operation(shapes(2, 3))
    assert isinstance(found, ShapeOnly)
    assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())
    assert found.origins == {"a"}


def test_origins_are_united_and_described():
    found = shapes(2, origin="a")
    for origin in "cbde":
        found = found * shapes(2, origin=origin) + torch.ones(2)
    assert found.origins == {*"abcde"}
    assert describe_origins(found.origins) == "something computed from a, b, c and 2 more"


def test_what_is_remembered_of_an_operation_is_its_shape_alone():
    for origin in ("a", "b"):
        found = functional.embedding(torch.zeros(4, dtype=torch.long), shapes(3, 2, origin=origin))
        assert (found.shape, found.origins) == ((4, 2), {origin})
    assert (shapes(2) + 1.5).dtype == (shapes(2) + 1).dtype == torch.float32
    assert (shapes(2, dtype=torch.int64) + 1.5).dtype == torch.float32
    assert (shapes(2, dtype=torch.int64) + 1).dtype == torch.int64
    found = [torch.mm(shapes(2, 3), torch.ones(*size)) for size in [(3, 4), (3, 5), (3, 4)]]
    assert [tensor.shape[1] for tensor in found] == [4, 5, 4]
    found[0].unsqueeze_(0)
    assert found[2].meta.shape == torch.mm(shapes(2, 3), torch.ones(3, 4)).meta.shape == (2, 4)


def test_what_is_remembered_is_refused_in_a_hook_and_told_to_observers():
    seen = []
    with ACTIVE_SETTINGS.during(StepRules()):
        assert shapes(2).sum().dim() == 0
    with ACTIVE_SETTINGS.during(StepRules(observe=lambda func, args, result: seen.append(func))):
        shapes(2).sum()
    assert seen == [torch.ops.aten.sum.default]
    with pytest.raises(ValueNeededError, match="sum"):
        shapes(2).sum()


VALUES = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: 1 if x.sum() > 0 else 0,
    "number": lambda x: int(x[0, 0]),
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 0],
    "unique": torch.unique,
    "masked_select": lambda x: x.masked_select(x > 0),
    "write into a real tensor": lambda x: torch.zeros(2, 3).add_(x),
    "write into a slice of one": lambda x: torch.zeros(4, 3)[:2].copy_(x),
}


@pytest.mark.parametrize("operation", VALUES.values(), ids=VALUES)
def test_a_use_of_the_value_is_an_error_that_names_its_origin(operation):
    with pytest.raises(ValueNeededError, match="needs the value of something computed from a$"):
        operation(shapes(2, 3))


def test_what_is_made_anew_is_real():
    x = shapes(2, dtype=torch.float64)
    for found in (
        torch.zeros_like(x),
        torch.rand_like(x),
        torch.full_like(x, 0),
        x.new_full((2,), 3),
    ):
        assert type(found) is torch.Tensor
        assert found.dtype is torch.float64
    assert found.tolist() == [3.0, 3.0]


def test_writes_into_chosen_tensors_are_dropped():
    running, other = torch.zeros(2), torch.zeros(2)
    with ACTIVE_SETTINGS.during(StepRules(drop=lambda tensor: tensor is running)):
        running.add_(shapes(2))
        with pytest.raises(ValueNeededError):
            other.add_(shapes(2))
    assert running.tolist() == [0, 0]
    with pytest.raises(ValueNeededError):
        running.add_(shapes(2))


def test_running_statistics_are_not_updated_from_shapes():
    norm = torch.nn.BatchNorm1d(3)
    with ACTIVE_SETTINGS.during(StepRules(drop=lambda tensor: True)):
        assert norm(shapes(2, 3)).shape == (2, 3)
    assert norm.running_mean.tolist() == [0, 0, 0]


def test_dropout_advances_the_generator():
    def draw_after(x):
        torch.manual_seed(0)
        functional.dropout(x, 0.2)
        return torch.rand(1)

    assert torch.equal(draw_after(shapes(100)), draw_after(torch.ones(100)))


def test_results_that_are_observed_share_memory_only_with_what_they_view():
    weight = ShapeOnly.like(torch.ones(2, 3), "w")
    with ACTIVE_SETTINGS.during(StepRules(lambda *operation: None)):
        first, second = weight.sum(1), weight.sum(1)
        moments = torch.native_layer_norm(weight, [3], None, None, 1e-5)
        view = torch.ops.aten._unsafe_view.default(first, [1, 2])  # which its schema denies
        again = torch.ops.aten._unsafe_view.default(second, [1, 2])
    assert len({storage_key(tensor) for tensor in (weight, first, second, *moments)}) == 6
    assert (storage_key(view), storage_key(again)) == (storage_key(first), storage_key(second))


def test_a_kernel_that_torch_does_not_know_gets_no_address():
    found = shapes(2, 3, origin="the output of blocks.1")
    with pytest.raises(
        ValueNeededError, match=r"address needs the value .* of blocks.1: .* with torch.library"
    ):
        found.t().data_ptr()
    with pytest.raises(RuntimeError, match="custom op"):  # as a kernel in C++ asks
        torch.Tensor.data_ptr(found)


def test_the_sanitizer_may_ask_for_addresses():
    found = ShapeOnly.like(torch.ones(2), "x", device=torch.device("cuda", 0))
    handler = _sanitizer.ArgumentHandler()
    handler.parse_inputs(torch.ops.aten.relu.default._schema, (found,), {}, is_factory=False)
    assert handler.dataptrs_read == {id(found)}  # as of a tensor without memory


def test_an_rnn_does_not_lay_out_weights_that_are_not_there(monkeypatch):
    rnn = nn.LSTM(2, 2)
    for name, weight in [*rnn._parameters.items()]:
        rnn._parameters[name] = ShapeOnly.like(weight, name, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    rnn._init_flat_weights()


def test_a_probe_draws_no_numbers():
    found, before = shapes(2, 3), torch.get_rng_state()
    with ACTIVE_SETTINGS.during(StepRules(lambda *seen: None)):
        torch.native_dropout(found, 0.5, True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.native_dropout(found, 0.5, True)
    assert not torch.equal(torch.get_rng_state(), before)
