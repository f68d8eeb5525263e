"""The bubble rates of "Zero Bubble Pipeline Parallelism", tables 5 and 8, from profiled times.

1F1B-I differs from the paper, whose program lets most microbatches of a group start before their
input has arrived; here every hop counts. Of the tables' rows with 32 ranks those with the fewest
microbatches are here, for the sake of time.
"""

import pytest

from lightning_pipeoffload.schedule import Costs, build, simulate

# p, m, (F, B, W, communication) in ms of a whole stage, chunks of 1F1B-I,
# rates of 1f1b, interleaved_1f1b, zb_h1, zb_h2
ROWS = [
    (8, 24, (29.718, 29.444, 19.927, 0.527), 4, (0.2347, 0.0827, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), 4, (0.1898, 0.0644, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), 4, (0.1091, 0.0328, 0.0554, 0.0294)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), 2, (0.2646, 0.1528, 0.1421, 0.0641)),
    (16, 48, (28.814, 28.760, 19.352, 1.610), 2, (0.2668, 0.1549, 0.1536, 0.0823)),
    (16, 64, (28.824, 28.786, 19.376, 1.621), 2, (0.2206, 0.1209, 0.1198, 0.0630)),
    (16, 128, (28.632, 28.612, 19.278, 1.619), 2, (0.1390, 0.0644, 0.0637, 0.0325)),
    (32, 96, (18.916, 19.496, 14.576, 0.879), 2, (0.2676, 0.1549, 0.1429, 0.0629)),
]


def rate(name, p, m, times, v):
    f, b, w, c = times
    schedule = build(name, p, m, v)
    timeline = simulate(schedule, Costs(f / v, b / v, w / v, communication=c))
    # A schedule that is a parallelogram in time counts on an optimizer without a barrier.
    return timeline.bubble_unsynchronized if name == "zb_h2" else timeline.bubble


@pytest.mark.parametrize(("p", "m", "times", "v", "rates"), ROWS)
@pytest.mark.parametrize("column", range(4))
def test_rate(p, m, times, v, rates, column):
    name = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")[column]
    chunks = v if name == "interleaved_1f1b" else 1
    assert rate(name, p, m, times, chunks) == pytest.approx(rates[column], abs=0.51e-4)
