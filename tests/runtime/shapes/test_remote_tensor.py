"""What stands for the parameters of other stages: whole modules, copies and pickles of them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.runtime.shapes.remote_tensor import RemoteTensor
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError
from lightning_pipeoffload.schedule import build
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
