"""The searched schedules of "Zero Bubble Pipeline Parallelism": its tables 5, 8 and figure 7.

Costs are per stage in ms, memory in a microbatch's activation on a rank. A search may do better
than the paper's. Of 32 ranks the row of the most microbatches takes a minute, and is marked slow;
those between are not here.
"""

import pytest

from lightning_pipeoffload.schedule import Costs, build, simulate

RESIDUE = {
    4096: 32 * 4096 / (34 * 4096 + 5 * 32 * 1024),
    6144: 32 * 6144 / (34 * 6144 + 5 * 48 * 1024),
}
ROUNDED = 0.51e-4

# hidden size, p, m, (F, B, W, communication), rates of zb_1p and zb_2p
WHOLE_STAGES = [
    (4096, 8, 24, (29.718, 29.444, 19.927, 0.527), (0.1323, 0.0029)),
    (4096, 8, 32, (29.802, 29.428, 19.530, 0.577), (0.1045, 0.0022)),
    (4096, 8, 64, (29.935, 29.621, 19.388, 0.535), (0.0554, 0.0010)),
    (6144, 32, 96, (10.419, 10.207, 7.715, 0.408), (0.1421, 0.0038)),
]

# hidden size, p, m, (F, B, W, communication) of half a stage, rates of zb at 1, 1.5, 2 and 2.5
# times the memory of 1F1B, and of zb_v at 1, 1.5 and 2 times
HALF_STAGES = [
    (
        4096,
        16,
        48,
        (14.407, 14.380, 9.676, 1.610),
        (0.1536, 0.0632, 0.0077, 0.0077),
        (0.0697, 0.0065, 0.0035),
    ),
    (
        4096,
        16,
        64,
        (14.412, 14.393, 9.688, 1.621),
        (0.1198, 0.0483, 0.0052, 0.0052),
        (0.0533, 0.0049, 0.0027),
    ),
    (
        4096,
        16,
        128,
        (14.316, 14.306, 9.639, 1.619),
        (0.0637, 0.0248, 0.0026, 0.0026),
        (0.0274, 0.0025, 0.0014),
    ),
    (
        6144,
        32,
        96,
        (9.458, 9.748, 7.288, 0.879),
        (0.1429, 0.0654, 0.0104, 0.0037),
        (0.0593, 0.0032, 0.0032),
    ),
    (
        6144,
        32,
        256,
        (9.447, 9.644, 7.193, 0.887),
        (0.0593, 0.0254, 0.0036, 0.0014),
        (0.0236, 0.0010, 0.0010),
    ),
]


# m, rate of zb_v with the memory of 1F1B; 14.6B of 24 ranks: hidden size 5120, 40 heads
OF_24_RANKS = [(72, 0.0638), (96, 0.0486), (192, 0.0250)]


def rate(name, p, m, costs, **options):
    return simulate(build(name, p, m, costs=costs, **options), costs).bubble_unsynchronized


@pytest.mark.parametrize(("hidden", "p", "m", "times", "rates"), WHOLE_STAGES)
def test_memory_of_1f1b_and_twice_that(hidden, p, m, times, rates):
    costs = Costs(*times, weight_residue=RESIDUE[hidden])
    for name, expected in zip(("zb_1p", "zb_2p"), rates, strict=True):
        assert rate(name, p, m, costs) <= expected + ROUNDED


# The larger ones take seconds each.
FIRST_AND_SLOW = [
    HALF_STAGES[0],
    *(pytest.param(*row, marks=pytest.mark.slow) for row in HALF_STAGES[1:]),
]


@pytest.mark.parametrize(("hidden", "p", "m", "times", "rates", "_"), FIRST_AND_SLOW)
def test_one_stage_per_rank_under_a_limit(hidden, p, m, times, rates, _):
    *compute, communication = times
    doubled = (2 * seconds for seconds in compute)
    costs = Costs(*doubled, communication=communication, weight_residue=RESIDUE[hidden])
    for multiple, expected in zip((1, 1.5, 2, 2.5), rates, strict=True):
        assert rate("zb", p, m, costs, memory_limit=multiple * p) <= expected + ROUNDED


@pytest.mark.parametrize(("hidden", "p", "m", "times", "_", "rates"), FIRST_AND_SLOW)
def test_two_stages_per_rank_under_a_limit(hidden, p, m, times, _, rates):
    *compute, communication = times
    half = {"activation": 0.5, "weight_residue": RESIDUE[hidden] / 2}
    costs = Costs(*compute, communication=communication, **half)
    for multiple, expected in zip((1, 1.5, 2), rates, strict=True):
        assert rate("zb_v", p, m, costs, memory_limit=multiple * p) <= expected + ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize(("m", "expected"), OF_24_RANKS)
def test_two_stages_on_each_of_24_ranks(m, expected):
    sizes = {"activation": 34 * 5120 + 5 * 40 * 1024, "weight_residue": 32 * 5120}
    costs = Costs(6.763, 6.969, 5.251, communication=0.755, **sizes)
    assert rate("zb_v", 24, m, costs) <= expected + ROUNDED
