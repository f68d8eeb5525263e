"""Plans that were found before are found again; what is near them is a hint."""

import logging
import os
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from lightning_pipeoffload.schedule import Costs, PlanCache, build, offload_activations
from lightning_pipeoffload.schedule.plan_cache import PlanCacheKey

COSTS = Costs(30.0, 29.0, 20.0, 1.0, 17.0, 16.0, 20.0, 20.0)
QUESTION = PlanCacheKey("optpipe", 4, 8, 1, COSTS, memory_limit=34.0)
PLAN = build("zb_h1", 4, 8)


@pytest.fixture
def cache(tmp_path):
    return PlanCache(tmp_path / "plans")


def with_costs(**others):
    return replace(QUESTION, costs=replace(COSTS, **others))


def scaled(factor):
    times = ("forward", "backward_input", "backward_weight", "communication", "offload", "reload")
    return with_costs(**{name: getattr(COSTS, name) * factor for name in times})


def test_a_plan_with_copies_comes_back_with_its_remarks(cache):
    assert cache.find(QUESTION) is None
    assert not cache.folder.exists()
    plan, _ = offload_activations(PLAN, COSTS, "half")
    cache.store(QUESTION, plan, {"makespan": 815.0})
    found = cache.find(QUESTION)
    assert (found.is_exact, found.schedule, found.schedule.name) == (True, plan, "zb_h1")
    assert found.remarks == {"makespan": 815.0}
    cache.store(QUESTION, build("1f1b", 4, 8))  # a later plan takes its place
    assert cache.find(QUESTION).schedule.name == "1f1b"
    assert len(list(cache.folder.iterdir())) == 1


def test_a_plan_comes_back_with_its_slices(cache):
    plan = build("seq_zb", 4, 2, num_sequence_slices=3)
    cache.store(QUESTION, plan)
    assert cache.find(QUESTION).schedule == plan


@pytest.mark.parametrize(
    ("asked", "is_exact"),
    [
        (scaled(1e-3), True),
        (scaled(1.001), True),
        (with_costs(forward=32.0), False),
        (with_costs(offload=60.0), False),
        (replace(QUESTION, memory_limit=68.0), False),
        (replace(QUESTION, memory_limit=None), False),
        (replace(QUESTION, num_ranks=8), None),
        (replace(QUESTION, num_microbatches=16), None),
        (replace(QUESTION, num_chunks=2), None),
        (replace(QUESTION, purpose="auto"), None),
        (with_costs(copy_lanes=2), None),
        (with_costs(activation=(17.0, 17.0, 17.0, 20.0)), None),
    ],
)
def test_the_same_ratios_find_a_plan_others_a_hint_and_other_shapes_nothing(cache, asked, is_exact):
    cache.store(QUESTION, PLAN)
    found = cache.find(asked)
    assert (found and found.is_exact) == is_exact
    assert found is None or found.schedule == PLAN


def test_the_closest_is_the_hint(cache):
    for forward in (45.0, 33.0, 60.0):
        cache.store(with_costs(forward=forward), PLAN, {"forward": forward})
    assert cache.find(QUESTION).remarks == {"forward": 33.0}


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


def as_written(text, plan):
    """Return a file with the numbers of another one, whose digest is that of ``plan``."""
    numbers, *_ = text.splitlines()
    return f"{numbers}\n{sha256(plan.encode()).hexdigest()}\n{plan}\n"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("0F0 0F1", "0F1 0F0"),
        lambda text: "",
        lambda text: "[1]\n2\n3\n",
        lambda text: "\udcff",
        lambda text: "null\n",
        lambda text: "[1e999]\n",
        lambda text: "[" * 100_000,
        lambda text: as_written(text, "[]"),
        lambda text: as_written(text, "null"),
        lambda text: as_written(text, '{"a":' * 100_000),
        lambda text: as_written(text, '{"actions": 1, "name": 2, "remarks": []}'),
    ],
)
def test_a_damaged_file_is_ignored_with_a_line(cache, caplog, damage):
    cache.store(QUESTION, PLAN)
    (path,) = cache.folder.iterdir()
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_bytes(damage(whole).encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert cache.find(QUESTION) is None
    (message,) = caplog.messages
    assert str(path) in message
    assert "is ignored" in message
    cache.store(with_costs(forward=33.0), PLAN)
    assert not cache.find(QUESTION).is_exact  # it does not hide a hint
    cache.store(QUESTION, PLAN)
    assert cache.find(QUESTION).is_exact


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
