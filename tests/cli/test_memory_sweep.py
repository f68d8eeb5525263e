"""``pipeoffload-plan sweep=memory_limit`` plans all families for several limits."""

import io
import json
import sys
from contextlib import redirect_stdout
from itertools import pairwise
from math import inf

import pytest

from lightning_pipeoffload.plan import main, plan
from lightning_pipeoffload.schedule import ScheduleError
from tests.support.composed import composed
from tests.support.plans import WHOLE

SMALL = ("schedule=auto", "num_ranks=2", "num_microbatches=4")
COPIES = ("costs.offload=0.5", "costs.reload=0.5")
SWEEP = (*SMALL, *COPIES, "sweep=memory_limit")
FEW = "memory_limit=[2]"


@pytest.fixture(scope="module")
def found():
    """Return what JSON says of round limits."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        plan(composed("plan", *SWEEP, "format=json"))
    return json.loads(printed.getvalue())


def test_the_fastest_under_a_limit_is_no_slower_than_what_auto_takes(found, capsys):
    limit, fastest = found["limits"][1], found["fastest"][1]
    plan(composed("plan", *SMALL, *COPIES, f"memory_limit={limit}", "format=json"))
    alone = json.loads(capsys.readouterr().out)
    assert fastest["peak_memory"] <= limit
    assert fastest["period"] <= alone["period"] * (1 + 1e-3)


def test_every_family_is_there_and_more_memory_makes_none_slower(found):
    assert found["sweep"] == "memory_limit"
    assert {row["schedule"] for row in found["families"]} == {*WHOLE}
    assert len(found["limits"]) >= 4
    for row in found["families"]:
        times = [time or inf for time in row["period"]]
        assert times == sorted(times, reverse=True)
        memory = [plan["peak_memory"] for plan in row["plans"]]
        assert all(less < more for less, more in pairwise(memory))


def test_the_table_has_a_row_for_each_family_and_what_fits_nowhere(capsys):
    plan(composed("plan", *SWEEP, "memory_limit=[2,1]", "offload=none"))
    printed = capsys.readouterr().out
    rows = {words[0]: words[1:] for words in map(str.split, printed.splitlines()[1:]) if words}
    assert rows["limit"] == ["1", "2"]
    assert {*WHOLE, "fastest", "bubble"} <= rows.keys()
    assert rows["po_f"] == ["-", "-"]
    assert rows["1f1b"] == ["-", "14"]  # as it runs: with B's message before W
    assert "po_h, po_f: no plan can be made: it copies, and offload is none\n" in printed


def test_each_limit_of_a_sweep_is_that_of_every_rank(capsys):
    """Not of one device each, as a run's list."""
    found = []
    for limits in ("[1,2,4]", "[2,4]"):
        plan(composed("plan", *SWEEP, f"memory_limit={limits}", "offload=none", "format=json"))
        families = json.loads(capsys.readouterr().out)["families"]
        found.append({row["schedule"]: row["period"][-2:] for row in families})
    assert found[0] == found[1]


def test_a_sweep_says_how_long_copies_are_counted(capsys):
    plan(composed("plan", *SMALL, "sweep=memory_limit", FEW, "offload=auto"))
    printed = " ".join(capsys.readouterr().out.split())
    assert "Copies of a stage out and back are counted as long as its F, B and W" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sweep=time", "sweep (time) must be memory_limit"),
        ("schedule=zb_v", "use schedule=auto, not zb_v"),
        ("memory_limit=3", "memory_limit (3) must be a list of numbers above 0"),
        ("memory_limit=[true]", "must be a list of numbers above 0"),
        ("memory_limit=null costs.activation=0", "set costs.activation above 0"),
        ("memory_limit=[1,0]", "must be a list of numbers above 0"),
        ("memory_limit=[0.01]", "memory_limit (0.01) is less than any plan needs"),
        ("num_ranks=0", "num_ranks (0) must be a whole number"),
        ("num_chunks=0", "num_chunks (0) must be a whole number from 1 on"),
        ("compare=[1f1b,zb_v]", "has no part in a sweep; leave it out"),
        ("+options.group_size=2", "has no part in a sweep; leave it out"),
        ("picture=a.svg", "picture (a.svg) has no part in a sweep"),
        ("model=gpt_tiny", "schedule=auto, sweep and costs_file are for costs"),
    ],
)
def test_what_has_no_sweep_is_one_line_and_status_2(words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = (*SWEEP, *(() if "memory_limit" in words else (FEW,)), *words.split())
    monkeypatch.setattr(sys, "argv", ["pipeoffload-plan", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_several_limits_are_for_a_sweep():
    with pytest.raises(ScheduleError, match="memory_limit"):
        plan(composed("plan", "memory_limit=[1,2]"))
