"""Costs of stages from the measured costs of blocks."""

import pytest

from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.measure.block_costs import beside_blocks, costs_of_stages
from lightning_pipeoffload.schedule import Costs


def costs(*actions):
    """Costs of stages, by the lengths of their F, B and W."""
    forward, for_input, for_weight = zip(*actions, strict=True)
    return Costs(forward, for_input, for_weight)


def measured(lengths, beside=2.0):
    return costs(*[[length + beside] * 3 for length in lengths])


def cut(*lengths):
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return [
        Stage(index, range(end - length, end), frozenset())
        for index, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]


def test_what_an_action_takes_beside_its_blocks_counts_once_in_a_stage():
    blocks, first_cut = measured([1, 3, 5, 7]), measured([4, 12])
    beside = beside_blocks(blocks, 4, first_cut, 2)
    assert set(beside.values()) == {2.0}
    for lengths, expected in (([4], [16]), ([1, 3], [1, 15]), ([1, 1, 1, 1], [1, 3, 5, 7])):
        stages = costs_of_stages(blocks, cut(*lengths), beside)
        assert stages.per_stage("backward_input", len(lengths)) == pytest.approx(
            [length + 2 for length in expected]
        )


def test_a_measurement_that_is_off_makes_no_action_shorter_than_its_blocks():
    blocks = measured([1, 3, 5, 7])
    assert set(beside_blocks(blocks, 4, measured([9, 20]), 2).values()) == {0.0}
    assert set(beside_blocks(blocks, 4, measured([0, 0], 0.0), 2).values()) == {3.0}
