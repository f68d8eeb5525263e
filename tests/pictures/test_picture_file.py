import json
from importlib.util import find_spec

import pytest

from lightning_pipeoffload.pictures import figures
from lightning_pipeoffload.pictures.picture_file import Drawn, PictureFile, parse_window
from lightning_pipeoffload.pictures.timelines import Window
from lightning_pipeoffload.schedule import Costs, ScheduleError, build, simulate

COSTS = Costs.unit()
TIMELINE = simulate(build("zb_h1", 4, 8), COSTS)


def write(path, count=1, **options):
    PictureFile(path, **options).write([Drawn(TIMELINE, COSTS, f"title {n}") for n in range(count)])


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml "), ("a.png", b"\x89PNG\r\n")])
def test_the_ending_says_what_is_written(name, start, tmp_path):
    write(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_trace_is_json(tmp_path):
    write(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", r"must end in one of \.svg, \.png, \.json"),
        ("none/a.svg", "cannot be written: make the folder .*none first"),
    ],
)
def test_what_cannot_be_written_is_refused(name, message, tmp_path):
    with pytest.raises(ScheduleError, match=message):
        write(tmp_path / name)


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(ScheduleError, match="cannot be written: Is a directory"):
        write(tmp_path / "a.svg")


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


def test_a_trace_shows_one_schedule(tmp_path):
    with pytest.raises(ScheduleError, match="a trace, which shows one schedule; leave out compare"):
        write(tmp_path / "a.json", count=2)


def test_a_window_is_narrower_than_all(tmp_path):
    widths = []
    for number, options in enumerate(({}, {"microbatches": "0-7"}, {"time": [0, 40]})):
        timeline = simulate(build("1f1b", 8, 32), COSTS)
        path = tmp_path / f"{number}.svg"
        PictureFile(path, **options).write([Drawn(timeline, COSTS, "")])
        widths.append(float(path.read_text().split('width="')[1].split("pt")[0]))
    assert widths[1] < 0.6 * widths[0]
    assert widths[2] < 0.6 * widths[0]


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
