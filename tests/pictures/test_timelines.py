"""Pictures of timelines, as matplotlib has them before they are written."""

import pytest
from matplotlib.colors import to_hex

from lightning_pipeoffload.pictures.timelines import TimelinePanel, draw_timelines
from lightning_pipeoffload.schedule import (
    Action,
    Costs,
    Event,
    Timeline,
    add_final_actions,
    build,
    simulate,
)
from tests.support.plans import plan

UNIT = Costs.unit()
IDLE = "#f0f0f0"


def drawn(schedule, costs=UNIT, title=""):
    return draw_timelines([TimelinePanel.of(simulate(schedule, costs), costs, title)])


def bars(figure):
    """The bars of the first timeline: left edge, width, upper edge, height and colour."""
    found = []
    for collection in figure.axes[0].collections:
        for path in collection.get_paths():
            box = path.get_extents()
            color = to_hex(collection.get_facecolor()[0])
            found.append((box.x0, box.width, box.y0, box.height, color))
    return found


def words(figure):
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    ticks = [
        label.get_text() for axes in figure.axes for label in axes.get_yticklabels(which="both")
    ]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    return [*texts, *ticks, *legend, *(axes.get_title(loc="left") for axes in figure.axes)]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "uniform"])
def test_every_action_has_a_cell_with_its_microbatch(name):
    schedule = build(name, 4, 8)
    numbers = [text.get_text() for text in drawn(schedule).axes[0].texts]
    assert numbers.count("7") == sum(action.microbatch == 7 for rank in schedule for action in rank)


def test_a_cell_is_as_wide_as_its_action_takes_time():
    found = {
        round(left): width
        for left, width, top, _, color in bars(drawn(plan("0F0 0B0 0W0"), Costs(1, 2, 3)))
        if top < 0.9 and color != IDLE
    }
    assert found == pytest.approx({0: 1, 1: 2, 3: 3})


def test_kinds_and_chunks_differ_in_colour():
    colors = {color for *_, height, color in bars(drawn(build("gis", 2, 2))) if height > 0.9}
    assert len(colors) == 6 + 1  # and idle time


def test_a_large_schedule_keeps_the_widest_picture_and_drops_its_numbers():
    figure = drawn(build("1f1b", 2, 600))
    assert figure.bbox.width <= 2000
    assert "599" not in words(figure)


def test_copies_have_lanes_under_the_row():
    copies = [("d2h", "0OFFLOAD0", 1, 2), ("h2d", "0RELOAD0", 3, 4)]
    events = [Event(0, lane, Action.parse(text), start, end) for lane, text, start, end in copies]
    timeline = Timeline((*simulate(plan("0F0 0B0 0W0"), UNIT).events, *events), (1.0,))
    figure = draw_timelines([TimelinePanel.of(timeline, UNIT)])
    tops = {
        round(left): top for left, _, top, height, _ in bars(figure) if height < 0.5 and top > 0.9
    }
    assert tops[1] == pytest.approx(1)
    assert tops[3] == pytest.approx(1.45)
    assert {"to host", "from host", "activations go to the host", "activations come back"} <= set(
        words(figure)
    )


def test_a_lane_on_which_nothing_takes_time_is_left_out():
    copies = [(0, 1, 2), (1, 3, 3)]
    events = [Event(r, "d2h", Action.parse("0OFFLOAD0"), *times) for r, *times in copies]
    timeline = Timeline((*simulate(build("1f1b", 2, 2), UNIT).events, *events), (1.0, 1.0))
    assert TimelinePanel.of(timeline, UNIT).lanes == [["d2h"], []]
    assert words(draw_timelines([TimelinePanel.of(timeline, UNIT)])).count("to host") == 1


def test_reductions_have_a_lane_under_the_row():
    figure = drawn(add_final_actions(build("zb_h1", 2, 2)), Costs(1, 1, 1, reduce=3))
    assert {"reduce", "gradients over the replicas"} <= set(words(figure))
    assert "#e0b416" in {color for *_, color in bars(figure)}


def test_curves_have_one_scale_and_titles_and_ranks_are_written():
    figure = drawn(build("1f1b", 4, 8), title="a title")
    curves = [height for *_, height, color in bars(figure) if color == "#d8dce6"]
    assert curves == pytest.approx([0.8, 0.6, 0.4, 0.2])
    found = words(figure)
    assert [text for text in found if text.startswith("peak")][0] == "peak 4"
    assert {"a title", "rank 0", "rank 3", "idle; digits are microbatches"} <= {*found}
