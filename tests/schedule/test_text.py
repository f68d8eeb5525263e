import inspect
import re

import pytest

from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    add_final_actions,
    build,
    bytes_text,
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


REDUCED = """
rank 0 F0 F1 ...B0 W0 B1 W1 ......
reduce                   REDUCE1
rank 1 ...F0 B0 F1 B1 W0 W1 ......
reduce                 REDUCE1
"""
REDUCED_ZB_H1 = add_final_actions(build("zb_h1", 2, 2))


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        (build("zb_h1", 2, 2), ZB_H1),
        (simulate(plan("0F0 0B0 0W0"), Costs(1, 2, 3)), "rank 0 F0 B0    W0"),
        (plan("0F0 1F0\n2F0 3F0"), "rank 0 0F0 1F0 ........\nrank 1 ........2F0 3F0"),
        (simulate(plan("0F0"), Costs(0, 0, 0)), "rank 0"),
        (simulate(REDUCED_ZB_H1, Costs(1, 1, 1, reduce=3)), REDUCED),
        (
            add_final_actions(plan("0F0 1F0 1BW0 0BW0")),
            "rank 0 0F0 1F0 1BW0    0BW0    ....\nreduce                 REDU    REDU",
        ),
    ],
)
def test_a_drawing_in_proportion_to_time(drawn, expected):
    assert lines(draw(drawn, width=80)) == expected.strip("\n").splitlines()


def test_a_drawing_fits_its_width():
    drawing = draw(build("1f1b", 8, 64), width=100)
    assert {len(line) for line in drawing.splitlines()} <= set(range(80, 101))
    assert draw(plan("0F100 0B100 0W100"), width=10) == "rank 0 FBW"
    aligned = draw(build("1f1b", 11, 1), width=200).splitlines()
    assert aligned[0].startswith(" rank 0 F0 ")
    assert aligned[10].startswith("rank 10 ...")
    short = simulate(REDUCED_ZB_H1, Costs(1, 1, 1, reduce=0.01))
    assert len(draw(short, width=200).splitlines()[0]) == len("rank 0 ") + 7 * 3


DRAWN = {
    name: re.findall(
        rf'draw\(build\("{name}", (\d), (\d)(?:, (\w+)=(\d))?\)\)``::\n\n((?: *rank .*\n?)+)',
        inspect.getdoc(recipe.builder),
    )
    for name, recipe in SCHEDULES.items()
}


@pytest.mark.parametrize("name", [name for name, drawings in DRAWN.items() if drawings])
def test_a_builder_is_drawn_in_its_docstring_as_it_is_built(name):
    [(num_ranks, num_microbatches, option, value, rows)] = DRAWN[name]
    options = {option: int(value)} if option else {}
    drawn = draw(build(name, int(num_ranks), int(num_microbatches), **options), width=92)
    assert lines(inspect.cleandoc(rows)) == lines(drawn)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.00 KiB"),
        (1, "0.01 KiB"),
        (2048, "2.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (1 << 34, "16.00 GiB"),
    ],
)
def test_bytes_are_in_a_unit_in_which_they_are_not_0(num_bytes, text):
    assert bytes_text(num_bytes) == text
    assert bytes_text(num_bytes, column_max=1 << 34).endswith("GiB")


def test_each_family_of_schedules_has_a_drawing():
    families = {inspect.getmodule(recipe.builder) for recipe in SCHEDULES.values()}
    drawn = {inspect.getmodule(SCHEDULES[name].builder) for name, found in DRAWN.items() if found}
    without = {module.__name__.rpartition(".")[2] for module in families - drawn}
    assert without == {"optpipe"}  # a search
