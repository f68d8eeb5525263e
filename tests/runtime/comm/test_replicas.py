"""The first use of a pending parameter waits for it."""

import copy

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.comm import PendingParameters, PendingParametersMode

COMING = nn.Parameter(torch.zeros(2, 3))
OTHER = torch.zeros(3)
ROW = COMING.detach()[0]


def waits(call):
    """Return whether a call waits, and what it has then."""
    COMING.data.zero_()
    pending = PendingParameters(may_wait=True)
    pending.defer_or_wait(lambda: COMING.data.fill_(1.0), [COMING])
    with PendingParametersMode(pending):
        call()
    return not pending


@pytest.mark.parametrize(
    "call",
    [
        lambda: COMING.sum(),
        lambda: torch.stack([OTHER, ROW]),
        lambda: torch._foreach_add([OTHER, COMING[1]], 1),
        lambda: COMING.data.add_(1),
        lambda: copy.deepcopy(COMING),
        lambda: COMING.tolist(),
        lambda: COMING.detach().numpy(),
        lambda: nn.functional.linear(OTHER, weight=COMING),
        lambda: repr(COMING),
    ],
)
def test_a_call_that_is_given_one_waits(call):
    assert waits(call)


@pytest.mark.parametrize(
    "call",
    [
        lambda: OTHER + 1,
        lambda: COMING.data,
        lambda: (COMING.requires_grad, COMING.grad, COMING.shape),
        lambda: torch.ones(2, device="meta").sum(),
        lambda: torch.empty(0).add_(1),
    ],
)
def test_others_go_on(call):
    assert not waits(call)


def test_where_nothing_may_wait_they_are_there_at_once():
    come = []
    pending = PendingParameters()
    pending.defer_or_wait(lambda: come.append(1), [COMING])
    assert come == [1]
    assert not pending
