import pytest

from lightning_pipeoffload.schedule import Costs, build, lower, simulate


def extra_time(name, p, m, costs):
    timeline = simulate(build(name, p, m, costs=costs), costs)
    spans = zip(timeline.span, timeline.busy, strict=True)
    return max(span - busy for span, busy in spans), max(timeline.peak_memory)


@pytest.mark.parametrize("p", [4, 6, 8, 16])
def test_v_half_has_half_the_memory_and_half_the_bubble(p):
    assert extra_time("v_half", p, 4 * p, Costs.unit()) == (3 * p - 7, p + 2)


@pytest.mark.parametrize(("p", "peak"), [(4, 4), (6, 6), (8, 8), (9, 8), (16, 12)])
def test_v_min_has_a_third_of_the_memory(p, peak):
    extra, needed = extra_time("v_min", p, 4 * p, Costs.unit())
    assert needed == peak
    assert extra <= 4 * p - 5


@pytest.mark.parametrize(("p", "peak", "extra"), [(4, 6, 15), (8, 12, 34), (16, 22, 75)])
def test_1f1b_v_has_two_thirds_of_the_memory_and_less_bubble_than_1f1b(p, peak, extra):
    assert extra_time("1f1b_v", p, 4 * p, Costs.unit()) == (extra, peak)
    assert extra < 6 * (p - 1)


@pytest.mark.parametrize(("p", "papers"), [(4, 15), (8, 33), (16, 75)])
def test_1f1b_v_as_it_runs_hands_the_gradient_on_before_w(p, papers):
    timeline = simulate(lower(build("1f1b_v", p, 2 * p)), Costs.unit())
    assert max(timeline.span) - 12 * p <= 0.6 * papers


@pytest.mark.slow  # the table of golden plans has such orders of smaller sizes
@pytest.mark.parametrize(
    ("times", "rates"), [((3, 4, 2), (0.3263, 0.1233)), ((1, 1.3, 0.6), (0.3331, 0.1266))]
)
def test_unequal_times_do_better_than_the_papers_order(times, rates):
    costs = Costs(*times)
    for name, rate in zip(("v_min", "v_half"), rates, strict=True):
        bubble = simulate(build(name, 8, 32, costs=costs), costs).bubble_unsynchronized
        assert bubble < rate
