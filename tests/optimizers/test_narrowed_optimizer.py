"""An optimizer's step with a rank's own parameters, and what everybody else sees of it."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.optimizers.narrowed_optimizer import NarrowedOptimizer
from lightning_pipeoffload.runtime.shapes.remote_tensor import GradientAge, RemoteTensor
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot


def make(kind=torch.optim.SGD, **options):
    own = nn.Parameter(torch.ones(2))
    place = nn.Linear(2, 2, bias=False)
    remote = RemoteTensor.standing_for(
        Slot("weight", place, "weight", "_parameters"), "weight (of stage 1)", torch.device("cpu")
    )
    remote.age = GradientAge()
    optimizer = kind([own, remote], lr=0.5, **options)
    NarrowedOptimizer(optimizer, remote.age)
    return optimizer, own, remote


@pytest.mark.parametrize("positional", [True, False])
def test_the_closure_sees_all_and_the_step_its_own(positional):
    optimizer, own, remote = make(torch.optim.Adam)
    seen = []

    def closure():
        seen.append(optimizer.param_groups[0]["params"])
        own.grad = torch.ones(2)
        return torch.tensor(3.0)

    result = optimizer.step(closure) if positional else optimizer.step(closure=closure)
    assert result == 3
    assert own.lt(1).all()
    assert [*map(id, seen[0])] == [id(own), id(remote)]
    assert [*map(id, optimizer.param_groups[0]["params"])] == [id(own), id(remote)]
    assert [*optimizer.state] == [own]


def test_groups_that_hooks_add_in_a_closure_stay():
    optimizer, own, remote = make()
    other = nn.Parameter(torch.ones(3))

    def closure():
        optimizer.add_param_group({"params": [other], "lr": 0.25})
        other.grad = torch.ones(3)

    optimizer.step(closure)
    assert other.eq(0.75).all()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


def test_after_an_error_in_the_closure_all_are_there():
    optimizer, _, _ = make()

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_after_an_error_in_the_step_the_next_step_sees_all_again():
    optimizer, own, _ = make()
    own.grad = torch.ones(2)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_what_is_set_to_zero_has_no_gradient_elsewhere_either():
    optimizer, own, remote = make()
    own.grad = torch.ones(2)
    remote.age.change()
    assert remote.grad.shape == (2, 2)
    optimizer.zero_grad()
    assert own.grad is None
    assert remote.grad is None


def test_hooks_after_a_step_see_all():
    optimizer, _, _ = make()
    seen = []
    optimizer.register_step_post_hook(
        lambda *_: seen.append(len(optimizer.param_groups[0]["params"]))
    )
    optimizer.step()
    assert seen == [2]


def test_hooks_registered_before_training_starts_see_all():
    own, place = nn.Parameter(torch.ones(2)), nn.Linear(2, 2, bias=False)
    slot = Slot("weight", place, "weight", "_parameters")
    remote = RemoteTensor.standing_for(slot, "weight (of stage 1)", torch.device("cpu"))
    optimizer = torch.optim.SGD([own, remote], lr=0.5)
    narrowed = NarrowedOptimizer(optimizer, GradientAge())
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(len(optimizer.param_groups[0]["params"]))
    )
    narrowed.come_last()
    optimizer.step()
    assert seen == [2]
