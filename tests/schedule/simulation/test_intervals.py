import pytest

from lightning_pipeoffload.schedule.simulation.intervals import disjoint, earliest, latest

TAKEN = [(2.0, 3.0), (5.0, 8.0)]


@pytest.mark.parametrize(
    ("start", "seconds", "expected"),
    [(0, 2, 0), (0, 3, 8), (1.5, 1, 3), (2.5, 2, 3), (4, 2, 8), (6, 1, 8), (9, 1, 9)],
)
def test_earliest_time_that_is_free_for_so_long(start, seconds, expected):
    assert earliest(start, seconds, TAKEN) == expected


@pytest.mark.parametrize(
    ("end", "seconds", "expected"),
    [(10, 2, 8), (10, 3, -1), (8.5, 1, 4), (7, 2, 3), (4, 2, 0), (2.5, 2, 0), (1, 2, -1)],
)
def test_latest_time_that_is_free_for_so_long(end, seconds, expected):
    assert latest(end, seconds, TAKEN) == expected


def test_times_that_meet_become_one():
    assert disjoint([(5, 6), (0, 2), (1, 3), (3, 4), (5.5, 5.7)]) == [(0, 4), (5, 6)]


def test_nothing_is_taken():
    assert (earliest(1, 5, []), latest(7, 5, []), disjoint([])) == (1, 2, [])
