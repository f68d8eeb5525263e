"""Times of a rank's steps, on a clock that the test sets."""

import pytest
import torch

from lightning_pipeoffload.runtime.device import ActionTimer, accelerator, timing
from lightning_pipeoffload.schedule import Action, Kind

F, B = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)


class SetClock:
    """Tells the moments that it was given, one after the other."""

    def __init__(self):
        self.moments = []

    def now(self):
        return self.moments.pop(0)

    def seconds(self, start, end):
        return end - start


@pytest.fixture
def run_step(monkeypatch):
    """Run a step of an F, which waits in between, and a B, at the given moments."""
    clock = SetClock()
    monkeypatch.setattr(timing, "HostClock", lambda: clock)
    timer = ActionTimer(torch.device("cpu"))

    def run(*times, backwards=(B,)):
        clock.moments.extend(times)
        timer.start_step()
        timer.start_action()
        timer.pause()
        timer.resume()
        timer.end_action(F)
        timer.start_action()
        timer.end_action(*backwards)
        timer.end_step()
        return timer

    return run


def test_a_wait_is_no_work(run_step):
    timer = run_step(0, 0, 1, 7, 8, 8, 9, 10)
    assert timer.action_seconds() == {(Kind.F, 0): 2, (Kind.B, 0): 1}
    assert timer.step_seconds() == 10
    assert timer.idle_share() == 0.7


def test_a_step_lasts_until_the_next_one(run_step):
    run_step(0, 0, 1, 7, 8, 8, 9, 10)
    timer = run_step(20, 20, 20, 20, 20, 20, 20, 21)
    assert timer.step_seconds() == 20
    assert timer.idle_share() == 1 - 3 / 20
    assert timer.boundary_share() == 0.5


def test_a_step_that_took_longer_than_most_is_no_negative_bubble(run_step):
    run_step(0, 0, 1, 1, 2, 2, 3, 3)  # 3 of 4 seconds
    run_step(4, 4, 14, 14, 24, 24, 34, 34)  # 30 of 40
    run_step(44, 44, 54, 54, 55, 55, 56, 56)  # 12 of 12
    timer = run_step(56, 56, 56, 56, 56, 56, 56, 57)
    assert timer.step_seconds() == 12
    assert timer.idle_share() == 0.25


def test_steps_that_have_ended_since_one(run_step):
    timer = run_step(0, 0, 1, 1, 2, 2, 3, 3)
    [first] = timer.kept_steps_after(None)
    assert timer.kept_steps_after(first) == []
    run_step(4, 4, 5, 5, 6, 6, 7, 7)
    run_step(8, 8, 9, 9, 10, 10, 11, 11)
    second, third = timer.kept_steps_after(first)
    assert (second.start, third.start) == (4, 8)
    assert timer.current_step is third
    assert timer.busy_seconds(third) == 3


def test_actions_that_ran_as_one_share_their_time(run_step):
    as_one = [Action(Kind.W, 0, microbatch) for microbatch in range(3)]
    timer = run_step(0, 0, 0, 0, 0, 1, 7, 8, backwards=as_one)
    assert timer.action_seconds() == {(Kind.F, 0): 0, (Kind.W, 0): 2}
    assert timer.idle_share() == 1 - 6 / 8


class SetEvent:
    """An event of an accelerator whose clock the test sets."""

    device_seconds = 5.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.device_seconds

    def query(self):
        return self.at < self.device_seconds

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def test_moments_of_an_accelerator_as_the_hosts(monkeypatch):
    def pass_time():
        SetEvent.device_seconds += 2

    monkeypatch.setattr(torch, "Event", SetEvent)
    monkeypatch.setattr(torch.accelerator, "synchronize", pass_time)
    monkeypatch.setattr(timing.time, "perf_counter", iter((99.0, 101.0)).__next__)
    clock = timing.DeviceClock()
    moment = clock.now()
    assert not clock.has_passed(moment)
    read, error = clock.host_time_converter()
    assert clock.has_passed(moment)
    assert (read(moment), error) == (98, 1)


def test_an_accelerator_that_is_not_in_use_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(accelerator, "accelerator_module", lambda: torch.cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append("waited"))
    timing.synchronized_time()
    assert not waits
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    timing.synchronized_time()
    assert waits
