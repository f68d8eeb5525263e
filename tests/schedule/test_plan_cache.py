import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pipeoffload.schedule import Costs, build, offload_activations
from lightning_pipeoffload.schedule.plan_cache import PlanCache, PlanQuestion

COSTS = Costs(30.0, 29.0, 20.0, 1.0, 17.0, 16.0, 20.0, 20.0)
QUESTION = PlanQuestion("optpipe", 4, 8, 1, COSTS, memory_limit=34.0)
PLAN = build("zb_h1", 4, 8)


@pytest.fixture
def cache(tmp_path):
    return PlanCache(tmp_path / "plans")


def with_costs(**others):
    return replace(QUESTION, costs=replace(COSTS, **others))


def test_nothing_is_found_in_a_folder_that_is_not_there(cache):
    assert cache.find(QUESTION) is None
    assert not cache.folder.exists()


def test_a_plan_with_copies_comes_back_with_its_remarks(cache):
    plan, _ = offload_activations(build("zb_h1", 4, 8), COSTS, "half")
    cache.store(QUESTION, plan, {"makespan": 815.0})
    found = cache.find(QUESTION)
    assert found.is_exact
    assert found.schedule == plan
    assert found.schedule.name == "zb_h1"
    assert found.remarks == {"makespan": 815.0}


@pytest.mark.parametrize("factor", [1e-3, 1.001])
def test_what_rounds_to_the_same_ratios_is_the_same_question(cache, factor):
    cache.store(QUESTION, PLAN)
    times = ("forward", "backward_input", "backward_weight", "communication", "offload", "reload")
    scaled = {name: getattr(COSTS, name) * factor for name in times}
    assert cache.find(with_costs(**scaled)).is_exact


@pytest.mark.parametrize(
    "other",
    [
        with_costs(forward=32.0),
        with_costs(offload=60.0),
        replace(QUESTION, memory_limit=68.0),
        replace(QUESTION, memory_limit=None),
    ],
    ids=["forward", "offload", "limit", "no limit"],
)
def test_a_question_like_it_finds_a_hint(cache, other):
    cache.store(QUESTION, PLAN)
    found = cache.find(other)
    assert found.schedule == PLAN
    assert not found.is_exact


@pytest.mark.parametrize(
    "other",
    [
        replace(QUESTION, num_ranks=8),
        replace(QUESTION, num_microbatches=16),
        replace(QUESTION, num_chunks=2),
        replace(QUESTION, purpose="auto"),
        with_costs(copy_lanes=2),
        with_costs(ranks_per_link=2),
        with_costs(activation=(17.0, 17.0, 17.0, 20.0)),
    ],
    ids=["p", "m", "v", "purpose", "lanes", "links", "stages"],
)
def test_what_is_of_another_shape_finds_nothing(cache, other):
    cache.store(QUESTION, PLAN)
    assert cache.find(other) is None


def test_the_closest_is_the_hint(cache):
    for forward in (45.0, 33.0, 60.0):
        cache.store(with_costs(forward=forward), PLAN, {"forward": forward})
    assert cache.find(QUESTION).remarks == {"forward": 33.0}


def test_a_later_plan_takes_the_place_of_an_earlier_one(cache):
    cache.store(QUESTION, PLAN)
    cache.store(QUESTION, build("1f1b", 4, 8))
    assert cache.find(QUESTION).schedule.name == "1f1b"
    assert len(list(cache.folder.iterdir())) == 1


def test_a_folder_does_not_grow_forever(cache, monkeypatch):
    monkeypatch.setattr("lightning_pipeoffload.schedule.plan_cache._MOST_OF_A_FAMILY", 3)
    before = set()
    for number in range(5):
        cache.store(with_costs(forward=31.0 + 2 * number), PLAN)
        (newest,) = set(cache.folder.iterdir()) - before
        os.utime(newest, (number, number))
        before = set(cache.folder.iterdir())
    assert len(before) == 3
    assert cache.find(with_costs(forward=39.0)).is_exact
    assert not cache.find(with_costs(forward=31.0)).is_exact


def _cut(text):
    return text[: len(text) // 2]


def _swapped(text):
    return text.replace("[0, 0, 0, 0, 0, 1,", "[0, 0, 1, 0, 0, 0,")


@pytest.mark.parametrize("damage", [_cut, _swapped, lambda _: "", lambda _: "[1]\n2\n3\n"])
def test_a_damaged_file_is_ignored_with_a_line(cache, caplog, damage):
    cache.store(QUESTION, PLAN)
    (path,) = cache.folder.iterdir()
    assert damage(path.read_text()) != path.read_text()
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        assert cache.find(QUESTION) is None
    assert [str(path) in message and "is ignored" in message for message in caplog.messages] == [
        True
    ]
    cache.store(QUESTION, PLAN)
    assert cache.find(QUESTION).is_exact


def test_a_damaged_file_does_not_hide_a_hint(cache):
    cache.store(QUESTION, PLAN)
    (path,) = cache.folder.iterdir()
    cache.store(with_costs(forward=33.0), PLAN)
    path.write_bytes(b"\xff\xfe")
    assert not cache.find(QUESTION).is_exact


def test_a_folder_that_cannot_be_written_is_said_and_does_no_harm(tmp_path, caplog):
    (tmp_path / "plans").write_text("a file")
    PlanCache(tmp_path / "plans").store(QUESTION, PLAN)
    assert "not kept for the next run" in caplog.text


def test_by_default_plans_are_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PlanCache().folder == tmp_path / "pipeoffload" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert PlanCache().folder == Path("/home/somebody/.cache/pipeoffload/plans")
