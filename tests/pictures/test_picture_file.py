import json
from importlib.util import find_spec

import pytest

from lightning_pipeoffload.pictures import png
from lightning_pipeoffload.pictures.picture_file import write_picture
from lightning_pipeoffload.schedule import Costs, ScheduleError, build, simulate

COSTS = Costs.unit()
TIMELINE = simulate(build("zb_h1", 4, 8), COSTS)


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<svg "), ("a.png", b"\x89PNG\r\n")])
def test_the_ending_says_what_is_written(name, start, tmp_path):
    write_picture(str(tmp_path / name), TIMELINE, COSTS, "title")
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_trace_is_json(tmp_path):
    write_picture(str(tmp_path / "a.json"), TIMELINE, COSTS, "title")
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
        write_picture(str(tmp_path / name), TIMELINE, COSTS, "title")


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(ScheduleError, match="cannot be written: Is a directory"):
        write_picture(str(tmp_path / "a.svg"), TIMELINE, COSTS, "title")


def test_a_missing_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    without = lambda name: None if name == "matplotlib" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(png.importlib.util, "find_spec", without)
    with pytest.raises(ScheduleError, match=r"pip install lightning-pipeoffload\[plot\]"):
        write_picture(str(tmp_path / "a.png"), TIMELINE, COSTS, "title")
