"""Replicas that share out the optimizer's step train what one device would."""

from __future__ import annotations

import pytest
import torch

from lightning_pipeoffload.runtime.leaves import tensors_in
from tests.support import replica_fits, shared_steps

SHARED = {"sharding": "optimizer"}


def run(ranks, replicas, num_ranks, module, *fits_in_turn):
    """Run fits; return what each process found, and what one device makes of the same batches."""
    pool = ranks(replicas * num_ranks)
    found = pool.run(shared_steps.train, replicas, num_ranks, module, list(fits_in_turn))
    accumulate = fits_in_turn[0].get("trainer", {}).get("accumulate_grad_batches", 1)
    return found, shared_steps.train_plain(replica_fits.joined(found), accumulate, **module)


def assert_same(path, expected):
    """Compare a checkpoint's weights, and what its optimizer keeps, with those of one device."""
    found = torch.load(path, weights_only=False)
    state, plain = found["optimizer_states"][0], expected["optimizer"]
    assert state["state"].keys() == plain["state"].keys()
    assert [g["params"] for g in state["param_groups"]] == [
        g["params"] for g in plain["param_groups"]
    ]
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], **close)
    torch.testing.assert_close(state["state"], plain["state"], **close)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("foreach", {}),
        ("sgd", {"trainer": {"accumulate_grad_batches": 2}}),
        ("adafactor", {}),
    ],
)
def test_replicas_of_one_rank_train_what_one_device_does(ranks, tmp_path, optimizer, options):
    path = str(tmp_path / "trained.ckpt")
    module = {"optimizer": optimizer, "frozen": "embed"}
    found, expected = run(ranks, 2, 1, module, {**SHARED, "save": path, "steps": 4, **options})
    assert_same(path, expected)
    kept = sum(t.nbytes for t in tensors_in(expected["optimizer"]["state"]))
    for each in found:
        assert each["numbers"][0]["kept"] == pytest.approx(kept / 2, rel=0.05)


def test_a_fit_goes_on_in_either_form_with_the_step_shared_out_or_not(ranks, tmp_path):
    file, folder, shared, last = (str(tmp_path / f"{n}.ckpt") for n in range(4))
    in_folder = {"save_distributed_checkpoint": True}
    found, expected = run(
        ranks,
        2,
        2,
        {"tie": True},
        {**SHARED, "steps": 2, "save": file},
        {**in_folder, "steps": 3, "resume": file, "save": folder},
        {**SHARED, **in_folder, "steps": 4, "resume": folder, "save": shared},
        {**SHARED, "steps": 5, "resume": shared, "save": last},
    )
    assert_same(last, expected)
    for each in found:
        shared, whole, *_ = each["numbers"]
        for figure in ("kept", "estimated"):
            assert shared[figure] == pytest.approx(whole[figure] / 2, rel=0.05)
