"""Every schedule is built by its name, in any size; what cannot be is refused with a way out."""

import pytest

from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    Recipe,
    Schedule,
    ScheduleError,
    build,
    families,
    lower,
    validate,
)
from tests.support import golden_plans
from tests.support.pairs import pairs

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in sorted({1, p - 1, p, p + 1, 2 * p}) if m]


@pytest.mark.parametrize(("name", "size"), pairs(sorted(SCHEDULES) * 3, SIZES))
def test_every_size_builds_and_lowers(name, size):
    p, m = size
    chunks = None
    if name == "interleaved_1f1b":
        m, chunks = p * m, 2 + m % 3
    schedule = build(name, num_ranks=p, num_microbatches=m, num_chunks=chunks)
    validate(schedule)
    validate(lower(schedule))
    assert (schedule.num_ranks, schedule.num_microbatches) == (p, m)
    assert chunks in (None, schedule.num_chunks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "zb_3p"}, "schedule 'zb_3p' does not exist; use one of gpipe, .*1f1b"),
        ({"name": "ZB-H1"}, "; did you mean 'zb_h1'?"),
        ({"num_ranks": 0}, r"num_ranks \(0\) must be a whole number from 1 on; use num_ranks="),
        ({"num_ranks": 2.0}, r"num_ranks \(2\.0\) must be a whole number"),
        ({"num_microbatches": -1}, r"num_microbatches \(-1\) must be a whole number"),
        ({"num_chunks": 0}, r"num_chunks \(0\) must be a whole number"),
        ({"num_chunks": 2}, r"num_chunks \(2\) must be 1 for 1f1b; .*schedule=interleaved_1f1b"),
        (
            {"name": "interleaved_1f1b", "num_chunks": 1},
            r"num_chunks \(1\) must be 2 or more for interleaved_1f1b; .*schedule=1f1b",
        ),
        (
            {"name": "interleaved_1f1b", "num_microbatches": 6},
            r"num_microbatches \(6\) must be a multiple of num_ranks \(4\) for interleaved_1f1b; "
            "use 8, or schedule=1f1b",
        ),
        ({"group_size": 2}, "option 'group_size' is unknown to schedule 1f1b, it takes no options"),
        ({"memory_limit": "1GiB"}, r"memory_limit \('1GiB'\) must be a number"),
        ({"memory_limit": 3}, r"memory_limit \(3\) is less than the 4 .* on rank 0"),
        ({"memory_limit": 39, "costs": Costs(1, 1, 1, activation=10)}, "the 40 that 1f1b needs"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(change, message):
    arguments = {"name": "1f1b", "num_ranks": 4, "num_microbatches": 8, **change}
    with pytest.raises(ScheduleError, match=message):
        build(**arguments)


def test_a_limit_that_a_schedule_just_keeps():
    assert build("1f1b", 4, 8, memory_limit=4)
    assert build("1f1b", 4, 8, costs=Costs(1, 1, 1, activation=10), memory_limit=40)


def test_a_builder_is_given_the_options_that_it_declares_and_called_once(monkeypatch):
    def builder(num_ranks, num_microbatches, num_chunks, *, costs, group_size=1):
        calls.append((costs, group_size))
        return Schedule(build("1f1b", num_ranks, num_microbatches).actions)

    calls, costs = [], Costs.unit()
    monkeypatch.setitem(SCHEDULES, "searching", Recipe(builder))
    for m in (2, 2, 3):
        schedule = build("searching", 2, m, costs=costs, memory_limit=9, group_size=3)
        assert schedule.name == "searching"
    assert calls == [(costs, 3)] * 2
    with pytest.raises(ScheduleError, match="'size' is unknown to .* takes costs, group_size"):
        build("searching", 2, 2, size=3)


def test_a_schedule_that_takes_minutes_says_so(caplog, monkeypatch):
    monkeypatch.setattr(families, "_MANY_PASSES", 7)
    build("1f1b", num_ranks=2, num_microbatches=4)
    assert "building a schedule of 4 microbatches over 2 stages, 8 passes" in caplog.text


SLOW = [setting for setting in golden_plans.SETTINGS if not golden_plans.is_quick(setting)]
QUICK = [setting for setting in golden_plans.SETTINGS if golden_plans.is_quick(setting)]


@pytest.mark.parametrize("settings", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_period_makespan_and_peaks_are_those_of_the_table(settings):
    """Where they are meant to change: ``python -m tests.support.golden_plans``."""
    table = golden_plans.read()
    assert table.keys() == {*golden_plans.SETTINGS}
    assert [golden_plans.row(setting) for setting in settings] == [table[s] for s in settings]
