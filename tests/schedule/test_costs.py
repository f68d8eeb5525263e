"""How long copies take during compute."""

import pytest

from lightning_pipeoffload.schedule import (
    Costs,
    ScheduleError,
    copy_ratios,
    estimated_copy_ratio,
    hideable_copy_share,
    with_copy_ratio,
)


@pytest.mark.parametrize(
    ("hidden_size", "sequence_length", "ratio"),
    [(4096, 4096, 1.71), (4096, 32768, 0.85), (5120, 16384, 1.04), (10240, 32768, 0.52)],
)
def test_formula_1_with_the_papers_rates(hidden_size, sequence_length, ratio):
    found = estimated_copy_ratio(hidden_size, sequence_length, 220e12, 15e9)
    assert found == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan"), "fast"])
def test_rates_must_be_positive(rate):
    with pytest.raises(ScheduleError, match=rf"copy_rate \({rate}\) must be a number, and more"):
        estimated_copy_ratio(4096, 4096, 1e12, rate)


def test_ratio_of_every_stage():
    costs = Costs([1, 2, 0], [1, 2, 0], [1, 2, 0], offload=1, reload=2)
    assert copy_ratios(costs, 3) == (1.0, 0.5, float("inf"))


@pytest.mark.parametrize(
    ("machine", "share"),
    [
        ({}, 0.5),
        ({"copy_lanes": 2}, 1.0),
    ],
)
def test_what_copies_are_free_depends_on_lanes(machine, share):
    assert hideable_copy_share(Costs(1, 1, 1, offload=3, reload=3, **machine), 4) == share


def test_copies_of_a_ratio_are_that_of_each_stage():
    costs = with_copy_ratio(Costs([1, 2], 1, 1), 0.7)
    assert copy_ratios(costs, 2) == pytest.approx([0.7, 0.7])
    assert with_copy_ratio(Costs(1, 1, 1), 1.0).offload == 1.5
