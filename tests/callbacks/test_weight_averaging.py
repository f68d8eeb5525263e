"""Callbacks that average weights: each rank its own part, as on one device."""

from __future__ import annotations

import pytest
import torch

from tests.support.averaging_fits import average

FOLDER = {"save_distributed_checkpoint": True}


def same(found, plain):
    losses = torch.tensor(found["losses"]), torch.tensor(plain["losses"])
    assert torch.allclose(*losses, rtol=0, atol=1e-9)
    assert found["weights"].keys() == plain["weights"].keys()
    for name, value in plain["weights"].items():
        expected = torch.tensor(value, dtype=torch.float64)
        mine = torch.tensor(found["weights"][name], dtype=torch.float64)
        assert torch.allclose(mine, expected, rtol=0, atol=1e-9), name


@pytest.mark.parametrize(
    ("size", "name", "options"),
    [
        (2, "mean", {}),
        (3, "ema", {"schedule": "zb_v", **FOLDER}),
        (2, "foreach", FOLDER),
        (2, "swa", {"schedule": "zb_v", **FOLDER}),
        (3, "teacher on_fit_start", FOLDER),
    ],
)
def test_weights_and_validation_are_those_of_one_device_after_a_resume_too(
    ranks, tmp_path, size, name, options
):
    plain, split = str(tmp_path / "plain"), str(tmp_path / "split")
    paths = f"{plain}/last.ckpt", f"{split}/last.ckpt"
    same(
        ranks(size).run(average, size, name, split, 3, None, options)[0],
        average(0, name, plain, 3, None, {}),
    )
    rest = average(0, name, f"{plain}/rest", 4, paths[0], {})
    same(ranks(size).run(average, size, name, f"{split}/rest", 4, paths[1], options)[0], rest)
    if not options.get("save_distributed_checkpoint"):
        same(average(0, name, f"{plain}/crossed", 4, paths[1], {}), rest)
