"""On-demand communication between processes on accelerators, or on the only one there is.

Two ranks share one device over gloo, where there are no more; else each has its own.
"""

import subprocess
import sys
from functools import partial

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.support import failing_on_demand, on_demand_fits
from tests.support.on_demand_fits import assert_same, devices, fit_rank, made, plain_fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
FLOAT = partial(made, dtype=torch.float32)


def as_float16():
    return {"plugins": [MixedPrecision("16-mixed", devices(1)[0].type)]}


# Of the fit, of the plain loop, and how far they may be apart.
WAYS = {
    "gathers and pushes": ({}, {}, 1e-9),
    "deterministic": ({"options": {"deterministic": True}}, {}, 1e-9),
    "accumulated": ({"accumulate_grad_batches": 2}, {"accumulate": 2}, 1e-9),
    "bf16-mixed": (
        {"make": FLOAT, "precision": "bf16-mixed"},
        {"make": FLOAT, "autocast": torch.bfloat16},
        2e-2,
    ),
    "16-mixed": (
        {"make": FLOAT, "call": as_float16},
        {"make": FLOAT, "autocast": torch.float16},
        2e-2,
    ),
}


def fit_on_device(counts, **options):
    return fit_rank(counts, accelerator="gpu", **options)


@pytest.mark.parametrize("counts", [(3, 1), (0, 0, 1, 4)])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_weights_are_those_of_one_process(ranks, way, counts):
    ours, plain, relative = WAYS[way]
    expected = plain_fit(counts, device=devices(1)[0], **plain)
    for rank in ranks(len(counts)).run(partial(fit_on_device, counts, **ours)):
        assert_same(rank, expected, relative)


def fit_twice(counts):
    """Fit in two runs, between which memory is shared anew."""
    module = made()
    fit_on_device(counts, make=lambda: module)
    module.gradients.clear()
    return fit_on_device(counts, make=lambda: module)


def test_a_second_fit_shares_anew(ranks):
    module = made()
    plain_fit((3, 1), lambda: module, device=devices(1)[0])
    expected = plain_fit((3, 1), lambda: module, device=devices(1)[0])
    for rank in ranks(2).run(fit_twice, (3, 1)):
        assert_same(rank, expected, 1e-9)


class Slow(on_demand_fits.Texts):
    """Keeps its device busy, so that a rank which does not wait for it reads what is not there."""

    def forward(self, tokens):
        big = torch.ones(4096, 4096, device=tokens.device)
        for _ in range(8):
            big = big @ big * 1e-4
        return super().forward(tokens) + 0 * big[0, 0].double()


@pytest.mark.parametrize("counts", [(3, 1), (1, 3)])
def test_nobody_reads_before_the_device_has_written(ranks, counts):
    expected = plain_fit(counts, partial(made, Slow), device=devices(1)[0])
    for rank in ranks(2).run(partial(fit_on_device, counts, make=partial(made, Slow))):
        assert_same(rank, expected, 1e-9)


@pytest.mark.parametrize("place", ["push", "gather", "barrier"])
def test_a_killed_rank_is_named(place):
    script = [sys.executable, failing_on_demand.__file__, place, "kill", "1", "gpu"]
    run = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert run.returncode != 0
    because = "global rank 1, which was killed by SIGKILL"
    assert f"[pipeoffload] global rank 0 stops because of {because}" in run.stderr.splitlines()
