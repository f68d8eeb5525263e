"""The benchmark of what ``schedule="auto"`` chooses, on the wall, at a tiny size."""

import subprocess
import sys

import pytest

from examples.benchmarks.auto_wall import HEADER, settings
from lightning_pipeoffload.schedule import peak_memory, split_fused_backward

COMMAND = [sys.executable, "-m", "examples.benchmarks.auto_choice", "--wall"]
TINY = ["--p", "2", "--m", "4", "--milliseconds", "2", "--steps", "1", "--hands", "1"]


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
    done = subprocess.run([*COMMAND, *TINY, *only], check=True, capture_output=True, text=True)
    header, _, *rows = [line[2:-2].split(" | ") for line in done.stdout.splitlines()]
    assert header == HEADER
    found = [dict(zip(HEADER, row, strict=True)) for row in rows]
    assert [row["limit"] for row in found] == ["none", "loose"]
    assert all(float(row["measured, ms"]) > 0 for row in found)
    assert [row["the plan's"] for row in found] == ["the same"] * 2
