"""What is known of gradients that another rank has, what is done to them, and what is refused."""

import math

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.shapes.remote_gradient import KnownSize
from lightning_pipeoffload.runtime.shapes.remote_tensor import (
    GradientAge,
    RemoteTensor,
    explain_remote,
)
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot

VALUES = [[0.25, -3.0], [1.0, 2.5]]


def make(values=VALUES, dtype=torch.float32, is_known=True):
    """Return a real gradient, and the parameter of another rank that has it."""
    gradient = torch.tensor(values, dtype=dtype)
    slot = Slot("weight", nn.Linear(2, 2, dtype=dtype), "weight", "_parameters")
    remote = RemoteTensor.standing_for(slot, "weight (of stage 1)", torch.device("cpu"))
    remote.age = GradientAge()
    remote.age.change()
    if is_known:
        norms = [float(torch.linalg.vector_norm(gradient, order)) for order in (2, math.inf)]
        remote.know_gradient(True, KnownSize(*norms))
    return gradient, remote


QUESTIONS = [
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    lambda g: g.norm(2),
    lambda g: g.data.norm(float("inf")),
    lambda g: g.detach().flatten().norm(),
    lambda g: g.view(-1).norm(p=2.0),
    lambda g: torch._foreach_norm([g])[0],
    lambda g: torch._foreach_norm([g], float("inf"))[0],
    lambda g: nn.utils.get_total_norm([g, torch.ones(3)]),
    lambda g: g.abs().max(),
    lambda g: g.abs().amax(),
    lambda g: g.isfinite().all(),
    lambda g: torch.isfinite(g).logical_not().any(),
    lambda g: g.isnan().any(),
    lambda g: g.isinf().any(),
    lambda g: (g != g).any(),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("values", [VALUES, [[math.inf, 1.0], [0.0, 0.0]]])
def test_questions_about_sizes_have_the_owners_answer(dtype, values):
    gradient, remote = make(values, dtype)
    for ask in QUESTIONS:
        found, expected = ask(remote.grad), ask(gradient)
        assert type(found) is torch.Tensor
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_not_a_number_is_seen():
    _, remote = make([[math.nan, 1.0], [0.0, 0.0]])
    assert remote.grad.isnan().any()
    assert not remote.grad.isfinite().all()
    assert remote.grad.norm().isnan()
    with pytest.raises(ValueNeededError):
        remote.grad.isinf().any()


WRITES = [
    lambda g: g.mul_(0.5),
    lambda g: g.data.add_(1),
    lambda g: g[0].zero_(),
    lambda g: g.view(-1).clamp_(0, 1),
    lambda g: torch._foreach_mul_([g], 0.5),
    lambda g: torch.neg(g, out=g),
]


@pytest.mark.parametrize("write", WRITES)
def test_after_a_write_nothing_is_known(write):
    _, remote = make()
    write(remote.grad)
    with pytest.raises(ValueNeededError, match=r"the gradient of weight \(of stage 1\)"):
        remote.grad.norm()


UNKNOWN = [
    lambda g: g.norm(1),
    lambda g: g.pow(2).sum(),
    lambda g: g.mean(),
    lambda g: g[0].norm(),
    lambda g: (g * 2).norm(),
    lambda g: g.sum().item(),
    lambda g: bool((g > 0).any()),
    lambda g: torch.zeros(2, 2).add_(g),
    lambda g: torch._foreach_add_([torch.zeros(2, 2), g], [g, g]),
    lambda g: torch.mul(g, 2, out=torch.zeros(2, 2)),
]


@pytest.mark.parametrize("ask", UNKNOWN)
def test_other_values_are_refused_with_their_place(ask):
    _, remote = make()
    with pytest.raises(ValueNeededError) as found:
        ask(remote.grad)
    said = explain_remote(found.value)
    assert "the gradient of weight (of stage 1)" in said
    assert "test_remote_gradient.py" in said
    assert "trainer.strategy.gather(parameter.grad)" in said


def test_without_an_exchange_a_gradient_is_there_but_not_its_norm():
    _, remote = make(is_known=False)
    assert remote.grad.shape == (2, 2)
    with pytest.raises(ValueNeededError):
        remote.grad.norm()
    remote.age.change(are_none=True)
    assert remote.grad is None


def test_a_norm_of_a_weight_is_refused():
    _, remote = make()
    for ask in (torch.linalg.vector_norm, lambda w: w.abs().max(), lambda w: w.detach().norm()):
        with pytest.raises(ValueNeededError, match=r"weight \(of stage 1\)"):
            ask(remote)


@torch.no_grad()
def test_lists_are_worked_on_member_by_member():
    gradient, remote = make()
    own = torch.ones(3)
    torch._foreach_mul_([own, remote.grad], [2.0, 3.0])
    assert own.eq(2).all()
    torch._foreach_lerp_([own, remote], [torch.zeros(3), torch.zeros(2, 2)], 0.5)
    assert own.eq(1).all()
    remote.know_gradient(True, KnownSize(float(gradient.norm()), 3.0))
    first, second, third = torch._foreach_norm([own, remote.grad, own])
    assert (first, second, third) == (own.norm(), gradient.norm(), own.norm())


DRAWS = [
    torch.randn_like,
    torch.rand_like,
    lambda t: t.normal_(),
    lambda t: t.data.uniform_(-1, 1),
    lambda t: t.bernoulli_(0.3),
    lambda t: t.exponential_(),
    lambda t: torch.empty_like(t).cauchy_(),
    lambda t: torch.bernoulli(t.detach() * 0),
    lambda t: torch.normal(t.detach(), 1.0),
    lambda t: nn.init.kaiming_uniform_(t),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_advance_the_generator_as_the_owners_do(draw):
    _, remote = make()
    real = nn.Parameter(torch.rand(2, 2))
    states = []
    for tensor in (remote, real):
        torch.manual_seed(3)
        with torch.no_grad():
            draw(tensor)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
