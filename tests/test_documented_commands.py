"""Every command in the README and in docs/ runs as it is written there, or at least is understood.

The commands in the headers of the examples are tried in ``test_examples``.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest

from lightning_pipeoffload import plan
from tests.support.pairs import slow

ROOT = Path(__file__).parents[1]
TEXT = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SMALL = [
    *("trainer=cpu", "trainer.max_steps=2", "trainer.val_check_interval=1.0", "model.width=16"),
    *("data.num_val_windows=16", "model.context=16", "data.context=16"),
]


def commands(name):
    """List the arguments of a command, in blocks of code and in running text."""
    lines = re.findall(rf"^{name} +(\S.*)$", TEXT, re.MULTILINE)
    inline = re.findall(rf"`{name}\s+([^`]*=[^`]*)`", TEXT)
    return sorted({" ".join(found.partition("#")[0].split()) for found in [*lines, *inline]})


def test_there_are_commands():
    assert len(commands("pipeoffload-plan")) >= 6
    assert len(commands("pipeoffload-train")) >= 1


# The solver searches for half a minute, a sweep plans every family; both have tests elsewhere.
LONG = ("optpipe", "sweep=")


@pytest.mark.parametrize(
    "line",
    [
        slow(line) if any(word in line for word in LONG) else line
        for line in commands("pipeoffload-plan")
    ],
)
def test_a_plan_is_made(line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeoffload-plan", *shlex.split(line)])
    plan.main()
    assert "bubble" in capsys.readouterr().out
    for picture in re.findall(r"picture=(\S+)", line):
        assert (tmp_path / picture).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("line", commands("pipeoffload-train"))
def test_a_training_runs(line, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lightning_pipeoffload.train", *shlex.split(line), *SMALL],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake (train|test|docs|gpu)\b", TEXT))))
def test_make_knows_the_target(target):
    make = ["make", "--dry-run", target, f"PYTHON={sys.executable}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_several_nodes_under_slurm(monkeypatch):
    (line,) = re.findall(r"^srun (.*) python train.py +# Trainer\((.*)\)$", TEXT, re.MULTILINE)
    nodes, tasks = re.findall(r"=(\d+)", line[0])
    for name, value in {"NTASKS": int(nodes) * int(tasks), "NTASKS_PER_NODE": tasks}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    for name, value in {"JOB_NAME": "train", "NNODES": nodes, "PROCID": 0, "LOCALID": 0}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    trainer = L.Trainer(**eval(f"dict({line[1]})"), accelerator="cpu", logger=False)
    assert trainer.world_size == int(nodes) * int(tasks)
