"""Copies are measured on this machine."""

import pytest
import torch

from lightning_pipeoffload.runtime.copy_speed import CopySpeed, measure_copy_speed


def test_both_directions_are_measured():
    speed = measure_copy_speed(torch.device("cpu"), num_bytes=1 << 20)
    assert speed.to_host > 1e6
    assert speed.to_device > 1e6
    assert speed.overlap > 0.1


@pytest.mark.parametrize(("overlap", "lanes"), [(0.5, 2), (0.75, 2), (0.9, 1), (1.3, 1)])
def test_directions_share_a_lane_where_they_slow_each_other(overlap, lanes):
    assert CopySpeed(1.0, 1.0, overlap).num_lanes == lanes
