import pytest

from lightning_pipeoffload.schedule import Costs, build, simulate
from tests.support.plans import plan


def test_gpipe_does_all_forwards_first():
    assert build("gpipe", num_ranks=2, num_microbatches=2) == plan("""
        0F0 0F1 0BW0 0BW1
        1F0 1F1 1BW0 1BW1
    """)


def test_1f1b_warms_up_with_one_forward_per_later_rank():
    assert build("1f1b", num_ranks=3, num_microbatches=4) == plan("""
        0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3
        1F0 1F1 1BW0 1F2 1BW1 1F3 1BW2 1BW3
        2F0 2BW0 2F1 2BW1 2F2 2BW2 2F3 2BW3
    """)


def test_1f1b_with_fewer_microbatches_than_ranks():
    assert build("1f1b", num_ranks=3, num_microbatches=1) == plan("0F0 0BW0\n1F0 1BW0\n2F0 2BW0")


def test_interleaved_1f1b_goes_through_the_chunks_in_groups():
    assert build("interleaved_1f1b", num_ranks=2, num_microbatches=4) == plan("""
        0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 2BW2 2BW3 0BW2 0BW3
        1F0 1F1 3F0 3BW0 3F1 3BW1 1F2 1BW0 1F3 1BW1 3F2 3BW2 3F3 3BW3 1BW2 1BW3
    """)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 4), (4, 2), (4, 8), (8, 24)])
def test_extra_time_is_p_minus_1_of_everything(name, p, m):
    timeline = simulate(build(name, p, m), Costs(3, 4, 2))
    assert timeline.makespan == (m + p - 1) * (3 + 4 + 2)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 32, 4)])
def test_extra_time_of_interleaved_1f1b(p, m, v):
    c = 0.25
    timeline = simulate(build("interleaved_1f1b", p, m, v), Costs(3, 4, 2, communication=c))
    assert timeline.makespan == m * v * 9 + (p - 1) * 9 + 2 * (p * v - 1) * c


@pytest.mark.parametrize(("p", "m"), [(4, 2), (4, 8), (8, 24)])
def test_peak_memory(p, m):
    unit = Costs.unit()
    assert simulate(build("gpipe", p, m), unit).peak_memory == (m,) * p
    expected = tuple(min(m, p - rank) for rank in range(p))
    assert simulate(build("1f1b", p, m), unit).peak_memory == expected


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (4, 16, 3), (8, 32, 4)])
def test_peak_memory_of_interleaved_1f1b(p, m, v):
    peak = simulate(build("interleaved_1f1b", p, m, v), Costs.unit()).peak_memory
    assert peak[0] == p * v + p - 1
