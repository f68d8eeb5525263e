"""Weight gradients are regrouped by parameter: the order within one stays, and so do the bits."""

import torch
from torch import nn

from lightning_pipeoffload.runtime.weight_grad.regrouping import RegroupedWeightGrads

LAYERS = "cba"  # in the order of a backward


def add_to(parameter, value):
    def compute():
        parameter.grad = value if parameter.grad is None else parameter.grad + value

    return compute


def test_a_parameter_is_final_before_the_next_one_begins_and_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    values = {n: [torch.randn(5, generator=generator) for _ in range(4)] for n in LAYERS}
    tensors = {name: nn.Parameter(torch.zeros(5)) for name in LAYERS}
    plain = {name: sum(found[1:], found[0]) for name, found in values.items()}
    waiting = [
        [(add_to(tensors[n], values[n][m]), (tensors[n],)) for n in LAYERS] for m in range(4)
    ]
    final = []

    def finish(parameter):
        name = next(n for n, tensor in tensors.items() if tensor is parameter)
        assert torch.equal(parameter.grad, plain[name])
        later = LAYERS[LAYERS.index(name) + 1 :]
        assert all(tensors[other].grad is None for other in later)
        final.append(name)

    regrouped = RegroupedWeightGrads(waiting)
    assert [id(p) for p in regrouped.parameters] == [id(tensors[n]) for n in LAYERS]
    regrouped.run(finish)
    assert final == list(LAYERS)


def test_what_several_layers_use_is_final_with_the_last_of_them():
    tied, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    ran, final = [], []
    waiting = [
        [
            (lambda m=m: ran.append(f"head {m}"), (tied,)),
            (lambda m=m: ran.append(f"both {m}"), (own, tied)),
            (lambda m=m: ran.append(f"own {m}"), (own,)),
        ]
        for m in range(2)
    ]
    regrouped = RegroupedWeightGrads(waiting)
    assert [p is tied for p in regrouped.parameters] == [True, False]
    regrouped.run(lambda p: final.append((p is tied, len(ran))))
    assert ran == ["head 0", "head 1", "both 0", "both 1", "own 0", "own 1"]
    assert final == [(True, 4), (False, 6)]


def test_weights_that_were_cast_or_viewed_count_for_what_they_were_made_of():
    first, second = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    weights = [first.bfloat16().T, torch.cat([first, second]).half()]
    regrouped = RegroupedWeightGrads([[(lambda: None, (weight,)) for weight in weights]])
    assert {id(p) for p in regrouped.parameters} == {id(first), id(second)}
    final = []
    regrouped.run(final.append)
    assert [p is first for p in final] in ([True, False], [False, True])
