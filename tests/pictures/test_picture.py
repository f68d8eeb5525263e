import pytest

from lightning_pipeoffload.pictures.picture import picture
from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Action,
    Costs,
    Event,
    Timeline,
    add_reductions,
    build,
    simulate,
)
from tests.support.plans import plan

UNIT = Costs.unit()


def drawn(schedule, costs=UNIT, title=""):
    return picture(simulate(schedule, costs), costs, title)


def cells(drawing):
    """The boxes of actions, by what their hint calls them."""
    return {box.hint.split()[0]: box for box in drawing.boxes if box.hint}


def written(drawing):
    return [words.text for words in drawing.words]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "uniform"])
def test_every_action_has_a_cell_with_its_microbatch(name):
    schedule = build(name, 4, 8)
    drawing = drawn(schedule)
    assert len(cells(drawing)) == sum(map(len, schedule))
    numbers = [w.text for w in drawing.words if w.anchor == "middle" and w.y < drawing.height - 30]
    assert numbers.count("7") == sum(action.microbatch == 7 for rank in schedule for action in rank)


def test_a_cell_is_as_wide_as_its_action_takes_time():
    boxes = cells(drawn(plan("0F0 0B0 0W0"), Costs(1, 2, 3)))
    widths = [boxes[text].width + 1 for text in ("0F0", "0B0", "0W0")]
    assert widths == pytest.approx([widths[0], 2 * widths[0], 3 * widths[0]])
    assert boxes["0B0"].x == pytest.approx(boxes["0F0"].x + widths[0])


def test_kinds_and_chunks_differ_in_colour():
    boxes = cells(drawn(build("gis", 2, 2)))
    assert len({box.color for box in boxes.values()}) == 6
    assert boxes["0F0"].color == boxes["1F0"].color != boxes["2F0"].color


def test_nothing_is_outside_the_canvas():
    for name in SCHEDULES.keys() & {"1f1b", "zb_h2", "gis", "uniform"}:
        drawing = drawn(build(name, 8, 24))
        assert all(b.x >= 0 and b.x + b.width <= drawing.width for b in drawing.boxes)
        assert all(b.y >= 0 and b.y + b.height <= drawing.height for b in drawing.boxes)


def test_a_large_schedule_keeps_the_widest_picture_and_drops_its_numbers():
    drawing = drawn(build("1f1b", 2, 600))
    assert drawing.width < 4200
    assert "599" not in written(drawing)


def test_copies_have_lanes_under_the_row():
    copies = [("d2h", "0OFFLOAD0", 1, 2), ("h2d", "0RELOAD0", 3, 4)]
    events = [Event(0, lane, Action.parse(text), start, end) for lane, text, start, end in copies]
    timeline = simulate(plan("0F0 0B0 0W0"), UNIT)
    drawing = picture(Timeline((*timeline.events, *events), (1.0,)), UNIT)
    boxes = cells(drawing)
    assert (
        boxes["0F0"].y < boxes["0OFFLOAD0"].y < boxes["0RELOAD0"].y < drawing.areas[0].points[0][1]
    )
    assert boxes["0OFFLOAD0"].height < boxes["0F0"].height
    assert {"d2h", "h2d", "activations go to the host", "activations come back"} <= set(
        written(drawing)
    )


def test_reductions_have_a_lane_under_the_row():
    costs = Costs(1, 1, 1, reduce=3)
    drawing = drawn(add_reductions(build("zb_h1", 2, 2)), costs)
    boxes = cells(drawing)
    assert boxes["1W1"].y < boxes["1REDUCE1"].y < drawing.areas[1].points[0][1]
    assert boxes["1REDUCE1"].x == pytest.approx(boxes["1W1"].x)
    assert boxes["1REDUCE1"].color not in {b.color for n, b in boxes.items() if "REDUCE" not in n}
    assert {"reduce", "gradients over the replicas"} <= set(written(drawing))
    assert all(box.x + box.width <= drawing.width for box in drawing.boxes)


def test_memory_curves_have_one_scale():
    drawing = drawn(build("1f1b", 4, 8))
    heights = [area.points[0][1] - min(y for _, y in area.points) for area in drawing.areas]
    assert heights == pytest.approx([4 * heights[3], 3 * heights[3], 2 * heights[3], heights[3]])
    assert [text for text in written(drawing) if text.startswith("peak")][0] == "peak 4"


def test_the_title_ranks_and_seconds_are_written():
    assert {"a title", "rank 0", "rank 3", "0 s", "5"} <= set(
        written(drawn(build("zb_h1", 4, 8), title="a title"))
    )


def test_nothing_that_takes_time():
    assert cells(drawn(plan("0F0"), Costs(0, 0, 0)))["0F0"].width == 0
