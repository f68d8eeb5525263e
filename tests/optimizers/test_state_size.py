"""What an optimizer keeps is seen on shapes, or in proportion where its step needs values."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.optimizers.copy import NotRebuiltError
from lightning_pipeoffload.optimizers.state_size import measure_states
from lightning_pipeoffload.runtime.making.module_of_shapes import making_shapes


def states(make, *shapes, dtype=torch.float32):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    found = measure_states([make(parameters)])
    return [found[id(parameter)] for parameter in parameters]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (torch.optim.AdamW, [2 * 4 * 96 * 128 + 4, 2 * 4 * 96 + 4]),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), [3 * 4 * 96 * 128 + 4, 3 * 4 * 96 + 4]),
        (lambda p: torch.optim.AdamW(p, fused=True), [2 * 4 * 96 * 128 + 12, 2 * 4 * 96]),
        (lambda p: torch.optim.SGD(p, lr=0.1), [0, 0]),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), [4 * 96 * 128, 4 * 96]),
    ],
)
def test_states_are_those_of_a_step(make, found):
    assert states(make, (96, 128), (96,)) == found


def test_an_optimizer_that_factorizes_keeps_little():
    (found,) = states(torch.optim.Adafactor, (512, 512))
    assert 0 < found < 4 * 512 * 512 / 16


def test_a_state_has_its_parameters_dtype():
    plain, half = (states(torch.optim.AdamW, (64, 64), dtype=d)[0] for d in DTYPES)
    assert plain - 4 == 2 * (half - 4)


DTYPES = (torch.float32, torch.bfloat16)


def test_frozen_parameters_have_none_and_shapes_have_theirs():
    with making_shapes():
        module = nn.Linear(1 << 13, 1 << 13)
    module.bias.requires_grad_(False)
    found = measure_states([torch.optim.AdamW(module.parameters())])
    assert found[id(module.bias)] == 0
    assert found[id(module.weight)] == 2 * 4 * (1 << 26) + 4


def test_an_optimizer_that_cannot_be_made_again_is_refused():
    class Secret(torch.optim.SGD):
        def __init__(self, parameters, secret):
            super().__init__(parameters, lr=0.1)

    with pytest.raises(NotRebuiltError, match="secret"):
        states(lambda p: Secret(p, 1), (4, 4))
