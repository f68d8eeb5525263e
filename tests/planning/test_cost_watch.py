"""A rank is off its plan when many steps are, in one way, and by more than noise."""

import random
from statistics import median
from types import SimpleNamespace

import pytest

from lightning_pipeoffload.planning.cost_watch import NUM_LOOKS, STEPS_BETWEEN_LOOKS, CostWatch
from lightning_pipeoffload.runtime.step.saved_memory import SavedMemory
from lightning_pipeoffload.schedule import Costs, Kind

KINDS = (Kind.F, Kind.B, Kind.W)
PLANNED = Costs([1.0, 5.0], [1.0, 5.0], [2.0, 5.0])


class Timer:
    """Has measured a step more at each look, as long as it is told."""

    def __init__(self):
        self.steps, self.ends = [], True
        self.clock = SimpleNamespace(has_passed=lambda moment: self.ends)

    def run(self, **times):
        self.steps.append(SimpleNamespace(end=0, times=times))

    def ended_after(self, step):
        return self.steps[self.steps.index(step) + 1 :] if step in self.steps else self.steps

    def seconds_in(self, steps):
        names = steps[-1].times
        return {(Kind(n), 0): median(step.times[n] for step in steps) for n in names}


class Watched:
    def __init__(self, costs=PLANNED, left_out=0):
        self.timer, self.memory = Timer(), SavedMemory()
        self.memory.count_as(100, 60, 60)
        stages = {0: SimpleNamespace(memory=self.memory)}
        self.watch = CostWatch(SimpleNamespace(timer=self.timer, stages=stages))
        self.watch.start(costs, 2, left_out)

    def look(self, times=1, **seconds):
        for _ in range(times):
            self.look_at([seconds] * STEPS_BETWEEN_LOOKS)
        return self.watch.has_drifted

    def look_at(self, steps):
        for seconds in steps:
            self.timer.run(**seconds)
        self.watch.look()
        return self.watch.has_drifted


def test_it_takes_all_of_the_last_looks():
    watched = Watched()
    assert not watched.look(NUM_LOOKS - 1, F=1.5, B=1.5, W=3.0)
    assert watched.look(F=1.5, B=1.5, W=3.0)
    assert watched.watch.times == (4.0, 6.0)
    assert not watched.look(F=1.0, B=1.0, W=2.0)


@pytest.mark.parametrize(
    ("seconds", "drifts"),
    [
        ({"F": 1.08, "B": 1.08, "W": 2.1}, False),
        ({"F": 1.12, "B": 1.12, "W": 2.24}, True),
        ({"F": 0.85, "B": 0.85, "W": 1.7}, True),
        ({"F": 1.3, "B": 0.7, "W": 2.0}, True),
        ({"F": 1.0, "BW": 3.2}, False),
        ({"F": 1.0, "BW": 3.9}, True),
    ],
    ids=["8%", "12%", "faster", "one kind for another", "fused", "fused and slower"],
)
def test_more_than_a_tenth_counts(seconds, drifts):
    assert Watched().look(NUM_LOOKS, **seconds) == drifts


def test_noise_and_bursts_do_not_count():
    random.seed(3)
    watched = Watched()
    for _ in range(1000):
        noisy = [
            {kind: s * random.uniform(0.8, 1.25) for kind, s in (("F", 1), ("B", 1), ("W", 2))}
            for _ in range(STEPS_BETWEEN_LOOKS)
        ]
        assert not watched.look_at(noisy)
    for _ in range(20):
        assert not watched.look(NUM_LOOKS - 1, F=3.0, B=3.0, W=6.0)
        assert not watched.look(F=1.0, B=1.0, W=2.0)


def test_without_planned_costs_the_first_steps_are_what_counts():
    watched = Watched(None)
    assert not watched.look(3 * NUM_LOOKS, F=7.0, B=7.0, W=7.0)
    assert watched.look(NUM_LOOKS, F=9.0, B=9.0, W=9.0)
    assert watched.watch.times == (21.0, 27.0)


def test_looks_can_be_left_out():
    watched = Watched(left_out=3)
    assert not watched.look(3 + NUM_LOOKS - 1, F=2.0, B=2.0, W=4.0)
    assert watched.look(F=2.0, B=2.0, W=4.0)


def test_a_step_that_the_device_has_not_ended_is_not_waited_for():
    watched = Watched()
    watched.timer.ends = False
    assert not watched.look(20, F=2.0, B=2.0, W=4.0)


class Store:
    def __init__(self, saved, for_weight):
        self.saved, self.for_weight = saved, for_weight

    def saved_bytes(self, *parts):
        return self.for_weight if parts else self.saved

    def leave_for_weight(self):
        self.saved = self.for_weight


def step(memory, saved, for_weight):
    """Run a microbatch of a step; return whether it was measured."""
    is_due = memory.is_due
    store = Store(saved, for_weight) if is_due else None
    memory.measure_forward(store)
    memory.measure_backward(SimpleNamespace(flops=0), store)
    return is_due


def test_memory_is_measured_only_where_times_are_off_and_counts_when_ranks_plan_anew():
    watched = Watched()
    memory = watched.memory
    watched.look(20, F=1.0, B=1.0, W=2.0)
    assert not memory.is_due
    for saved in (300, 400, 350, 300, 300):
        watched.look(F=3.0, B=3.0, W=6.0)
        assert step(memory, saved, saved // 2)
        assert not step(memory, 999, 999)
    assert memory.activation_bytes == 100
    watched.watch.accept()
    assert (memory.activation_bytes, memory.weight_input_bytes) == (400, 200)
    assert memory.residue_bytes == 200


def test_memory_stays_where_times_come_back():
    watched = Watched()
    watched.look(2, F=3.0, B=3.0, W=6.0)
    step(watched.memory, 50, 10)
    watched.look(2, F=3.0, B=3.0, W=6.0)
    watched.look(F=1.0, B=1.0, W=2.0)
    watched.watch.accept()
    assert watched.memory.activation_bytes == 100
