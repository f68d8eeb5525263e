"""The check of a GPU, as far as the CPU can run it."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from examples.benchmarks import (
    gpu_check,
    gpu_fits,
    gpu_llama,
    gpu_nccl,
    gpu_parts,
    gpu_process,
    gpu_ranks,
    gpu_roads,
    gpu_slices,
    gpu_spin,
    gpu_triton,
)
from examples.benchmarks.gpu_check import ON_DEMAND, PARTS, Part
from lightning_pipeoffload.demos import GPT
from tests.support.forks import FORKS
from tests.support.pairs import first, slow

CPU = torch.device("cpu")
# The first of each are in the default run; what the others call has tests of its own on the CPU.
ALONE = [
    gpu_parts.late_copies, gpu_llama.products, gpu_spin.waits_during_a_kernel, gpu_llama.rehearsed,
    gpu_llama.llama, gpu_llama.compiled, gpu_parts.late_copies_under_sanitizer,
    gpu_parts.exactness, gpu_parts.casts, gpu_parts.offload,
    gpu_parts.tests_of_gpus, gpu_ranks.held_multiprocessors, gpu_fits.fits, gpu_fits.quantized,
    gpu_fits.host_step, gpu_triton.triton_kernels, gpu_llama.liger, gpu_slices.block_slices,
    gpu_llama.float8, gpu_roads.sliced_llama, gpu_roads.called_twice,
]  # fmt: skip
IN_PAIRS = [
    gpu_spin.spinning_messages, gpu_ranks.two_ranks, gpu_fits.two_processes, gpu_fits.on_demand,
    gpu_fits.ways_of_two_processes, gpu_fits.blame, gpu_roads.tensor_ranks,
    gpu_nccl.nccl_open_receives, gpu_nccl.nccl_killed, gpu_nccl.nccl_default, gpu_nccl.nccl_ranks,
    gpu_nccl.nccl_ways, gpu_nccl.nccl_and_torch, gpu_nccl.shared_link,
]  # fmt: skip


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """Fork from a process that has run nothing, as ``make gpu`` does: this one has threads."""
    monkeypatch.setattr(gpu_process, "PROCESSES", FORKS)


def test_without_an_accelerator_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert gpu_check.main([]) == 2
    assert "no accelerator" in capsys.readouterr().out


def test_every_part_is_tried_here():
    assert {part.function for part in [*PARTS, *ON_DEMAND]} == {*ALONE, *IN_PAIRS}


@pytest.mark.parametrize("part", first(2, ALONE), ids=lambda part: part.__name__)
def test_a_part_runs(part):
    assert list(part(CPU))


@pytest.mark.parametrize("part", first(0, IN_PAIRS), ids=lambda part: part.__name__)
def test_a_part_of_two_processes_runs(part):
    assert list(part(CPU))


class Hanging(GPT):
    """Hangs on global rank 1 in the middle of the second step of one schedule."""

    def on_before_zero_grad(self, optimizer):
        strategy, step = self.trainer.strategy, self.trainer.global_step
        if (strategy.plan.name, strategy.global_rank, step) == ("interleaved_1f1b", 1, 1):
            self.hang()

    def hang(self):
        time.sleep(1000)


class Stopped(Hanging):
    def hang(self):
        os.kill(os.getpid(), signal.SIGSTOP)  # so that it reports nothing either


def be_rank_that_sleeps(device, module=Hanging):
    gpu_nccl.GPT, gpu_nccl.SECONDS_ON_CPU = module, 100.0
    yield from gpu_nccl.be_rank(device)


def be_rank_that_is_stopped(device):
    yield from be_rank_that_sleeps(device, Stopped)


@pytest.mark.slow
@pytest.mark.parametrize("be_rank", [be_rank_that_sleeps, be_rank_that_is_stopped])
def test_a_hang_is_reported_and_the_next_schedule_goes_on(monkeypatch, be_rank):
    monkeypatch.setattr(gpu_nccl, "be_rank", be_rank)
    names = ["zb_h1", "interleaved_1f1b", "1f1b"]
    alone = dict.fromkeys([gpu_nccl._AUTO, gpu_nccl._FULL], "")
    rows = [*gpu_nccl._rows_of_group(CPU, 2, names, alone)]
    assert "interleaved_1f1b did not end" in rows
    waits, hangs = (row for row in rows if row.startswith("interleaved_1f1b, rank "))
    # Which of its messages the other one still sends depends on when it is stopped.
    assert re.search(r"HANGS in [13][FB]\d, open receives \['[13]RECV_[FB]\d", waits)
    assert ("HANGS in " in hangs) is (be_rank is be_rank_that_sleeps)
    assert rows[-1].startswith("1f1b, ")  # the next one has run


def ends_well(device):
    yield f"found on {device}, {os.environ['PLACE']}"


def fails(device):
    yield "found"
    raise ZeroDivisionError("by\nzero")


def hangs(device):
    subprocess.Popen(["sleep", "1000"])
    yield "found"
    time.sleep(1000)


def runs_two(device):
    for said in gpu_process.run_two(ends_well, device):
        yield from gpu_process.rows_of(said)


def leaves_one_behind(device):
    subprocess.Popen(["sleep", "1000"])
    yield "found"


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (ends_well, ["found on cpu, here", "done in"]),
        (fails, ["found", "error: ZeroDivisionError at test_gpu_check", "FAILED with status 1"]),
        (runs_two, ["found on cpu, here", "found on cpu, here", "done in"]),
        slow((hangs, ["found", "cut after"])),
        (leaves_one_behind, ["found", "done in"]),
    ],
)
def test_rows_come_and_are_kept_whatever_becomes_of_a_part(tmp_path, capsys, function, rows):
    part = Part(function, 20 if function is hangs else 600, {"PLACE": "here"})
    started = time.monotonic()
    is_well = gpu_check.check([part], CPU, tmp_path / "rows.md")
    assert time.monotonic() - started < 500  # so nobody waits for what a part has left behind
    assert is_well is ("FAILED" not in rows[-1])
    lines = (tmp_path / "rows.md").read_text().splitlines()
    found = [line.split("|")[2].strip() for line in lines]
    assert [row[: len(start)] for row, start in zip(found, rows, strict=True)] == rows
    assert capsys.readouterr().out.splitlines() == lines
    assert ("ZeroDivisionError" in (tmp_path / "rows.log").read_text()) is (function is fails)


def test_what_no_time_is_left_for_is_left_out(tmp_path, capsys):
    assert gpu_check.check([Part(fails, 60)], CPU, tmp_path / "rows.md", until=time.monotonic())
    assert "left out" in capsys.readouterr().out


@pytest.mark.slow
def test_it_needs_no_hydra():
    code = (
        "import sys; sys.modules['hydra'] = sys.modules['omegaconf'] = None\n"
        "import examples.benchmarks.gpu_check"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
