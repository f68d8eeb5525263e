import threading

import pytest
import torch

from examples.benchmarks.late_lane import LateLane
from lightning_pipeoffload.runtime.memory.streams import CopyError, Lane, make_lanes

both_lanes = pytest.mark.parametrize(
    "lane", [Lane(), LateLane(lambda num_bytes: None)], ids=["inline", "late"]
)


@both_lanes
def test_a_copy_is_there_once_it_was_waited_for(lane):
    target = torch.zeros(3)
    lane.copy(target, torch.ones(3), "ones")
    lane.hold_compute(lane.mark())
    assert target.sum() == 3


def test_a_lane_waits_for_another():
    gate, told = threading.Event(), []
    first, second = LateLane(lambda num_bytes: told.append(num_bytes) or gate.wait()), LateLane(id)
    middle, last = torch.zeros(1), torch.zeros(1)
    first.copy(middle, torch.ones(1), "one")
    second.wait_for(first.mark())
    second.copy(last, middle, "the same")
    assert last.item() == 0
    gate.set()
    second.hold_compute(second.mark())
    assert (last.item(), told) == (1, [4])


@both_lanes
def test_a_failed_copy_is_named(lane):
    def copy_and_wait():
        lane.copy(torch.zeros(3), torch.ones(2), "a pair")
        lane.copy(torch.zeros(1), torch.ones(1), "a copy after it")
        lane.hold_compute(lane.mark())

    with pytest.raises(CopyError, match="the copy of a pair failed"):
        copy_and_wait()


def test_the_cpu_needs_no_lanes():
    assert type(make_lanes(torch.device("cpu")).d2h) is Lane
