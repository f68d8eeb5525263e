"""Replicas train what one device would on their batches together."""

from functools import partial

import lightning as L
import pytest
import torch

from lightning_pipeoffload.loop import refuse_sync_batch_norm
from tests.support import fits, replica_fits
from tests.support.pairs import slow


def plain(found, module, **options):
    L.seed_everything(7, workers=True, verbose=False)
    return replica_fits.train_plain(
        replica_fits.Net(**module), replica_fits.joined(found), **options
    )


def assert_same(path, expected):
    state = torch.load(path, weights_only=False)["state_dict"]
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("replicas", "ranks_", "options"),
    [
        (2, 2, {"schedule": "zb_v", "rank_order": "data_inner", "module": {"frozen": "embed"}}),
        slow((2, 1, {"schedule": "1f1b"})),
        slow((2, 2, {"schedule": "zb_h1", "module": {"tie": True}})),
    ],
)
def test_weights_are_those_of_all_batches_together(ranks, tmp_path, replicas, ranks_, options):
    path = str(tmp_path / "trained.ckpt")
    train = partial(replica_fits.train, **options)
    found = ranks(replicas * ranks_).run(train, replicas, ranks_, path)
    assert len({str(each["tokens"]) for each in found}) == replicas
    assert_same(path, plain(found, options.get("module", {})))


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "rank_order": "data_inner"},
        slow({"schedule": "uniform", "offload": "half"}),
    ],
)
def test_batches_that_accumulate_are_reduced_once(ranks, tmp_path, options):
    path = str(tmp_path / "trained.ckpt")
    train = partial(replica_fits.train, trainer={"accumulate_grad_batches": 2}, **options)
    found = ranks(4).run(train, 2, 2, path)
    assert len(found[0]["tokens"]) == 2 * 5
    assert_same(path, plain(found, {}, accumulate=2))


def test_batchnorm_over_replicas_is_refused():
    trainer = L.Trainer(**fits.SILENT, sync_batchnorm=True)
    refuse_sync_batch_norm(trainer, 1)
    with pytest.raises(ValueError, match="sync_batchnorm=True is not built over .*=2 replicas"):
        refuse_sync_batch_norm(trainer, 2)
