"""Lightning's habits over a pipeline of two ranks, against one device on the same loop."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch

from tests import habits


@cache
def on_one_device(row):
    with TemporaryDirectory() as folder:
        return habits.run(row, 0, "", folder)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("row", habits.ROWS)
def test_a_habit_is_as_on_one_device(ranks, tmp_path, row, schedule):
    expected = on_one_device(row)
    for outcome in ranks(2).run(habits.run, row, 2, schedule, str(tmp_path)):
        numbers = {name: expected["numbers"][name] for name in outcome["numbers"]}
        torch.testing.assert_close(outcome["numbers"], numbers, rtol=1e-10, atol=1e-12)
        for what in ("hooks", "files", "progress"):
            assert outcome[what] == expected[what]
