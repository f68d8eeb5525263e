import pytest

from lightning_pipeoffload.schedule import Costs, Kind, build, simulate
from tests.support.plans import plan

F, B, W = 5, 6, 4
SIZES = [(2, 4), (4, 8), (4, 12), (8, 24)]


def test_zb_h1_starts_its_weight_gradients_later_on_later_ranks():
    assert build("zb_h1", num_ranks=3, num_microbatches=3) == plan("""
        0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2
        1F0 1F1 1B0 1F2 1B1 1W0 1B2 1W1 1W2
        2F0 2B0 2F1 2B1 2F2 2B2 2W0 2W1 2W2
    """)


@pytest.mark.parametrize(("name", "leading"), [("zb_h1", [4, 3, 2, 1]), ("zb_h2", [7, 5, 3, 1])])
def test_forwards_before_the_first_backward(name, leading):
    schedule = build(name, num_ranks=4, num_microbatches=8)
    first_b = [[action.kind for action in rank].index(Kind.B) for rank in schedule]
    assert first_b == leading


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_extra_time(p, m):
    h1 = simulate(build("zb_h1", p, m), Costs(F, B, W))
    h2 = simulate(build("zb_h2", p, m), Costs(F, B, W, communication=0.5))
    assert h1.makespan == m * (F + B + W) + (p - 1) * (F + B - W)
    assert max(h2.span) == m * (F + B + W) + (p - 1) * (F + B + 2 * 0.5 - 2 * W)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h2_has_no_bubble_with_equal_times(p, m):
    assert simulate(build("zb_h2", p, m), Costs.unit()).bubble_unsynchronized == 0


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("name", "depth"), [("zb_h1", 1), ("zb_h2", 2)])
def test_peak_memory_of_every_rank(name, depth, p, m):
    costs = Costs(1, 1, 1, activation=34, weight_residue=32)
    peaks = simulate(build(name, p, m), costs).peak_memory
    expected = [(depth * (p - 1 - i) + 1) * 34 + depth * i * 32 for i in range(p)]
    assert peaks == tuple(expected)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_few_microbatches_take_no_longer_than_1f1b(name):
    for m in range(1, 8):
        few = simulate(build(name, 4, m), Costs.unit())
        assert few.makespan <= simulate(build("1f1b", 4, m), Costs.unit()).makespan
