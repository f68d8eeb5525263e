"""Pictures are written by their ending, of the part that is asked for."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest

from lightning_pipeoffload.pictures import PictureFile, TitledTimeline, figures
from lightning_pipeoffload.pictures.picture_file import parse_window, to_trace
from lightning_pipeoffload.pictures.timelines import Window
from lightning_pipeoffload.schedule import Costs, ScheduleError, add_final_actions, build, simulate
from tests.support.plans import plan

COSTS = Costs.unit()
TRACED = Costs(0.5, 1, 2)
TIMELINE = simulate(build("zb_h1", 4, 8), COSTS)


def write(path, count=1, **options):
    PictureFile(path, **options).write(
        [TitledTimeline(TIMELINE, COSTS, f"title {n}") for n in range(count)]
    )


@pytest.mark.parametrize(
    ("name", "start"), [("a.svg", b"<?xml "), ("a.png", b"\x89PNG\r\n"), ("a.json", b"{")]
)
def test_the_ending_says_what_is_written(name, start, tmp_path):
    write(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", r"must end in one of \.svg, \.png, \.json"),
        ("none/a.svg", "cannot be written: make the folder .*none first"),
        ("folder.svg", "cannot be written: it is a folder; name a file"),
        ("a.json", "a trace, which shows one schedule; leave out compare"),
    ],
)
def test_what_cannot_be_written_is_refused(name, message, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ScheduleError, match=message):
        write(tmp_path / name, count=2)


def test_a_missing_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    without = lambda name: None if name == "matplotlib" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(figures.importlib.util, "find_spec", without)
    for name in ("a.png", "a.svg"):
        with pytest.raises(ScheduleError, match=r"pip install lightning-pipeoffload\[plot\]"):
            write(tmp_path / name)
    write(tmp_path / "a.json")


def test_several_timelines_are_on_one_axis(tmp_path):
    write(tmp_path / "a.svg", count=2)
    drawn = (tmp_path / "a.svg").read_text()
    assert "title 0" in drawn
    assert "title 1" in drawn


TIMELINES = [simulate(build(name, 2, 4), Costs.unit()) for name in ("1f1b", "zb_h1")]


def test_the_part_that_is_shown():
    whole = parse_window(TIMELINES)
    assert whole == Window(0, max(t.makespan for t in TIMELINES))
    first = parse_window(TIMELINES, "0")
    assert first.start == 0
    assert first.end < parse_window(TIMELINES, "0-3").end == whole.end
    assert parse_window(TIMELINES, "3").start > 0
    shown = {e.action.microbatch for t in TIMELINES for e in t.events if first.shows(e, 1)}
    assert shown == {0}  # though others run meanwhile
    assert parse_window(TIMELINES, time=[1, 1000]) == Window(1, whole.end)


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


def trace_events(phase):
    trace = to_trace(simulate(plan("0F0 0BW0\n1F0 1BW0"), TRACED), TRACED)
    return [event for event in json.loads(json.dumps(trace))["traceEvents"] if event["ph"] == phase]


def test_seconds_become_microseconds():
    spans = {e["name"]: (e["ts"], e["dur"], e["pid"]) for e in trace_events("X")}
    assert spans == {
        "0F0": (0, 0.5e6, 0),
        "1F0": (0.5e6, 0.5e6, 1),
        "1BW0": (1e6, 3e6, 1),
        "0BW0": (4e6, 3e6, 0),
    }


def test_memory_is_a_counter_and_ranks_and_lanes_have_names():
    names = [(e["name"], e["pid"], e["args"]["name"]) for e in trace_events("M")]
    assert {("process_name", 1, "rank 1"), ("thread_name", 1, "compute")} <= {*names}
    steps = [(e["ts"], e["args"]["memory"]) for e in trace_events("C") if e["pid"] == 0]
    assert steps == [(0, 1), (7e6, 0)]


def test_reductions_have_a_lane():
    reduced = add_final_actions(plan("0F0 0BW0\n1F0 1BW0"))
    costs = replace(TRACED, reduce=4)
    events = to_trace(simulate(reduced, costs), costs)["traceEvents"]
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    [reduction] = [e for e in events if e["name"] == "1REDUCE0"]
    assert reduction["tid"] == threads["reduce"]
    assert (reduction["ts"], reduction["dur"], reduction["cat"]) == (4e6, 4e6, "REDUCE")
