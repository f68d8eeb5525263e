"""``pipeoffload-plan compare=[...]``: schedules side by side, for the same work of every rank."""

import json
from dataclasses import fields

import pytest
from rich.console import Console

from lightning_pipeoffload.cli.plan_output import comparison_table
from lightning_pipeoffload.plan import plan
from lightning_pipeoffload.planning.figures import MEASURED, Units
from lightning_pipeoffload.schedule import Costs, ScheduleError
from tests.support.composed import composed

SIZES = {"num_ranks": 4, "num_microbatches": 8}


@pytest.fixture
def compare(capsys):
    """Return what compares schedules by name, and returns their figures."""

    def rows(names, costs, **sizes):
        given = {field.name: getattr(costs, field.name) for field in fields(Costs)}
        given = {name: [*v] if isinstance(v, tuple) else v for name, v in given.items()}
        words = [f"costs.{name}={value}" for name, value in given.items() if value is not None]
        words += [f"{name}={value}" for name, value in sizes.items()]
        plan(composed("plan", *words, f"compare=[{','.join(names)}]", "format=json"))
        return json.loads(capsys.readouterr().out)["compare"]

    return rows


def test_every_rank_has_the_same_work_whatever_its_number_of_stages(compare):
    one, two = compare(["1f1b", "interleaved_1f1b"], Costs(2, 2, 2, activation=4), **SIZES)
    assert (one["makespan"], one["peak_memory"][0]) == (8 * 6 + 3 * 4, 4 * 4)
    assert (two["makespan"], two["peak_memory"][0]) == (8 * 6 + 3 * 2, 11 * 2)


@pytest.mark.parametrize(
    ("costs", "num_ranks", "makespans"),
    [
        (Costs(0, 0, 0, communication=3), 4, [2 * 3 * 3, 2 * 7 * 3]),
        (Costs(1, 1, 1, reduce=8), 1, [3 + 8, 1.5 + 1 / 16 + 8]),  # during the first stage's W
    ],
)
def test_messages_and_gradients_take_as_long_whatever_the_number_of_stages(
    compare, costs, num_ranks, makespans
):
    rows = compare(["1f1b", "gis"], costs, num_ranks=num_ranks, num_microbatches=1)
    assert [row["makespan"] for row in rows] == makespans


def test_num_chunks_is_for_the_schedules_that_take_any(compare):
    rows = compare(["1f1b", "gis"], Costs.unit(), num_chunks=4, **SIZES)
    assert [row["num_chunks"] for row in rows] == [1, 4]
    assert [sum(row["messages"]) for row in rows] == [2 * 3 * 8, 2 * 15 * 8]


def test_costs_of_every_stage_are_not_divided(compare):
    (row,) = compare(["gis"], Costs([1] * 8, 2, 2), **SIZES)
    assert row["makespan"] == 8 * 2 * 3 + 3 * 2


def test_a_schedule_that_cannot_be_says_why(compare):
    with pytest.raises(ScheduleError, match="'x' does not"):
        compare(["x"], Costs.unit(), **SIZES)
    fits, refused = compare(["1f1b", "zb_h2"], Costs.unit(), memory_limit=4, **SIZES)
    assert "refused" not in fits
    assert "less than the 7 that zb_h2 needs" in refused["refused"]


def test_the_table_has_a_row_for_each(compare, capsys):
    rows = compare(["1f1b", "zb_h2"], Costs.unit(), memory_limit=4, **SIZES)
    Console(width=80).print(comparison_table(rows, "title", Units()))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1f1b", "1", "30", "20.0", "%", "30", "20.0", "%", "4", "0", "48"] in lines
    assert ["zb_h2", *["-"] * 8] in lines


def test_a_table_has_one_unit_of_memory(compare, capsys):
    rows = compare(["gpipe", "1f1b"], Costs(1, 1, 1, activation=2 * 2**30), **SIZES)
    Console(width=120).print(comparison_table(rows, "title", MEASURED))
    text = capsys.readouterr().out
    assert "16.00 GiB" in text
    assert "8.00 GiB" in text
    assert "MiB" not in text


def test_offload_variants_stand_next_to_the_schedule(compare):
    costs = Costs(2, 2, 2, activation=2, offload=2, reload=2)
    alone, half, share = compare(["uniform", "uniform+half", "uniform+0.5"], costs, **SIZES)
    assert share == half | {"schedule": "uniform+0.5"}
    assert half["schedule"] == "uniform+half"
    assert max(half["peak_memory"]) < max(alone["peak_memory"])
    assert max(half["peak_host_memory"]) > max(alone["peak_host_memory"]) == 0


def test_slices_of_sequences_shorten_a_step_of_few_microbatches(capsys):
    words = ["num_ranks=4", "num_microbatches=2", "num_sequence_slices=4", "format=json"]
    attention = ["costs.slices={quadratic_forward:0.4,quadratic_backward_input:0.6}"]
    plan(composed("plan", *words, "compare=[1f1b,seq_1f1b,seq_zb]"))
    rows = json.loads(capsys.readouterr().out)["compare"]
    assert [row.get("num_sequence_slices") for row in rows] == [None, 4, 4]
    assert rows[2]["makespan"] < rows[1]["makespan"] < 0.7 * rows[0]["makespan"]
    plan(composed("plan", *words, "schedule=auto", *attention))
    found = json.loads(capsys.readouterr().out)
    assert {each["schedule"] for each in found["candidates"]} == {"seq_1f1b", "seq_zb", "seq_v"}
    assert found["period"] < 0.7 * rows[0]["period"]
    plan(composed("plan", *words[:3], "schedule=seq_v"))
    assert "2 microbatches, 4 slices of a sequence" in capsys.readouterr().out
    for name in ("zb_v", "optpipe"):
        with pytest.raises(ScheduleError, match=rf"slices \(4\) must be 1 for {name}, which runs"):
            plan(composed("plan", *words, f"schedule={name}"))
