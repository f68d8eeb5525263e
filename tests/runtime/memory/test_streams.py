import threading

import pytest
import torch

from lightning_pipeoffload.runtime.memory.streams import CopyError, InlineLane, LateLane, make_lanes

LANES = {"inline": InlineLane(), "late": LateLane(lambda num_bytes: None)}


@pytest.mark.parametrize(
    "lane", [InlineLane(), LateLane(lambda num_bytes: None)], ids=["inline", "late"]
)
def test_a_copy_is_there_once_it_was_waited_for(lane):
    target = torch.zeros(3)
    lane.copy(target, torch.ones(3), "ones")
    lane.hold_compute(lane.mark())
    assert target.sum() == 3


@pytest.fixture
def gate():
    """Let the copies of a lane wait for what the test does."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_late_lane_is_late_and_blocks_who_waits(gate):
    lane, target, order = LateLane(lambda num_bytes: gate.wait()), torch.zeros(1), []
    lane.copy(target, torch.ones(1), "one")
    assert target.item() == 0
    waiting = threading.Thread(
        target=lambda: lane.hold_compute(lane.mark()) or order.append("passed")
    )
    waiting.start()
    order.append("opened")
    gate.set()
    waiting.join()
    assert (order, target.item()) == (["opened", "passed"], 1)


def test_the_delay_is_told_the_bytes():
    told = []
    lane = LateLane(told.append)
    lane.copy(torch.zeros(3), torch.ones(3), "ones")
    lane.hold_compute(lane.mark())
    assert told == [12]


def test_a_lane_waits_for_another(gate):
    first, second = LateLane(lambda num_bytes: gate.wait()), LateLane(lambda num_bytes: None)
    middle, last = torch.zeros(1), torch.zeros(1)
    first.copy(middle, torch.ones(1), "one")
    second.wait_for(first.mark())
    second.copy(last, middle, "the same")
    gate.set()
    second.hold_compute(second.mark())
    assert last.item() == 1


@pytest.mark.parametrize(
    "lane", [InlineLane(), LateLane(lambda num_bytes: None)], ids=["inline", "late"]
)
def test_a_failed_copy_is_named(lane):
    def copy_and_wait():
        lane.copy(torch.zeros(3), torch.ones(2), "a pair")
        lane.copy(torch.zeros(1), torch.ones(1), "a copy after it")
        lane.hold_compute(lane.mark())

    with pytest.raises(CopyError, match="the copy of a pair failed"):
        copy_and_wait()


def test_the_cpu_needs_no_lanes():
    assert isinstance(make_lanes(torch.device("cpu")).d2h, InlineLane)
