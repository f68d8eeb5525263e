"""Copies are measured on this machine."""

import pytest
import torch

from lightning_pipeoffload.runtime.measure.link_speed import CopySpeed, measure_copy_speed


def test_both_directions_are_measured():
    speed = measure_copy_speed(torch.device("cpu"), num_bytes=1 << 20)
    assert speed.to_host > 1e6
    assert speed.to_device > 1e6
    assert speed.overlap > 0.1


@pytest.mark.parametrize(
    ("overlap", "lanes", "slowed_by"), [(0.5, 2, 1.0), (0.75, 2, 1.5), (0.9, 1, 1.0), (1.3, 1, 1.0)]
)
def test_directions_share_a_lane_where_they_slow_each_other(overlap, lanes, slowed_by):
    speed = CopySpeed(1.0, 1.0, overlap)
    assert (speed.num_lanes, speed.slowed_by) == (lanes, slowed_by)
