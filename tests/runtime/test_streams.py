import time

import pytest
import torch

from lightning_pipeoffload.runtime.streams import CopyError, InlineLane, LateLane, make_lanes


@pytest.mark.parametrize("lane", [InlineLane(), LateLane(0.001)], ids=["inline", "late"])
def test_a_copy_is_there_once_it_was_waited_for(lane):
    target = torch.zeros(3)
    lane.copy(target, torch.ones(3), "ones")
    lane.hold_compute(lane.mark())
    assert target.sum() == 3


def test_a_late_lane_is_late_and_blocks_who_waits():
    lane, target, started = LateLane(0.05), torch.zeros(1), time.perf_counter()
    lane.copy(target, torch.ones(1), "one")
    assert target.item() == 0
    lane.hold_compute(lane.mark())
    assert time.perf_counter() - started >= 0.05


def test_a_lane_waits_for_another():
    first, second = LateLane(0.05), LateLane(0.0)
    middle, last = torch.zeros(1), torch.zeros(1)
    first.copy(middle, torch.ones(1), "one")
    second.wait_for(first.mark())
    second.copy(last, middle, "the same")
    second.hold_compute(second.mark())
    assert last.item() == 1


@pytest.mark.parametrize("lane", [InlineLane(), LateLane(0.0)], ids=["inline", "late"])
def test_a_failed_copy_is_named(lane):
    def copy_and_wait():
        lane.copy(torch.zeros(3), torch.ones(2), "a pair")
        lane.copy(torch.zeros(1), torch.ones(1), "a copy after it")
        lane.hold_compute(lane.mark())

    with pytest.raises(CopyError, match="the copy of a pair failed"):
        copy_and_wait()


def test_the_cpu_needs_no_lanes():
    assert isinstance(make_lanes(torch.device("cpu")).d2h, InlineLane)
