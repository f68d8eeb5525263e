"""The benchmarks of offloading, at a tiny size on the CPU: the code that a GPU would run."""

import pytest
import torch

from examples.benchmarks import offload_emulated, offload_gpu
from examples.benchmarks.offload_gpu import Size, Variant, measure
from lightning_pipeoffload.runtime.measure.link_speed import CopySpeed
from lightning_pipeoffload.runtime.rehearsal import Rehearsal, delays_of
from lightning_pipeoffload.schedule import Action, Costs, build, lower
from tests.support.pairs import first

SPEED = CopySpeed(to_host=1e12, to_device=1e12, overlap=1.0)
TINY = ["--hidden", "64", "--sequence", "64", "--head-size", "16", "--steps", "1"]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **options: None)


@pytest.mark.parametrize(("rank", "recompute"), first(1, [(1, "cheap"), (0, "none")]))
def test_the_rehearsed_rank_keeps_what_its_plan_says(rank, recompute):
    size = Size(64, 64, 2, 2, 4, rank, 16, torch.device("cpu"))
    line = measure(size, Variant("po_f", recompute), SPEED, 1)
    assert line.peak == line.planned_peak > 0
    assert line.host_peak > 0


@pytest.mark.slow
def test_every_variant_has_its_line(capsys):
    offload_gpu.main([*TINY, "--ranks", "2", "--chunks", "2", "--microbatches", "4"])
    lines = capsys.readouterr().out.splitlines()[-len(offload_gpu.VARIANTS) :]
    rows = [line.split(" | ") for line in lines]
    assert [(row[2], row[3]) for row in rows] == [
        (variant.name, variant.recompute) for variant in offload_gpu.VARIANTS
    ]
    assert all(float(row[7]) > 0 for row in rows)


def test_neighbours_answer_after_what_they_got():
    delays = delays_of(lower(build("1f1b", 2, 2)), 0, Costs(1.0, 2.0, 3.0))
    send, receive = Action.parse("0SEND_F0"), Action.parse("0RECV_B0")
    assert delays[receive] == (send, 1.0 + 2.0)  # F and B of the other rank


def test_what_does_not_fit_has_no_step(monkeypatch, capsys):
    def fail(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Rehearsal, "measure_stages", fail)
    size = Size(64, 64, 2, 2, 4, 0, 16, torch.device("cpu"))
    assert measure(size, Variant("uniform"), SPEED, 1) is None
    assert "uniform: no room" in capsys.readouterr().out


def test_slow_copies_keep_the_plans_peaks(capsys):
    sizes = ["--ranks", "2", "--microbatches", "4", "--milliseconds", "1", "--steps", "1"]
    offload_emulated.main(sizes)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["none", "half", "half", "full", "full"]
    assert all(row[5] == row[6] for row in rows)
