"""The benchmarks of steps of sleeping blocks, at a tiny size."""

import pytest

from examples.benchmarks import host_time, period

TINY = ["--p", "2", "--m", "4", "--milliseconds", "1"]


@pytest.mark.slow
def test_periods_of_all_contenders_are_measured(capsys):
    period.main([*TINY, "--runs", "1", "--steps", "2", "--schedules", "zb_v"])
    printed = capsys.readouterr().out
    labels = [
        "ours: zb_v, auto",
        "bare: ",
        "torch's best: ",
        *(f"tried: {n}" for n in period.PEERS),
    ]
    for label in labels:
        (line,) = [line for line in printed.splitlines() if label in line]
        assert float(line.split("│")[2]) > 0


@pytest.mark.slow
def test_each_rank_has_its_actions_costs(capsys):
    host_time.main([*TINY, "--steps", "2", "--schedule", "1f1b", "--profile", "F"])
    printed = capsys.readouterr().out
    rows = [line.split("│") for line in printed.splitlines() if "│" in line]
    found = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows}
    assert all(float(cell) > 0 for cell in found["F"] + found["beside actions"])
    assert found["SEND_F"][1] == "" == found["SEND_B"][0]  # a rank at the end sends one way
    assert "stage_pass.py" in printed


def test_the_chunks_of_a_rank_share_its_time():
    setup = period.Setup("zb_v", 2, 4, 10, "auto", 1.0, 1, 2, alone=True)
    assert (setup.num_chunks, setup.seconds) == (2, 0.005)
