from itertools import pairwise

import pytest

from lightning_pipeoffload.pictures.limit_drawing import Stair, Stairs, draw_stairs

UNITS = ("s", "activations")


def draw(*stairs):
    families = [Stairs(f"family {n}", f"#{n:06x}", one) for n, one in enumerate(stairs)]
    return draw_stairs(families, 8.0, 24.0, "a title", UNITS)


def line_of(drawing, number):
    """Return the corners of a family's staircase, which is thicker than the line to its name."""
    (line,) = [a for a in drawing.areas if a.outline == f"#{number:06x}" and a.thickness > 1]
    return line.points


def names_of(drawing):
    return [words for words in drawing.words if words.text.startswith("family")]


def test_a_stair_begins_at_its_memory_and_leads_to_the_right_edge():
    corners = line_of(draw([Stair(2, 32.0), Stair(4, 26.0)]), 0)
    (left, high), (middle, still_high), (down, low), (right, end) = corners
    assert (high, low, middle) == (still_high, end, down)
    assert high < low
    assert right - middle == pytest.approx(2 * (middle - left))  # 4 to 8, and 2 to 4


def test_what_is_too_slow_to_be_shown_comes_down_from_the_upper_edge():
    drawing = draw([Stair(1, 900.0), Stair(2, 400.0), Stair(4, 30.0)], [Stair(1, 25.0)])
    corners = line_of(drawing, 0)
    assert len(corners) == 3
    assert corners[0][0] == corners[1][0]
    assert corners[0][1] == min(y for area in drawing.areas for _, y in area.points)


@pytest.mark.parametrize("times", [[25.0] * 18, [25.0, 40.0, 40.1, 40.2], [36.0] * 18 + [25.0]])
def test_names_are_not_on_top_of_each_other(times):
    drawing = draw(*([Stair(1 + n / 10, time)] for n, time in enumerate(times)))
    names = names_of(drawing)
    assert len(names) == len(times)
    heights = sorted(words.y for words in names)
    assert all(below - above >= 15 for above, below in pairwise(heights))
    assert heights[0] > 30
    assert heights[-1] < drawing.height


def test_lines_of_one_height_lie_side_by_side():
    drawing = draw([Stair(1, 25.0)], [Stair(2, 25.0)], [Stair(3, 25.0)], [Stair(1, 30.0)])
    heights = sorted(line_of(drawing, number)[-1][1] for number in range(3))
    assert [round(below - above, 6) for above, below in pairwise(heights)] == [2.5, 2.5]


def test_a_mark_says_which_plan_it_is():
    assert "zb_h1 in 4" in {box.hint for box in draw([Stair(4, 27.0, "zb_h1 in 4")]).boxes}


def test_one_family_without_a_bubble_is_drawn():
    assert names_of(draw([Stair(8, 24.0)]))


def test_what_takes_no_time_is_drawn():
    drawing = draw_stairs([Stairs("gpipe", "#123456", [Stair(1, 0.0)])], 8.0, 0.0, "", UNITS)
    assert "gpipe  0" in {words.text for words in drawing.words}
