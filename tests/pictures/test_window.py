import pytest

from lightning_pipeoffload.pictures.window import Window, parse_window
from lightning_pipeoffload.schedule import Costs, ScheduleError, build, simulate

TIMELINES = [simulate(build(name, 2, 4), Costs.unit()) for name in ("1f1b", "zb_h1")]


def test_all_is_shown_where_nothing_is_asked_for():
    assert parse_window(TIMELINES) == Window(0, max(t.makespan for t in TIMELINES))


def test_microbatches_are_shown_from_their_first_start_to_their_last_end():
    first = parse_window(TIMELINES, "0")
    assert first.start == 0
    assert first.end < parse_window(TIMELINES, "0-3").end == parse_window(TIMELINES).end
    assert parse_window(TIMELINES, "3").start > 0


def test_a_time_ends_where_the_plan_does():
    assert parse_window(TIMELINES, time=[1, 1000]) == Window(1, parse_window(TIMELINES).end)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"microbatches": "few"}, r"microbatches \(few\) must be some of the plan's, as in 0-3"),
        ({"microbatches": "4-9"}, r"microbatches \(4-9\) must be some of the plan's"),
        ({"microbatches": "2-1"}, r"microbatches \(2-1\) must be"),
        ({"time": 3}, r"time \(3\) must be a start and an end, as in \[0,10\]"),
        ({"time": [5, 2]}, r"time \(\[5, 2\]\) must start before it ends"),
        ({"time": [100, 200]}, "must start before it ends, within the"),
        ({"time": [0, 1], "microbatches": "0"}, "exclude each other"),
    ],
)
def test_what_cannot_be_shown_is_refused(asked, message):
    with pytest.raises(ScheduleError, match=message):
        parse_window(TIMELINES, **asked)
