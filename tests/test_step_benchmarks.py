"""The benchmarks of steps of sleeping blocks, at a tiny size."""

import pytest

from examples.benchmarks import emulated, host_time, memory

TINY = ["--p", "2", "--m", "4", "--milliseconds", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "labels"),
    [
        (
            ["--period", "--schedules", "zb_v", "--weight-share", "0.5"],
            ["ours: zb_v, barrier", "torch's best: ", *(f"tried: {n}" for n in emulated.PEERS)],
        ),
        (["--schedules", "zb_h1"], ["ours: zb_h1, barrier", "torch's same: our CSV"]),
    ],
)
def test_steps_of_all_contenders_are_measured(capsys, line, labels):
    emulated.main([*TINY, *line, "--runs", "1", "--steps", "2"])
    printed = capsys.readouterr().out
    for label in ["bare: ", *labels]:
        (row,) = [row for row in printed.splitlines() if label in row]
        assert float(row.split("│")[2]) > 0


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
    setup = emulated.Setup("zb_v", 2, 4, 10, 1.0, True, None, "barrier", "same", 1, 2)
    assert (setup.num_chunks, setup.seconds) == (2, 0.005)
    assert not setup.torch_peers()  # torch's runtime places no V for a schedule of ours


@pytest.mark.slow
@pytest.mark.parametrize("what", ["estimate", "build", "checkpoint"])
def test_memory_of_every_rank_is_measured(capsys, what):
    assert memory.main([what, "--small", "--model", "gpt", "--schedule", "zb_h1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == {"estimate": 3, "build": 5, "checkpoint": 20}[what]  # with their heads
