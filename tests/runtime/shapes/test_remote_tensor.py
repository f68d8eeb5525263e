"""What stands for the parameters of other stages: modules, copies, draws, and their gradients."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.shapes import (
    GradientChanges,
    KnownNorms,
    RemoteTensor,
    ValueNeededError,
    remote_read_message,
)
from lightning_pipeoffload.runtime.users_code import Slot
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import Regression, call_step, linear_blocks


class Tied(nn.Module):
    """With a weight that the first and the last stage have, and statistics in each block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)
        )
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def step(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def after_a_step(module, schedule="zb_h1", num_ranks=2):
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step)
    pipeline.run(torch.randn(8, 4), 2)
    return [rank.module for rank in pipeline.ranks]


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb_h1", 2), ("zb_v", 2), ("zb_h1", 3)])
def test_a_module_is_whole_on_every_rank(schedule, num_ranks):
    plain = Tied()
    for module in after_a_step(copy.deepcopy(plain), schedule, num_ranks):
        found, expected = dict(module.named_parameters()), dict(plain.named_parameters())
        assert [*found] == [*expected]
        assert [p.shape for p in found.values()] == [p.shape for p in expected.values()]
        assert [n for n, _ in module.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert [*module.state_dict()] == [*plain.state_dict()]
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in found.values())
        assert module.head.weight is module.embed.weight


class Counting(Regression):
    """Notes what a step sees of the module."""

    def __init__(self):
        super().__init__(linear_blocks(4))
        self.seen = set()

    def step(self, x):
        kinds = {(isinstance(p, nn.Parameter), p.requires_grad) for p in self.parameters()}
        self.seen.add((sum(p.numel() for p in self.parameters()), *kinds))
        return super().step(x)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_a_step_sees_a_whole_module(schedule):
    plain = Counting()
    for module in after_a_step(plain, schedule):
        assert module.seen == {(sum(p.numel() for p in plain.parameters()), (True, True))}


def remote_weight(module):
    return next(p for p in module.parameters() if isinstance(p, RemoteTensor))


def test_a_copy_freezes_by_itself():
    module = after_a_step(Tied())[0]
    teacher = copy.deepcopy(module).requires_grad_(False)
    assert [p.shape for p in teacher.parameters()] == [p.shape for p in module.parameters()]
    assert all(p.requires_grad for p in module.parameters())
    assert remote_weight(teacher) is not remote_weight(module)
    assert teacher.head.weight is teacher.embed.weight


@pytest.mark.parametrize("rank", [0, 1])
def test_a_module_is_pickled_with_its_shapes(rank):
    module = after_a_step(Tied())[rank]
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="shapes without values"):
        torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    for name, tensor in pickle.loads(pickle.dumps(module)).state_dict().items():
        assert (tensor.shape, state[name].shape) == (module.state_dict()[name].shape,) * 2
    with pytest.raises(
        ValueNeededError, match=r"blocks\.[02]\.0\.weight \(of stage \d, on global rank \d\)"
    ):
        remote_weight(pickle.loads(pickle.dumps(module))).sum().item()


def test_a_module_converts_with_its_shapes():
    module = after_a_step(Tied())[0].double().cpu()
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert (remote_weight(module) * 1).dtype == torch.float64


def test_a_state_dict_loads_into_what_a_rank_has():
    plain = Tied()
    module = after_a_step(copy.deepcopy(plain))[1]
    own = module.blocks[3][0].weight
    module.load_state_dict({name: torch.ones_like(t) for name, t in plain.state_dict().items()})
    assert own.eq(1).all()
    assert isinstance(module.blocks[0][0].weight, RemoteTensor)


def test_writes_in_place_are_left_to_the_owner():
    weight = remote_weight(after_a_step(Tied())[0])
    before = weight.origins
    with torch.no_grad():
        weight.mul_(0.5).add_(torch.ones(4, 4)).lerp_(weight * 2, 0.1).clamp_(0, 1)
        weight.data = torch.ones(4, 4)
        weight.data.copy_(torch.ones(4, 4))
        nn.init.normal_(weight)
    assert isinstance(weight, RemoteTensor)
    assert weight.origins == before


OPTIONS = {
    "most are inside": {},
    "of a generator": {"generator": torch.Generator()},
    "few are inside": {"mean": 2.0, "std": 1.0, "a": -1.0, "b": 1.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_every_rank_draws_the_same_truncated_numbers(options):
    def anew(module):
        """Initialize all weights anew; return what is drawn next."""
        torch.manual_seed(1)
        generator = options.get("generator", torch.default_generator).manual_seed(1)
        for parameter in module.parameters():
            nn.init.trunc_normal_(parameter, **options)
        return torch.randn(3, generator=generator)

    plain = Regression(linear_blocks(4))
    for module in after_a_step(plain):
        assert torch.equal(anew(module), anew(plain))


VALUES = [[0.25, -3.0], [1.0, 2.5]]


def make(values=VALUES, dtype=torch.float32, is_known=True):
    """Return a real gradient, and the parameter of another rank that has it."""
    gradient = torch.tensor(values, dtype=dtype)
    slot = Slot("weight", nn.Linear(2, 2, dtype=dtype), "weight", "_parameters")
    remote = RemoteTensor.standing_for(slot, "weight (of stage 1)", torch.device("cpu"))
    remote.changes = GradientChanges()
    remote.changes.record()
    if is_known:
        norms = [float(torch.linalg.vector_norm(gradient, order)) for order in (2, math.inf)]
        remote.set_remote_gradient(True, KnownNorms(*norms))
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
    said = remote_read_message(found.value)
    assert "the gradient of weight (of stage 1)" in said
    assert "test_remote_tensor.py" in said
    assert "trainer.strategy.gather(parameter.grad)" in said


def test_without_an_exchange_a_gradient_is_there_but_not_its_norm():
    _, remote = make(is_known=False)
    assert remote.grad.shape == (2, 2)
    with pytest.raises(ValueNeededError):
        remote.grad.norm()
    remote.changes.record(are_none=True)
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
    remote.set_remote_gradient(True, KnownNorms(float(gradient.norm()), 3.0))
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
