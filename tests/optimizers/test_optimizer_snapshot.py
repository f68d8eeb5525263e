"""A step that is taken back and repeated leaves what one leaves that was right at once."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from lightning_pipeoffload.optimizers import (
    MasterWeights,
    OptimizerSnapshot,
    optimizer_snapshot,
    supports_snapshot,
)

NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "one by one": partial(torch.optim.AdamW, foreach=False),
    "fused": partial(torch.optim.Adam, amsgrad=True, fused=True),
    "adagrad": torch.optim.Adagrad,
    "rprop": torch.optim.Rprop,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
    "nesterov": lambda p, lr: torch.optim.SGD(p, **{**NESTEROV, "lr": lr}),
}


def weights():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(3)]


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def halve(parameters):
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def step_right(optimizer, parameters):
    halve(parameters)
    optimizer.step()


def step_wrong(snapshot, optimizer, parameters):
    snapshot.save()
    optimizer.step()
    snapshot.record_step_changes()
    snapshot.repeat(lambda: halve(parameters))
    snapshot.free_gradients()


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_kept_of_the_first_step_goes_on_with_the_optimizer(name):
    found, expected = [], []
    for results, repeats in ((found, True), (expected, False)):
        parameters = weights()
        optimizer = OPTIMIZERS[name](parameters, lr=0.1)
        snapshot = OptimizerSnapshot(optimizer)
        state = None
        for step in range(3):
            give_gradients(parameters, step)
            if not repeats:
                step_right(optimizer, parameters)
            elif step:
                step_wrong(snapshot, optimizer, parameters)
            else:  # somebody takes the state before it is known to be wrong
                snapshot.save()
                optimizer.step()
                snapshot.record_step_changes()
                state = optimizer.state_dict()
                snapshot.repeat(lambda own=parameters: halve(own))
            state = state or optimizer.state_dict()
            results.append(copy.deepcopy((state["state"], parameters)))
    assert_same(found, expected)


def test_gradients_are_kept_when_an_option_lets_the_step_write_into_them():
    results = []
    for repeats in (True, False):
        parameters = weights()
        optimizer = torch.optim.SGD(parameters, weight_decay=0.1, **NESTEROV)
        snapshot = OptimizerSnapshot(optimizer)
        for step in range(6):
            give_gradients(parameters, step)
            if step == 4:
                optimizer.param_groups[0]["weight_decay"] = 0.0
            if repeats:
                step_wrong(snapshot, optimizer, parameters)
            else:
                step_right(optimizer, parameters)
        results.append(parameters)
    assert_same(*results)


def test_gradients_that_a_hook_has_written_since_are_kept():
    parameters = weights()
    optimizer = torch.optim.SGD(parameters, **NESTEROV)
    snapshot = OptimizerSnapshot(optimizer)
    give_gradients(parameters, 0)
    snapshot.save()
    halve(parameters[:2])
    parameters[2].grad = None
    snapshot.save_if_changed()
    before = [p.grad.clone() for p in parameters[:2]]
    optimizer.step()
    snapshot.record_step_changes()
    snapshot.undo()
    assert_same([p.grad for p in parameters[:2]], before)
    assert not optimizer.state


def test_what_other_replicas_step_has_no_copy_and_no_master():
    parameters, masters = [p.bfloat16() for p in map(torch.detach, weights())], MasterWeights()
    optimizer = torch.optim.AdamW(parameters)
    snapshot = OptimizerSnapshot(optimizer, masters, lambda p: p is not parameters[0])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    snapshot.save()
    assert [*map(masters.has_current_master, parameters)] == [False, True, True]
    # Readers wait for all of them: the other replica sends its own again if the step is repeated.
    assert {*parameters} <= {*snapshot.tensors_changed_by_undo()}


def test_gradients_are_let_go_when_the_step_is_known_to_be_right():
    parameters = weights()
    optimizer = torch.optim.SGD(parameters, **NESTEROV)
    snapshot = OptimizerSnapshot(optimizer)
    give_gradients(parameters, 0)
    snapshot.save()
    optimizer.step()
    snapshot.record_step_changes()
    snapshot.free_gradients()
    gradient = weakref.ref(parameters[0].grad)
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None


def test_room_is_asked_for_again_when_state_appears(monkeypatch):
    """Before the first step most optimizers have none."""
    parameters = weights()
    room = 1.5 * sum(p.nbytes for p in parameters)
    monkeypatch.setattr(optimizer_snapshot, "_bytes_left", lambda device: room)
    optimizer = torch.optim.AdamW(parameters)
    snapshot = OptimizerSnapshot(optimizer)
    found = []
    for step in range(2):
        give_gradients(parameters, step)
        step_wrong(snapshot, optimizer, parameters)
        found.append(snapshot.has_room)
    assert found == [True, False]


def clear(optimizer, parameters):
    optimizer.state.clear()


def set_anew(optimizer, parameters):
    optimizer.state[parameters[0]]["exp_avg"] = torch.ones(4, 3)
    del optimizer.state[parameters[1]]


def add_group(optimizer, parameters):
    new = nn.Parameter(torch.ones(2))
    new.grad = torch.ones(2)
    optimizer.add_param_group({"params": [new]})


@pytest.mark.parametrize("change", [clear, set_anew, add_group])
def test_what_hooks_have_made_of_state_and_groups_since_stays(change):
    results = []
    for repeats in (True, False):
        parameters = weights()
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        snapshot = OptimizerSnapshot(optimizer)
        for step in range(3):
            give_gradients(parameters, step)
            if repeats:
                snapshot.save()
                optimizer.step()
                snapshot.record_step_changes()
                change(optimizer, parameters)
                snapshot.repeat(lambda own=parameters: halve(own))
            else:
                step_right(optimizer, parameters)
                change(optimizer, parameters)
        results.append((parameters, optimizer.state_dict()))
    assert_same(*results)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_of_torch_are_known(name):
    assert supports_snapshot(OPTIMIZERS[name](weights(), lr=0.1))


def test_others_are_not():
    class Own(torch.optim.SGD):
        pass

    assert not supports_snapshot(Own(weights(), lr=0.1))
    assert not supports_snapshot(torch.optim.LBFGS(weights()))


def test_copies_may_take_what_the_device_has_left_by_other_processes(monkeypatch):
    device, accelerator = torch.device("cuda", 0), torch.accelerator
    monkeypatch.setattr(accelerator, "get_memory_info", lambda device: (30, 100))
    monkeypatch.setattr(accelerator, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(accelerator, "max_memory_reserved", lambda device: 25)
    assert optimizer_snapshot.bytes_usable(device) == 45
    assert optimizer_snapshot._bytes_left(device) == 20
