"""The check of a GPU, as far as the CPU can run it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from examples.benchmarks import gpu_check, gpu_parts
from examples.benchmarks.gpu_check import PARTS, Part

CPU = torch.device("cpu")


def test_without_an_accelerator_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: None)
    assert gpu_check.main([]) == 2
    assert "no accelerator" in capsys.readouterr().out


def test_every_part_is_there_and_they_end_in_time():
    assert all(callable(getattr(gpu_parts, part.name)) for part in PARTS)
    assert gpu_check._ALL_SECONDS <= 480


@pytest.mark.parametrize("name", ["exactness", "late_copies", "host_waits", "held_multiprocessors"])
def test_a_part_runs(name):
    assert list(getattr(gpu_parts, name)(CPU))


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
    assert gpu_check.check([Part("a_part", 1)], file) is is_well
    found = [line.split("|")[2].strip() for line in file.read_text().splitlines()]
    assert [row.split(" after")[0].split(" in ")[0] for row in found] == [
        row.split(" after")[0].split(" in ")[0] for row in rows
    ]
    assert capsys.readouterr().out == file.read_text()


def test_it_needs_no_hydra():
    code = (
        "import sys; sys.modules['hydra'] = sys.modules['omegaconf'] = None\n"
        "import examples.benchmarks.gpu_check"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
