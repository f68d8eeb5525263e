"""The check of a GPU, as far as the CPU can run it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from examples.benchmarks import gpu_check, gpu_fits, gpu_hops, gpu_pair, gpu_part, gpu_parts
from examples.benchmarks.gpu_check import PARTS, Part
from tests.support.forks import fork
from tests.support.pairs import some

CPU = torch.device("cpu")
ALONE = [
    gpu_parts.exactness, gpu_parts.late_copies, gpu_parts.host_waits, gpu_parts.casts,
    gpu_parts.live_bytes, gpu_parts.split, gpu_parts.offload, gpu_hops.held_multiprocessors,
    gpu_hops.hops_of_threads, gpu_fits.host_waits_of_a_trainer, gpu_fits.fits,
]  # fmt: skip
IN_PAIRS = [gpu_hops.hops_of_processes, gpu_fits.two_processes, gpu_fits.blame]


def test_without_an_accelerator_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: None)
    assert gpu_check.main([]) == 2
    assert "no accelerator" in capsys.readouterr().out


def test_every_part_is_tried_here_and_they_end_in_time():
    assert {part.function for part in PARTS} == {*ALONE, *IN_PAIRS}
    assert gpu_check._ALL_SECONDS <= 480
    assert all(part.seconds <= 90 for part in PARTS)


# What the other parts call has tests of its own on the CPU.
@pytest.mark.parametrize("part", some(ALONE[::-1], 4), ids=lambda part: part.__name__)
def test_a_part_runs(part):
    assert list(part(CPU))


def run_quickly(file, arguments, environment):
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    gpu_part.main(arguments)


@pytest.mark.parametrize("part", some(IN_PAIRS, 3), ids=lambda part: part.__name__)
def test_a_part_of_two_processes_runs(part, monkeypatch, tmp_path):
    def start(command, env, **options):
        file = tmp_path / f"{env['NODE_RANK']}_{len([*tmp_path.iterdir()])}"
        process = fork(run_quickly, str(file), command[3:], env)

        def communicate():
            process.join()
            return file.read_text(), None

        return SimpleNamespace(communicate=communicate)

    monkeypatch.setattr(gpu_pair.subprocess, "Popen", start)
    assert list(part(CPU))


def a_part(device):
    yield from ()


@pytest.mark.parametrize(
    ("code", "rows", "is_well"),
    [
        ("print('row: found')", ["found", "done in 0 s"], True),
        ("print('row: found'); 1 / 0", ["found", "FAILED with status 1 after 0 s"], False),
        ("import time; time.sleep(60)", ["FAILED with status -9 after 1 s"], False),
    ],
)
def test_rows_come_and_are_kept_whatever_becomes_of_a_part(
    monkeypatch, tmp_path, capsys, code, rows, is_well
):
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: popen([*command[:3], sys.executable, "-c", code], **options),
    )
    file = tmp_path / "rows.md"
    assert gpu_check.check([Part(a_part, 1)], file) is is_well
    found = [line.split("|")[2].strip() for line in file.read_text().splitlines()]
    assert [row.split(" after")[0].split(" in ")[0] for row in found] == [
        row.split(" after")[0].split(" in ")[0] for row in rows
    ]
    assert capsys.readouterr().out == file.read_text()


@pytest.mark.slow
def test_it_needs_no_hydra():
    code = (
        "import sys; sys.modules['hydra'] = sys.modules['omegaconf'] = None\n"
        "import examples.benchmarks.gpu_check"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
