import inspect
import re

import pytest

from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    add_final_actions,
    build,
    draw,
    simulate,
)
from tests.support.plans import plan

ZB_H1 = """
rank 0 F0 F1 ...B0 W0 B1 W1
rank 1 ...F0 B0 F1 B1 W0 W1
"""


def lines(drawing):
    return [line.rstrip() for line in drawing.splitlines()]


def test_equal_times():
    assert lines(draw(build("zb_h1", 2, 2), width=80)) == ZB_H1.strip().splitlines()


def test_an_action_is_as_wide_as_it_takes_time():
    timeline = simulate(plan("0F0 0B0 0W0"), Costs(1, 2, 3))
    assert lines(draw(timeline, width=80)) == ["rank 0 F0 B0    W0"]


def test_a_stage_is_shown_where_a_rank_has_several():
    assert lines(draw(plan("0F0 1F0\n2F0 3F0"), width=80)) == [
        "rank 0 0F0 1F0 ........",
        "rank 1 ........2F0 3F0",
    ]


def test_a_drawing_fits_its_width():
    drawing = draw(build("1f1b", 8, 64), width=100)
    assert {len(line) for line in drawing.splitlines()} <= set(range(80, 101))


def test_what_is_too_narrow_shows_its_kind():
    assert draw(plan("0F100 0B100 0W100"), width=10) == "rank 0 FBW"


def test_rank_numbers_are_aligned():
    drawing = draw(build("1f1b", 11, 1), width=200).splitlines()
    assert drawing[0].startswith(" rank 0 F0 ")
    assert drawing[10].startswith("rank 10 ...")


def test_nothing_that_takes_time():
    assert draw(simulate(plan("0F0"), Costs(0, 0, 0)), width=80) == "rank 0 "


REDUCED = """
rank 0 F0 F1 ...B0 W0 B1 W1 ......
reduce                   REDUCE1
rank 1 ...F0 B0 F1 B1 W0 W1 ......
reduce                 REDUCE1
"""


def test_a_reduction_has_a_row_of_its_own():
    timeline = simulate(add_final_actions(build("zb_h1", 2, 2)), Costs(1, 1, 1, reduce=3))
    assert lines(draw(timeline, width=80)) == REDUCED.strip().splitlines()


def test_a_reduction_of_a_schedule_takes_as_long_as_an_action():
    drawn = draw(add_final_actions(plan("0F0 1F0 1BW0 0BW0")), width=80)
    assert lines(drawn) == [
        "rank 0 0F0 1F0 1BW0    0BW0    ....",
        "reduce                 REDU    REDU",
    ]


def test_short_reductions_make_no_drawing_wider():
    timeline = simulate(add_final_actions(build("zb_h1", 2, 2)), Costs(1, 1, 1, reduce=0.01))
    assert len(draw(timeline, width=200).splitlines()[0]) == len("rank 0 ") + 7 * 3


DRAWN = {
    name: re.findall(
        rf'draw\(build\("{name}", (\d), (\d)\)\)``::\n\n((?: *rank .*\n?)+)',
        inspect.getdoc(recipe.builder),
    )
    for name, recipe in SCHEDULES.items()
}


@pytest.mark.parametrize("name", [name for name, drawings in DRAWN.items() if drawings])
def test_a_builder_is_drawn_in_its_docstring_as_it_is_built(name):
    [(num_ranks, num_microbatches, rows)] = DRAWN[name]
    drawn = draw(build(name, int(num_ranks), int(num_microbatches)), width=92)
    assert lines(inspect.cleandoc(rows)) == lines(drawn)


def test_each_family_of_schedules_has_a_drawing():
    families = {inspect.getmodule(recipe.builder) for recipe in SCHEDULES.values()}
    drawn = {inspect.getmodule(SCHEDULES[name].builder) for name, found in DRAWN.items() if found}
    without = {module.__name__.rpartition(".")[2] for module in families - drawn}
    assert without == {"v_adaptive", "optpipe"}  # searches
