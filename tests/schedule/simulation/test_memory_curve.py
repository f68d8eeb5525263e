import pytest

from lightning_pipeoffload.schedule import SCHEDULES, Costs, Timeline, build, simulate
from lightning_pipeoffload.schedule.simulation.memory import host_memory_curves, memory_curves
from tests.support.plans import plan


def curves(text, costs):
    return memory_curves(simulate(plan(text), costs), costs)


def test_memory_comes_at_the_start_of_f_and_goes_at_the_end_of_w():
    assert curves("0F0 0B0 0W0", Costs(1, 2, 3)) == [[(0, 1), (3, 1), (6, 0)]]


def test_b_leaves_the_weight_residue():
    costs = Costs(1, 2, 3, activation=4, weight_residue=1)
    assert curves("0F0 0B0 0W0", costs) == [[(0, 4), (3, 1), (6, 0)]]
    more = Costs(1, 2, 3, activation=4, weight_residue=5)
    assert curves("0F0 0B0 0W0", more) == [[(0, 4), (1, 5), (6, 0)]]


def test_what_is_offloaded_is_gone_from_free_to_reload():
    costs = Costs(1, [2, 3], 3, offload=2, reload=1)
    text = "0F0 0OFFLOAD0 1F0 0FREE0 1BW0 0RELOAD0 0BW0"
    assert curves(text, costs) == [[(0, 1), (1, 2), (3, 1), (9, 1), (15, 0)]]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "gis_h", "uniform"])
def test_the_highest_point_is_the_peak(name):
    assert name in SCHEDULES
    timeline = simulate(build(name, 4, 8), Costs.unit())
    highest = tuple(max(m for _, m in curve) for curve in memory_curves(timeline, Costs.unit()))
    assert highest == timeline.peak_memory


def test_a_rank_without_events_has_no_memory():
    assert memory_curves(Timeline((), (0.0,)), Costs.unit()) == [[(0, 0)]]


def test_the_host_has_it_from_the_start_of_the_copy_to_the_end_of_w():
    costs = Costs(1, 1, 1, activation=4, weight_input=1, offload=2, reload=1)
    text = "0F0 0OFFLOAD0 0FREE0 0RELOAD0 0B0 0W0"
    assert host_memory_curves(simulate(plan(text), costs), costs) == [
        [(0.0, 0.0), (1.0, 4.0), (4.75, 1.0), (5.75, 0.0)]
    ]
