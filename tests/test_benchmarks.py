"""The benchmarks at a tiny size on the CPU, and the comparison with a commit."""

import io
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from rich.table import Table

from examples.benchmarks import (
    chunked_loss,
    emulated,
    host_time,
    memory,
    offload_emulated,
    offload_gpu,
    packed_rows,
    reduction_emulated,
    replica_bytes,
    sequence_slices,
)
from examples.benchmarks.auto_wall import HEADER, settings
from examples.benchmarks.offload_gpu import Size, Variant, measure
from lightning_pipeoffload.cli.rehearsal import Rehearsal
from lightning_pipeoffload.runtime.measure import CopySpeed
from lightning_pipeoffload.schedule import build, peak_memory, split_fused_backward
from tests.support.compare_with import changed, differences, figures
from tests.support.pairs import first
from tests.support.step_digests import digest

SPEED = CopySpeed(to_host=1e12, to_device=1e12, overlap=1.0)
TINY = ["--hidden", "64", "--sequence", "64", "--head-size", "16", "--steps", "1"]


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **options: None)


@pytest.mark.parametrize(("rank", "recompute"), first(1, [(1, "cheap"), (0, "none")]))
def test_the_rehearsed_rank_keeps_what_its_plan_says(on_cpu, rank, recompute):
    size = Size(64, 64, 2, 2, 4, rank, 16, torch.device("cpu"))
    line = measure(size, Variant("po_f", recompute), SPEED, 1)
    assert line.peak == line.planned_peak > 0
    assert line.host_peak > 0


@pytest.mark.slow
def test_every_variant_has_its_line(on_cpu, capsys):
    offload_gpu.main([*TINY, "--ranks", "2", "--chunks", "2", "--microbatches", "4"])
    lines = capsys.readouterr().out.splitlines()[-len(offload_gpu.VARIANTS) :]
    rows = [line.split(" | ") for line in lines]
    assert [(row[2], row[3]) for row in rows] == [
        (variant.name, variant.recompute) for variant in offload_gpu.VARIANTS
    ]
    assert all(float(row[7]) > 0 for row in rows)


def test_what_does_not_fit_has_no_step(on_cpu, monkeypatch, capsys):
    def fail(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Rehearsal, "measure_stages", fail)
    size = Size(64, 64, 2, 2, 4, 0, 16, torch.device("cpu"))
    assert measure(size, Variant("uniform"), SPEED, 1) is None
    assert "uniform: no room" in capsys.readouterr().out


def test_slow_copies_keep_the_plans_peaks(on_cpu, capsys):
    sizes = ["--ranks", "2", "--microbatches", "4", "--milliseconds", "1", "--steps", "1"]
    offload_emulated.main(sizes)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["none", "half", "half", "full", "full"]
    assert all(row[5] == row[6] for row in rows)


@pytest.mark.slow
def test_replicas_that_share_out_the_optimizer_send_no_more_than_they_have_to(capsys):
    assert replica_bytes.main(["--replicas", "2", "--width", "256"]) == 0
    kept = [line.split("|")[3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert float(kept[2]) == pytest.approx(float(kept[1]) / 2, rel=0.05)


SLEEPING = ["--p", "2", "--m", "4", "--milliseconds", "1"]


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
    emulated.main([*SLEEPING, *line, "--runs", "1", "--steps", "2"])
    printed = capsys.readouterr().out
    for label in ["bare: ", *labels]:
        (row,) = [row for row in printed.splitlines() if label in row]
        assert float(row.split("│")[2]) > 0


@pytest.mark.slow
def test_each_rank_has_its_actions_costs(capsys):
    host_time.main([*SLEEPING, "--steps", "2", "--schedule", "1f1b", "--profile", "F"])
    printed = capsys.readouterr().out
    rows = [line.split("│") for line in printed.splitlines() if "│" in line]
    found = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows}
    assert all(float(cell) > 0 for cell in found["F"] + found["between actions"])
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


@pytest.mark.slow
def test_sums_over_slow_links_are_exposed_at_most_as_long_as_they_are_sent(capsys):
    sizes = ["--p", "1", "--d", "2", "--m", "2", "--weights", "4", "--milliseconds", "2"]
    reduction_emulated.main([*sizes, "--links", "1", "--steps", "1", "--turns", "1"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["none", "optimizer"]
    sent = [float(row[2]) for row in rows]
    assert sent[0] == pytest.approx(2 * sent[1])
    assert all(0 <= float(row[4]) <= 1 for row in rows)


@pytest.mark.slow
def test_a_head_is_planned_alone_and_in_chunks(capsys):
    assert chunked_loss.main(["plan", "--small"]) == 0
    sizes, times = (
        [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        for table in capsys.readouterr().out.split("\n\n")
    )
    for _, with_blocks, as_cut, num_blocks, whole, at_once, in_chunks in sizes:
        assert float(as_cut) < float(with_blocks)
        assert num_blocks == "0"
        assert float(in_chunks) < float(at_once) < float(whole)
    for _, with_blocks, as_cut, at_once, in_chunks in times:
        assert 1 < float(as_cut) < float(with_blocks)
        assert float(as_cut) <= float(at_once) < float(in_chunks)


COMMAND = [sys.executable, "-m", "examples.benchmarks.auto_choice", "--wall"]
ON_THE_WALL = ["--p", "2", "--m", "4", "--milliseconds", "2", "--steps", "1", "--hands", "1"]


def test_plans_by_hand_keep_the_limit_and_the_best_comes_first():
    (tight,) = [each for each in settings(2, 4, 30) if each.name == "uneven/slow/tight"]
    found = tight.best_by_hand(3)
    assert [hand.seconds for hand in found] == sorted(hand.seconds for hand in found)
    for hand in found:
        runs = split_fused_backward(hand.plan)
        assert max(peak_memory(runs, tight.costs_of(hand.option))) <= tight.memory_limit


@pytest.mark.slow
def test_each_setting_has_its_line():
    only = ["--only", "even/fast/none", "uneven/slow/loose"]
    done = subprocess.run(
        [*COMMAND, *ON_THE_WALL, *only], check=True, capture_output=True, text=True
    )
    header, _, *rows = [line[2:-2].split(" | ") for line in done.stdout.splitlines()]
    assert header == HEADER
    found = [dict(zip(HEADER, row, strict=True)) for row in rows]
    assert [row["limit"] for row in found] == ["none", "loose"]
    assert all(float(row["measured, ms"]) > 0 for row in found)
    assert [row["the plan's"] for row in found] == ["the same"] * 2


def printed(first, second):
    table = Table("schedule", "a head of\nlines", "ms")
    table.add_row("1f1b", first, "8")
    table.add_row("zb_h1", second, "")
    Console(file=(file := io.StringIO()), width=60).print(table)
    return figures(file.getvalue())


def test_figures_that_change_by_more_than_the_bound_are_shown():
    base, mine = printed("10.0", "20.0"), printed("10.2", "21.0")
    assert base == {"1f1b, a head of lines": 10, "1f1b, ms": 8, "zb_h1, a head of lines": 20}
    assert changed([base] * 3, [mine] * 3) == ["zb_h1, a head of lines: 20 -> 21 (1.050)"]


def test_trainings_that_differ_in_a_bit_or_are_in_one_tree_only_are_named():
    weights = torch.ones(2)
    base = {"same": digest({"a": weights}), "bit": digest(weights), "old": "1"}
    weights[0] = weights[0].nextafter(torch.tensor(2.0))
    mine = {"same": digest({"a": torch.ones(2)}), "bit": digest(weights), "new": "2"}
    found = differences(base, mine)
    assert [line.split(":")[0] for line in found] == ["bit", "new", "old"]


def test_packed_rows_take_less_than_padded_ones():
    padded, by_length, packed, dense = packed_rows.ratios(build("zb_h1", 2, 4), "chat", 2)
    assert 1 < packed < by_length < padded
    assert packed < dense


def test_slices_take_less_than_whole_sequences(capsys):
    sequence_slices.main(["--ranks", "4", "--microbatches", "2", "--limit", "1.5"])
    rows = [
        line.split("|")[2:-1] for line in capsys.readouterr().out.splitlines() if "| 2 |" in line
    ]
    for cells in rows:
        whole, *sliced = ([*map(float, cell.split(", "))] for cell in cells)
        assert all(time < whole[0] for time, _ in sliced)
    assert all(memory <= 1.5 for memory in (float(cell.split(", ")[1]) for cell in rows[1]))
