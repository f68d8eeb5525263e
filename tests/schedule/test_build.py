import pytest

from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    Recipe,
    Schedule,
    ScheduleError,
    build,
    lower,
    recipe,
    validate,
)
from tests.support.pairs import pairs

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in sorted({1, p - 1, p, p + 1, 2 * p}) if m]
FULL_GROUPS = [(p, m) for p, m in SIZES if m % p == 0]


@pytest.mark.parametrize(
    ("name", "size"), pairs(sorted(SCHEDULES.keys() - {"interleaved_1f1b"}) * 3, SIZES)
)
def test_every_size_builds_and_lowers(name, size):
    p, m = size
    schedule = build(name, num_ranks=p, num_microbatches=m)
    validate(schedule)
    validate(lower(schedule))
    assert (schedule.num_ranks, schedule.num_microbatches) == (p, m)


@pytest.mark.parametrize(("v", "size"), pairs([2, 3, 4], FULL_GROUPS))
def test_every_full_group_interleaves(v, size):
    p, m = size
    schedule = build("interleaved_1f1b", num_ranks=p, num_microbatches=m, num_chunks=v)
    validate(schedule)
    assert schedule.num_chunks == v


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "zb_3p"}, "schedule 'zb_3p' does not exist; use one of gpipe, 1f1b"),
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
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(change, message):
    arguments = {"name": "1f1b", "num_ranks": 4, "num_microbatches": 8, **change}
    with pytest.raises(ScheduleError, match=message):
        build(**arguments)


def test_no_schedule_exceeds_the_memory_limit():
    assert build("1f1b", num_ranks=4, num_microbatches=8, memory_limit=4)
    with pytest.raises(ScheduleError, match=r"memory_limit \(3\) is less than the 4 .* on rank 0"):
        build("1f1b", num_ranks=4, num_microbatches=8, memory_limit=3)


def test_the_memory_limit_is_in_the_unit_of_the_costs():
    costs = Costs(1, 1, 1, activation=10)
    assert build("1f1b", num_ranks=4, num_microbatches=8, costs=costs, memory_limit=40)
    with pytest.raises(ScheduleError, match="the 40 that 1f1b needs"):
        build("1f1b", num_ranks=4, num_microbatches=8, costs=costs, memory_limit=39)


@pytest.fixture
def searching(monkeypatch):
    def builder(num_ranks, num_microbatches, num_chunks, *, costs, group_size=1):
        builder.taken = costs, group_size
        return Schedule(build("1f1b", num_ranks, num_microbatches).actions)

    monkeypatch.setitem(SCHEDULES, "searching", Recipe(builder))
    return builder


def test_a_builder_is_given_the_options_that_it_declares(searching):
    costs = Costs.unit()
    schedule = build("searching", 2, 2, costs=costs, memory_limit=9, group_size=3)
    assert searching.taken == (costs, 3)
    assert schedule.name == "searching"


def test_an_unknown_option_is_refused_with_those_that_there_are(searching):
    with pytest.raises(ScheduleError, match="'size' is unknown to .* takes costs, group_size"):
        build("searching", 2, 2, size=3)


def test_the_same_arguments_build_once(monkeypatch):
    calls = []

    def builder(num_ranks, num_microbatches, num_chunks):
        calls.append(num_ranks)
        return SCHEDULES["1f1b"].builder(num_ranks, num_microbatches, num_chunks)

    monkeypatch.setitem(SCHEDULES, "counted", Recipe(builder))
    assert build("counted", 2, 4) == build("counted", 2, 4) != build("counted", 2, 5)
    assert len(calls) == 2


def test_a_schedule_that_takes_minutes_says_so(caplog, monkeypatch):
    monkeypatch.setattr(recipe, "_MANY_PASSES", 7)
    build("1f1b", num_ranks=2, num_microbatches=4)
    assert "building a schedule of 4 microbatches over 2 stages, 8 passes" in caplog.text
